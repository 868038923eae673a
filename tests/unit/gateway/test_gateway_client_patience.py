"""Who reads too slowly, and who only seems to."""

import asyncio
import time

import pytest

from headway_gateway.calls.client_patience import ClientPatience


async def one_write(patience: ClientPatience, takes_s: float, stands_still_s: float = 0.0) -> None:
    """A stream of one write; meanwhile the whole process may stand still, as under SIGSTOP."""
    async with patience:
        patience.begin_write()
        asyncio.get_running_loop().call_soon(time.sleep, stands_still_s)
        await asyncio.sleep(takes_s)


async def test_a_write_that_waits_for_too_long_ends_the_stream():
    patience = ClientPatience(0.2)
    began_at = time.monotonic()
    with pytest.raises(TimeoutError):
        await one_write(patience, 10)
    assert patience.has_ended
    assert 0.2 <= time.monotonic() - began_at < 5


async def test_writes_that_get_through_and_rests_between_them_take_as_long_as_they_like():
    async with ClientPatience(0.1) as patience:
        for _ in range(8):
            patience.begin_write()
            await asyncio.sleep(0.03)
        patience.rest()
        await asyncio.sleep(0.3)


async def test_while_the_gateway_stood_still_nobody_was_slow():
    patience = ClientPatience(0.2)
    await one_write(patience, 0.65, stands_still_s=0.6)
    assert not patience.has_ended


async def test_a_timeout_of_somebody_else_is_not_taken_for_it():
    patience = ClientPatience(10.0)
    with pytest.raises(TimeoutError):
        async with patience:
            raise TimeoutError
    assert not patience.has_ended
