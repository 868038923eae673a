"""The forecast of memory demand against growth that is played out step by step."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headway_scheduler.core.memory_forecast import MemoryForecast, peak_blocks

RUNNING = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 40)), max_size=12)
BLOCK_SIZES = st.sampled_from([1, 2, 3, 4, 16, 64])


def columns(running: list[tuple[int, int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return (
        np.array([num_tokens for num_tokens, _ in running], dtype=np.int64),
        np.array([remaining for _, remaining in running], dtype=np.int64),
    )


def demand_by_step(running: list[tuple[int, int]], block_size: int) -> list[int]:
    """Blocks held after each step, until nobody runs."""
    last = max((remaining for _, remaining in running), default=-1)
    return [
        sum(-(-(num_tokens + step) // block_size) for num_tokens, remaining in running if remaining >= step)
        for step in range(last + 1)
    ]


@given(RUNNING, BLOCK_SIZES)
def test_the_peak_is_that_of_growth_played_out(running: list[tuple[int, int]], block_size: int) -> None:
    assert peak_blocks(*columns(running), block_size) == max(demand_by_step(running, block_size), default=0)


@given(RUNNING, RUNNING, BLOCK_SIZES)
def test_candidates_are_asked_about_and_taken_in_one_by_one(
    running: list[tuple[int, int]], candidates: list[tuple[int, int]], block_size: int
) -> None:
    forecast = MemoryForecast(*columns(running), block_size)
    for place, candidate in enumerate(candidates):
        expected = max(demand_by_step([*running, *candidates[: place + 1]], block_size))
        assert forecast.peak_with(*candidate) == expected
        forecast.add(*candidate)
        assert forecast.peak_blocks == expected


@given(RUNNING, RUNNING, BLOCK_SIZES, st.integers(0, 300))
def test_when_the_demand_first_exceeds_what_there_is(
    running: list[tuple[int, int]], added: list[tuple[int, int]], block_size: int, num_blocks: int
) -> None:
    forecast = MemoryForecast(*columns(running), block_size)
    for request in added:
        forecast.add(*request)
    demand = demand_by_step([*running, *added], block_size)
    exceeding = [step for step, blocks in enumerate(demand) if blocks > num_blocks]
    assert forecast.steps_until(num_blocks) == (exceeding[0] if exceeding else None)


@given(RUNNING, BLOCK_SIZES)
def test_a_request_that_ends_before_others_have_grown_makes_room(
    running: list[tuple[int, int]], block_size: int
) -> None:
    together = sum(-(-(num_tokens + remaining) // block_size) for num_tokens, remaining in running)
    assert peak_blocks(*columns(running), block_size) <= together


def test_the_example_of_three_requests() -> None:
    # After one step 3 + 8 + 2 places; after three steps 10 + 4; after nine 10.
    running = columns([(2, 1), (7, 3), (1, 9)])
    assert peak_blocks(*running, block_size=1) == 14
    assert MemoryForecast(*running, 1).steps_until(12) == 1
    assert MemoryForecast(*running, 1).steps_until(13) == 3
    assert MemoryForecast(*running, 1).steps_until(14) is None


def test_demand_may_be_exceeded_in_the_step_after_an_end() -> None:
    # One block each; then the first ends and both others begin another one.
    assert MemoryForecast(*columns([(4, 0), (4, 9), (4, 9)]), 4).steps_until(3) == 1


def test_nobody_runs() -> None:
    forecast = MemoryForecast(*columns([]), 16)
    assert forecast.peak_blocks == 0
    assert forecast.steps_until(0) is None
    assert forecast.peak_with(10, 7) == 2
    forecast.add(10, 7)
    assert forecast.peak_blocks == 2
    assert forecast.steps_until(1) == 7


def test_part_of_a_step_counts_as_a_step() -> None:
    forecast = MemoryForecast(np.array([4]), np.array([0.25]), 4)
    assert forecast.peak_blocks == 2
    # After one step 5 + 4 places; after two 5.
    assert forecast.peak_with(3, 1.5) == 3
    forecast.add(3, 1.5)
    assert forecast.peak_blocks == 3
    assert MemoryForecast(np.array([3]), np.array([1.5]), 4).peak_blocks == 2


@st.composite
def sharing(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[int]]:
    """Requests that all begin with the same blocks; every one but a last to end counts them with that one."""
    num_shared = draw(st.integers(0, 4))
    running = draw(st.lists(st.tuples(st.integers(16, 70), st.integers(0, 40)), min_size=1, max_size=10))
    holder = max(range(len(running)), key=lambda place: running[place][1])
    return running, [0 if place == holder else num_shared for place in range(len(running))]


@given(sharing())
def test_shared_blocks_are_counted_with_the_holder_that_ends_last(
    case: tuple[list[tuple[int, int]], list[int]],
) -> None:
    running, num_shared = case
    block_size = 4
    prefix = max(num_shared)
    last = max(remaining for _, remaining in running)
    expected = 0
    for step in range(last + 1):
        alive = [num_tokens for num_tokens, remaining in running if remaining >= step]
        own = sum(-(-(num_tokens + step) // block_size) - prefix for num_tokens in alive)
        expected = max(expected, own + prefix)
    num_tokens, remaining = columns(running)
    forecast = MemoryForecast(num_tokens, remaining, block_size, num_shared_blocks=np.array(num_shared))
    assert forecast.peak_blocks == expected

    *others, newest = range(len(running))
    before = MemoryForecast(
        num_tokens[others], remaining[others], block_size, num_shared_blocks=np.array(num_shared, dtype=int)[others]
    )
    assert before.peak_with(*running[newest], num_shared_blocks=num_shared[newest]) == expected
    before.add(*running[newest], num_shared_blocks=num_shared[newest])
    assert before.peak_blocks == expected
