"""Predictions against a plain life table, and their independence of who asks when.

Owns: a product-limit estimate over the same bins in plain Python. Must not know: how the curves are stored.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway_scheduler.core.output_lengths import ALL_REQUESTS, OutputLengths

OBSERVATIONS = st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=8, max_size=60)


@dataclass(frozen=True)
class Event:
    """A request of a tenant that ended, or was cut."""

    tenant: int
    num_prompt_tokens: int
    length: int
    is_censored: bool


EVENTS = st.lists(
    st.builds(Event, st.integers(0, 5), st.integers(1, 40), st.integers(1, 300), st.booleans()), max_size=120
)


def life_table(observations: list[tuple[int, bool]], edges: list[int]) -> tuple[list[Fraction], list[Fraction]]:
    """P(length > age) for each age up to the last edge, and the requests at risk in each bin; exact."""
    survival, at_risk = [Fraction(1)], []
    for place, (start, end) in enumerate(pairwise(edges)):
        exposure, ended = Fraction(0), 0
        for length, is_censored in observations:
            if not is_censored and bisect_left(edges, length) - 1 == place:
                ended += 1
                exposure += 1
            elif is_censored and bisect_right(edges, length) - 1 == place:
                exposure += Fraction(length - start, end - start)
            elif length > end or (length == end and is_censored):
                exposure += 1
        at_start = survival[-1]
        lost = at_start * ended / exposure if exposure else Fraction(0)
        survival += [at_start - lost * step / (end - start) for step in range(1, end - start + 1)]
        at_risk.append(exposure)
    return survival, at_risk


@given(OBSERVATIONS, st.integers(0, 60), st.integers(0, 60))
def test_the_curve_of_all_requests_is_a_life_table(observations: list[tuple[int, bool]], age: int, limit: int) -> None:
    outputs = OutputLengths(half_life=1 << 60)
    for length, is_censored in observations:
        outputs.observe(ALL_REQUESTS, length, is_censored=is_censored)
    outputs._publish()
    edges = [int(edge) for edge in outputs._edges if edge <= 64]
    survival, at_risk = life_table(observations, edges)
    column = np.array([ALL_REQUESTS]), np.array([age]), np.array([limit])
    answer = outputs.expected_remaining(*column)[0]
    if age >= limit or at_risk[bisect_right(edges, age) - 1] < 8:
        assert answer == max(limit - age, 0)
        return
    assert answer == pytest.approx(float(sum(survival[age:limit]) / survival[age]), rel=1e-7)
    for q in (0.1, 0.5, 0.9, 1.0):
        target = (1 - Fraction(q)) * survival[age]
        enough = outputs.remaining_quantile(*column, q=q)[0]
        assert 1 <= enough <= limit - age
        if enough < limit - age:
            assert survival[age + enough] <= target + Fraction(1, 10**7)
        if enough > 1:
            assert survival[age + enough - 1] >= target - Fraction(1, 10**7)


@given(EVENTS, st.integers(1, 7))
def test_asking_changes_no_later_answer(events: list[Event], period: int) -> None:
    quiet, asked = OutputLengths(max_curves=8), OutputLengths(max_curves=8)
    names: list[int] = []
    for place, event in enumerate(events):
        for outputs in (quiet, asked):
            curve = outputs.curve_of(str(event.tenant), event.num_prompt_tokens)
            outputs.observe(curve, event.length, is_censored=event.is_censored)
        names.append(curve)
        if place % period == 0:
            recent = np.array(names[-5:])
            asked.expected_remaining(recent, np.full(len(recent), place), np.full(len(recent), 500))
            asked.predicted_output(curve, 0, 100)
    if not names:
        return
    rows = np.repeat(np.unique(names), 60)
    ages = np.tile(np.arange(60) * 5, len(rows) // 60)
    limits = np.full(len(rows), 1000)
    assert (
        quiet.expected_remaining(rows, ages, limits).tobytes() == asked.expected_remaining(rows, ages, limits).tobytes()
    )
    assert (
        quiet.remaining_quantile(rows, ages, limits, q=0.8).tobytes()
        == asked.remaining_quantile(rows, ages, limits, q=0.8).tobytes()
    )


@given(EVENTS)
def test_answers_are_within_the_limit_and_at_least_one_token(events: list[Event]) -> None:
    outputs = OutputLengths(max_curves=8, half_life=16)
    names = [ALL_REQUESTS]
    for event in events:
        names.append(outputs.curve_of(str(event.tenant), event.num_prompt_tokens))
        outputs.observe(names[-1], event.length, is_censored=event.is_censored)
    rows = np.repeat(np.unique(names), 40)
    ages = np.tile(np.arange(40) * 9, len(rows) // 40)
    for left in (1, 2, 50, 100_000):
        expected = outputs.expected_remaining(rows, ages, ages + left)
        assert np.all(expected <= left)
        assert np.all(expected >= 1 - 1e-6)
        enough = outputs.remaining_quantile(rows, ages, ages + left, q=0.5)
        assert np.all((enough >= 1) & (enough <= left))
