"""Streams pause between writes exactly while the event loop runs late."""

import asyncio
import time

from headway_gateway.calls.pacing import WritePace


async def test_an_idle_loop_asks_for_no_pause_and_a_busy_one_for_a_bounded_one():
    pace = WritePace()
    pace.begin()
    assert pace.pause_s == 0.0
    for _ in range(20):
        await asyncio.sleep(0.005)
        time.sleep(0.04)  # noqa: ASYNC251  # what is being tested
    assert 0.01 < pace.pause_s <= 0.04
    pace.end()
    pace.begin()
    assert pace.pause_s == 0.0, "an earlier burst is forgotten"
    pace.end()


async def test_nothing_is_measured_while_nobody_writes():
    pace = WritePace()
    for _ in range(2):
        pace.begin()
    await asyncio.sleep(0.03)
    for _ in range(2):
        pace.end()
    assert pace._timer.cancelled()
