"""The tightest objective of those that run, and the watch over first tokens of those that wait."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway_scheduler.core.admission.objectives import Danger, FirstTokenWatch, TightestObjective
from headway_scheduler.core.state.request import Request, RequestStatus
from waiting_requests import make_request


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=60))
def test_the_tightest_is_the_least_of_all(changes: list[tuple[bool, int]]) -> None:
    tightest, alive = TightestObjective(), []
    for adds, objective in changes:
        if adds:
            alive.append(objective)
            tightest.change(objective, 1)
        elif objective in alive:
            alive.remove(objective)
            tightest.change(objective, -1)
        assert tightest.tightest_ms == (min(alive) if alive else None)


@pytest.mark.parametrize("asks", [True, False])
def test_requests_that_come_and_go_leave_nothing_behind(asks: bool) -> None:
    """Whether or not anybody asks for the tightest; a client may name any number."""
    tightest = TightestObjective()
    tightest.change(7, 1)
    for number in range(50_000):
        tightest.change(10 + number, 1)
        tightest.change(10 + number, -1)
        if asks and number % 3 == 0:
            assert tightest.tightest_ms == 7
    assert len(tightest._heap) <= 3
    assert tightest._counts == {7: 1}
    tightest.change(7, -1)
    assert tightest.tightest_ms is None
    assert tightest._heap == []
    assert tightest._counts == {}


def waiting(arrival: int, latest_start: float, *, now: float = 0.0) -> Request:
    request = make_request(arrival, now=now)
    request.latest_start = latest_start
    return request


def told(watch: FirstTokenWatch, now: float) -> list[tuple[int, Danger]]:
    return [(request.arrival, danger) for request, danger in watch.due(now)]


def test_at_risk_half_an_objective_before_it_is_too_late() -> None:
    watch = FirstTokenWatch()
    watch.watch(waiting(0, 10.0), 10.0)
    assert watch.next_due == 5.0
    assert told(watch, 4.999) == []
    assert told(watch, 5.0) == [(0, Danger.AT_RISK)]
    assert watch.next_due == 10.0
    assert told(watch, 9.999) == []
    assert told(watch, 10.0) == [(0, Danger.TOO_LATE)]
    assert watch.next_due == float("inf")
    assert told(watch, 100.0) == []


def test_a_long_prompt_is_at_risk_as_it_comes() -> None:
    """Of an objective of ten seconds its prompt takes eight: half the objective before lies before it came."""
    watch = FirstTokenWatch()
    watch.watch(waiting(0, 102.0, now=100.0), 10.0)
    assert watch.next_due == 100.0
    assert told(watch, 100.0) == [(0, Danger.AT_RISK)]


def test_a_prompt_that_takes_longer_than_its_objective_is_too_late_as_it_comes() -> None:
    watch = FirstTokenWatch()
    watch.watch(waiting(0, 95.0, now=100.0), 10.0)
    assert (0, Danger.TOO_LATE) in told(watch, 100.0)


def test_both_are_told_in_the_order_of_time_and_arrival() -> None:
    watch = FirstTokenWatch()
    watch.watch(waiting(0, 10.0), 10.0)
    watch.watch(waiting(1, 6.0), 6.0)
    watch.watch(waiting(2, 6.0), 6.0)
    assert told(watch, 20.0) == [
        (1, Danger.AT_RISK),
        (2, Danger.AT_RISK),
        (0, Danger.AT_RISK),
        (1, Danger.TOO_LATE),
        (2, Danger.TOO_LATE),
        (0, Danger.TOO_LATE),
    ]


def test_who_does_not_wait_for_its_first_start_is_not_told_of() -> None:
    watch = FirstTokenWatch()
    for arrival, status in enumerate(RequestStatus):
        request = waiting(arrival, 1.0)
        request.status = status
        watch.watch(request, 1.0)
    assert {arrival for arrival, _ in told(watch, 5.0)} == {list(RequestStatus).index(RequestStatus.WAITING)}


def test_who_has_started_long_before_its_time_is_not_held_until_then() -> None:
    watch = FirstTokenWatch()
    rng = np.random.default_rng(0)
    longest = 0
    for arrival in range(20_000):
        request = waiting(arrival, 1e6 + float(rng.random()))
        watch.watch(request, 1e6)
        request.status = RequestStatus.RUNNING
        longest = max(longest, len(watch._due))
    assert longest < 2000


def test_pruning_loses_nobody_who_still_waits() -> None:
    watch = FirstTokenWatch()
    expected = []
    for arrival in range(5_000):
        request = waiting(arrival, 1000.0 + arrival)
        watch.watch(request, 1.0)
        if arrival % 7:
            request.status = RequestStatus.RUNNING
        else:
            expected.append(arrival)
    late = [arrival for arrival, danger in told(watch, 1e9) if danger is Danger.TOO_LATE]
    assert late == expected
