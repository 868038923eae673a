"""The forecast of memory demand against the same demand worked out request by request and step by step."""

from fractions import Fraction
from math import ceil, sqrt

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headway_scheduler.core.memory.memory_forecast import MARGIN, MemoryForecast, horizons

BLOCK_SIZES = st.sampled_from([1, 2, 4, 16, 64])
MAX_TOKENS = 300

Running = list[tuple[int, list[int]]]
"""Tokens of each request, and its chances in parts of 1024, descending."""


def running_of(block_size: int) -> st.SearchStrategy[Running]:
    num_horizons = len(horizons(block_size, MAX_TOKENS))
    chances = st.lists(st.integers(0, 1024), min_size=num_horizons, max_size=num_horizons)
    return st.lists(st.tuples(st.integers(1, 500), chances.map(lambda drawn: sorted(drawn, reverse=True))), max_size=12)


SOME = BLOCK_SIZES.flatmap(lambda block_size: st.tuples(st.just(block_size), running_of(block_size)))


def columns(running: Running, block_size: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    num_horizons = len(horizons(block_size, MAX_TOKENS))
    chances = np.array([chances for _, chances in running], dtype=np.float64).reshape(len(running), num_horizons)
    return np.array([num_tokens for num_tokens, _ in running], dtype=np.int64), chances / 1024


def forecast_of(running: Running, block_size: int) -> MemoryForecast:
    forecast = MemoryForecast(block_size, horizons(block_size, MAX_TOKENS))
    forecast.add_all(*columns(running, block_size))
    return forecast


def peak_by_hand(running: Running, block_size: int) -> int:
    """Each request's blocks after each number of steps, as exact fractions."""
    peak = sum(-(-num_tokens // block_size) + (chances[0] > 0) for num_tokens, chances in running)
    for place, steps in enumerate(horizons(block_size, MAX_TOKENS).tolist()):
        mean = variance = Fraction(0)
        for num_tokens, chances in running:
            chance, blocks = Fraction(chances[place], 1024), -(-(num_tokens + steps) // block_size)
            mean += chance * blocks
            variance += chance * (1 - chance) * blocks**2
        peak = max(peak, ceil(float(mean) + MARGIN * sqrt(variance)))
    return peak


def is_peak(num_blocks: int, forecast: MemoryForecast) -> bool:
    """Whether so many blocks will do now and later, and one less would not."""
    return forecast.steps_until(num_blocks) is None and forecast.steps_until(num_blocks - 1) is not None


@given(st.integers(1, 1024), st.integers(1, 1 << 20))
def test_horizons_are_whole_blocks_two_to_an_octave(block_size: int, max_tokens: int) -> None:
    blocks, rest = np.divmod(horizons(block_size, max_tokens), block_size)
    assert not rest.any()
    assert blocks[0] == 1
    assert (blocks[1:] <= 2 * blocks[:-1]).all()
    assert (np.diff(blocks) > 0).all()
    assert blocks[-1] * 2 > max_tokens // block_size
    assert len(blocks) <= 2 * (max_tokens // block_size + 1).bit_length()


@given(SOME)
def test_the_peak_is_the_mean_and_its_margin(case: tuple[int, Running]) -> None:
    block_size, running = case
    assert is_peak(peak_by_hand(running, block_size), forecast_of(running, block_size))


@given(SOME, st.integers(0, 12))
def test_requests_count_alike_however_they_were_taken_in(case: tuple[int, Running], num_first: int) -> None:
    block_size, running = case
    at_once = forecast_of(running, block_size)
    one_by_one = forecast_of(running[:num_first], block_size)
    for num_tokens, chances in reversed(running[num_first:]):
        one_by_one.add(num_tokens, np.array(chances) / 1024)
    peak = peak_by_hand(running, block_size)
    assert is_peak(peak, one_by_one)
    for num_blocks in range(0, peak + 2, 7):
        assert one_by_one.steps_until(num_blocks) == at_once.steps_until(num_blocks)


@given(SOME, st.data())
def test_a_candidate_is_asked_about_as_if_it_ran_but_for_its_next_token(
    case: tuple[int, Running], data: st.DataObject
) -> None:
    block_size, running = case
    num_tokens, chances = data.draw(running_of(block_size).filter(bool))[0]
    forecast = forecast_of(running, block_size)
    asked = forecast.peak_with(num_tokens, np.array(chances) / 1024)
    held = sum(-(-others // block_size) + (going_on[0] > 0) for others, going_on in running)
    next_token = held + -(-(num_tokens + 1) // block_size)
    assert asked == max(peak_by_hand([*running, (num_tokens, chances)], block_size), next_token)


@given(SOME, st.integers(0, 2000))
def test_a_shortage_comes_when_the_demand_has_grown_beyond_what_there_is(
    case: tuple[int, Running], num_blocks: int
) -> None:
    block_size, running = case
    forecast = forecast_of(running, block_size)
    steps = forecast.steps_until(num_blocks)
    assert (steps is None) == (peak_by_hand(running, block_size) <= num_blocks)
    assert steps is None or 0 <= steps <= MAX_TOKENS
    more = forecast.steps_until(num_blocks + 1)
    assert more is None or (steps is not None and steps <= more)


def test_requests_that_surely_go_on_grow_by_a_block_every_block_size_steps() -> None:
    forecast = MemoryForecast(16, horizons(16, 256))
    forecast.add_all(np.array([160, 320]), np.ones((2, len(horizons(16, 256)))))
    assert is_peak(10 + 20 + 2 * 16, forecast)
    assert forecast.steps_until(31) == 0  # a block for each is wanted beside what they hold
    assert forecast.steps_until(34) == 32


def test_without_chances_a_request_counts_with_what_it_holds() -> None:
    nothing_known = np.zeros(len(horizons(16, 256)))
    forecast = MemoryForecast(16, horizons(16, 256))
    forecast.add(160, nothing_known)
    assert is_peak(10, forecast)
    assert forecast.peak_with(160, nothing_known) == 10 + 11  # and finds room for its next token
    assert forecast.peak_with(161, nothing_known) == 10 + 11


def test_many_uncertain_requests_need_less_than_all_their_expected_lengths() -> None:
    """A hundred answers of which nine in ten end within 32 steps, and the rest go on to 512: a mean of 77.6.

    If each grew to its mean, they would want a hundred times ceil((160 + 77) / 16) blocks, which is 1500.
    """
    steps = horizons(16, 512)
    chances = np.where(steps < 32, 1.0, np.where(steps <= 512, 0.1, 0.0)).round(3)
    forecast = MemoryForecast(16, steps)
    forecast.add_all(np.full(100, 160), np.tile(np.rint(chances * 1024) / 1024, (100, 1)))
    assert is_peak(1100, forecast)


def test_nobody_runs() -> None:
    forecast = forecast_of([], 16)
    assert is_peak(0, forecast)
