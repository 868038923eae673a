"""Turns go round those who wait, and whatever happens to one who waits, the next has its turn."""

import asyncio
from contextlib import suppress

import pytest

from headway_gateway.text.fair_turns import FairTurns, TooManyWaitError


def turns(most_at_once: int = 1, of_one: int = 100, in_all: int = 100) -> FairTurns:
    return FairTurns(most_at_once, most_waiting_of_one=of_one, most_waiting=in_all)


async def worked_off(given: FairTurns, callers: str) -> str:
    """In which order the requests of ``callers`` have their turns."""
    order = []

    async def work(caller: str) -> None:
        await given.take(caller)
        order.append(caller)
        await asyncio.sleep(0)
        given.give_back(caller)

    await asyncio.gather(*map(work, callers))
    return "".join(order)


async def test_turns_go_round_the_callers() -> None:
    given = turns()
    assert await worked_off(given, "aaaabbc") == "abcabaa"
    assert given.num_waiting == 0


async def test_a_caller_has_one_turn_at_a_time_and_the_rest_is_for_others() -> None:
    given = turns(2)
    await given.take("a")
    second = asyncio.create_task(given.take("a"))
    await asyncio.sleep(0)
    await asyncio.wait_for(given.take("b"), 1)
    assert not second.done()
    given.give_back("a")
    await asyncio.wait_for(second, 1)


async def test_who_leaves_takes_no_turn_along() -> None:
    given = turns()
    await given.take("a")
    tasks = [asyncio.create_task(given.take(caller)) for caller in "bcd"]
    await asyncio.sleep(0)
    tasks[0].cancel()  # while it waits
    await asyncio.sleep(0)
    given.give_back("a")
    tasks[1].cancel()  # at the moment when its turn has come
    with suppress(asyncio.CancelledError):
        await tasks[1]
    await asyncio.wait_for(tasks[2], 1)
    given.give_back("d")
    assert given.num_waiting == 0


async def test_only_so_many_wait_of_one_and_in_all() -> None:
    given = turns(of_one=2, in_all=3)
    await given.take("a")
    waiting = [asyncio.create_task(given.take(caller)) for caller in "bbc"]
    await asyncio.sleep(0)
    with pytest.raises(TooManyWaitError, match="2 of this caller are waiting; allowed: 2"):
        await given.take("b")
    with pytest.raises(TooManyWaitError, match="3 are waiting; allowed: 3"):
        await given.take("d")
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert given.num_waiting == 0
