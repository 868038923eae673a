"""Predictions against a plain life table, and their independence of who asks when.

Owns: a product-limit estimate over the same bins in plain Python. Must not know: how the curves are stored.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway_scheduler.core.policies.output_lengths import ALL_REQUESTS, OutputLengths

TOLERANCE = Fraction(1, 10**6)
OBSERVATIONS = st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=8, max_size=60)


STEPS = np.array([1, 2, 16, 64, 256], dtype=np.int64)


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
    answer = outputs.predicted_output(ALL_REQUESTS, age, limit)
    place = bisect_right(edges, age) - 1
    if abs(at_risk[place] - 8) < TOLERANCE and answer is None:
        return  # Parts of requests add up to 8, and in floats to a little less.
    if at_risk[place] < 8:
        assert answer is None
        return
    assert answer is not None
    expected = sum(survival[age:limit], Fraction(0)) / survival[age]
    assert -TOLERANCE <= answer - age - expected < 1 + TOLERANCE
    # All ages in a bin have the chances of its middle.
    middle = edges[place] + (edges[place + 1] - edges[place]) // 2
    steps = np.array([step for step in (1, 2, 5, 15) if middle + step < len(survival)])
    [chances] = outputs.chances_to_go_on(np.array([ALL_REQUESTS]), np.array([age]), np.array([1000]), steps)
    for step, chance in zip(steps.tolist(), chances.tolist(), strict=True):
        assert abs(Fraction(chance) - survival[middle + step] / survival[middle]) <= Fraction(1, 2048) + TOLERANCE


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
            asked.chances_to_go_on(recent, np.full(len(recent), place), np.full(len(recent), 500), STEPS)
            asked.predicted_output(curve, 0, 100)
    if not names:
        return
    rows = np.repeat(np.unique(names), 60)
    ages = np.tile(np.arange(60) * 5, len(rows) // 60)
    limits = np.full(len(rows), 1000)
    answers, answers_again = (outputs.chances_to_go_on(rows, ages, limits, STEPS) for outputs in (quiet, asked))
    assert answers.tobytes() == answers_again.tobytes()
    for curve, age in zip(rows.tolist(), ages.tolist(), strict=True):
        assert quiet.predicted_output(curve, age, 1000) == asked.predicted_output(curve, age, 1000)


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
        for curve, age in zip(rows.tolist(), ages.tolist(), strict=True):
            predicted = outputs.predicted_output(curve, age, age + left)
            assert predicted is None or age + 1 <= predicted <= age + left
        chances = outputs.chances_to_go_on(rows, ages, ages + left, STEPS)
        assert np.all((chances >= 0) & (chances <= 1))
        assert not chances[:, left <= STEPS].any()
