"""The time after which a refused client is asked to come again."""

import pytest

from headway_scheduler.gateways.queue_pace import LEAST_S, MOST_S, UNKNOWN_S, QueuePace


def test_before_anything_is_known() -> None:
    assert QueuePace().retry_after_s(100, 5.0) == UNKNOWN_S


def test_starts_that_came_at_once_are_no_pace() -> None:
    pace = QueuePace()
    pace.count_starts(16, 5.0)
    assert [pace.retry_after_s(100, 5.0 + later) for later in (0, 0.1, 3, 100)] == [UNKNOWN_S, UNKNOWN_S, 3.0, MOST_S]


@pytest.mark.parametrize("seconds", [1, 5, 60])
def test_a_steady_pace_is_found_however_long_it_lasted(seconds: int) -> None:
    pace = QueuePace()
    for tick in range(seconds * 100):
        pace.count_starts(1, tick / 100)
    assert pace.retry_after_s(1000, seconds) == pytest.approx(1.0, rel=0.1)


def test_a_queue_that_stands_still_asks_for_more_and_more_patience() -> None:
    pace = QueuePace()
    for tick in range(1000):
        pace.count_starts(1, tick / 100)
    waits = [pace.retry_after_s(1000, 10.0 + later) for later in (0, 5, 20, 100)]
    assert waits == sorted(waits)
    assert waits[-1] == MOST_S


def test_a_fast_queue_asks_for_little() -> None:
    pace = QueuePace()
    for tick in range(1000):
        pace.count_starts(100, tick / 100)
    assert pace.retry_after_s(10, 10.0) == LEAST_S
