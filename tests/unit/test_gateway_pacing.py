"""Streams pause between writes exactly while the event loop runs late."""

import asyncio
import time

from headway_gateway.pacing import WritePace


async def test_an_idle_loop_asks_for_no_pause_and_a_busy_one_for_a_bounded_one():
    pace = WritePace()
    with pace.writing():
        assert pace.pause_s == 0.0
        for _ in range(20):
            await asyncio.sleep(0.005)
            time.sleep(0.04)  # noqa: ASYNC251  # what is being tested
        assert 0.01 < pace.pause_s <= 0.04
    with pace.writing():
        assert pace.pause_s == 0.0, "an earlier burst is forgotten"


async def test_nothing_is_measured_while_nobody_writes():
    pace = WritePace()
    with pace.writing(), pace.writing():
        await asyncio.sleep(0.03)
    assert pace._timer.cancelled()
