"""The waiting queue: who is next, who grows old, and what removal leaves behind."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway_scheduler.core.admission.waiting_queue import STARTS_PER_PROMOTION, KeyedQueue, Lane, by_arrival
from headway_scheduler.core.state.request import Request
from waiting_requests import make_request, preempted

AGING_S = 10.0


def queue_of(requests: Sequence[Request], *, by_length: bool = False) -> KeyedQueue:
    queue = KeyedQueue((lambda request: len(request.token_ids)) if by_length else by_arrival, AGING_S)
    for request in requests:
        queue.push(request)
    return queue


def start_next(queue: KeyedQueue, now: float = 0.0) -> Request:
    request = queue.first(now)
    assert request is not None
    queue.remove(request)
    queue.record_start(request)
    return request


def order_of_starts(queue: KeyedQueue, now: float = 0.0) -> list[int]:
    return [start_next(queue, now).arrival for _ in range(len(queue))]


def test_an_empty_queue_has_nobody() -> None:
    queue = queue_of([])
    assert queue.first(0.0) is None
    assert queue.first_few(3) == []
    assert queue.in_order() == []
    assert len(queue) == 0


def test_order_is_by_rank_then_lane_then_what_the_order_says_then_arrival() -> None:
    lengths = (9, 1, 1, 5, 5, 2)
    ranks = (5, 5, 5, 3, 3, 7)
    requests = [
        make_request(n, rank=rank, num_tokens=length)
        for n, (rank, length) in enumerate(zip(ranks, lengths, strict=True))
    ]
    queue = queue_of(requests, by_length=True)
    queue.move(requests[0], Lane.URGENT)
    queue.move(requests[3], Lane.LATE)
    expected = [4, 3, 0, 1, 2, 5]
    assert [request.arrival for request in queue.in_order()] == expected
    assert order_of_starts(queue) == expected


def test_preempted_requests_go_first_within_their_rank_but_not_before_higher_ones() -> None:
    requests = [make_request(n, rank=3 + 2 * (n % 2)) for n in range(4)]
    queue = queue_of(requests)
    for request in (make_request(8, rank=5), make_request(9, rank=3)):
        queue.push(preempted(request))
    assert order_of_starts(queue) == [9, 0, 2, 8, 1, 3]


def test_moving_there_and_back_leaves_one_place() -> None:
    requests = [make_request(n) for n in range(3)]
    queue = queue_of(requests)
    for lane in (Lane.LATE, Lane.URGENT, Lane.NORMAL, Lane.LATE, Lane.NORMAL):
        queue.move(requests[1], lane)
    assert len(queue) == 3
    assert order_of_starts(queue) == [0, 1, 2]
    assert queue.first(0.0) is None


class TestGrowingOld:
    def crowded(self, num_young: int = 40) -> tuple[KeyedQueue, Request]:
        """A long request that came first, and shorter ones without end before it."""
        old = make_request(0, num_tokens=100)
        queue = queue_of([old, *(make_request(n, now=5.0) for n in range(1, num_young + 1))], by_length=True)
        return queue, old

    def test_nobody_is_promoted_before_its_time(self) -> None:
        queue, old = self.crowded()
        assert [start_next(queue, AGING_S - 0.01).arrival for _ in range(30)] == list(range(1, 31))
        assert start_next(queue, AGING_S) is old

    def test_nobody_is_promoted_before_enough_others_have_started(self) -> None:
        queue, old = self.crowded()
        before = [start_next(queue, 100.0) for _ in range(STARTS_PER_PROMOTION)]
        assert old not in before
        assert start_next(queue, 100.0) is old

    def test_of_so_many_starts_only_one_is_a_promotion(self) -> None:
        """All are old, the long ones came first: the order still decides all but a bounded share of the starts."""
        long = [make_request(n, num_tokens=100) for n in range(100)]
        short = [make_request(n) for n in range(100, 300)]
        queue = queue_of([*long, *short], by_length=True)
        is_long = [len(start_next(queue, 1e6).token_ids) == 100 for _ in range(150)]
        promoted = [place for place, was_long in enumerate(is_long) if was_long]
        assert promoted
        assert min(np.diff([-1, *promoted]).tolist()) >= STARTS_PER_PROMOTION
        assert len(promoted) >= 150 // (STARTS_PER_PROMOTION + 1)

    def test_the_oldest_is_promoted_first_and_keeps_its_place_while_it_cannot_start(self) -> None:
        queue, old = self.crowded()
        for _ in range(STARTS_PER_PROMOTION):
            start_next(queue)
        for now in (AGING_S, AGING_S + 1, AGING_S + 2):
            assert queue.first(now) is old
        assert queue.in_order()[0] is old
        assert len(queue) == 40 - STARTS_PER_PROMOTION + 1

    def test_who_is_next_anyway_is_not_promoted(self) -> None:
        requests = [make_request(n) for n in range(30)]
        queue = queue_of(requests)
        assert order_of_starts(queue, now=1e6) == list(range(30))
        assert {request.rank for request in requests} == {3}

    def test_of_equal_ranks_a_request_that_comes_back_is_next_and_needs_no_promotion(self) -> None:
        queue, _ = self.crowded()
        back = make_request(50, num_tokens=200)
        queue.push(preempted(back))
        assert start_next(queue, 1e6) is back
        assert back.rank == 3

    def test_a_request_that_was_late_is_promoted_as_well(self) -> None:
        queue, old = self.crowded()
        queue.move(old, Lane.LATE)
        for _ in range(STARTS_PER_PROMOTION):
            start_next(queue)
        assert start_next(queue, AGING_S) is old


class TestTenThousand:
    def test_removal_leaves_holes_that_are_bounded_and_harm_nobody(self) -> None:
        rng = np.random.default_rng(1)
        requests = [make_request(n, rank=3 + 2 * int(rng.integers(3))) for n in range(10_000)]
        queue = queue_of(requests)
        left = {request.arrival for request in requests}
        for place in rng.permutation(10_000)[:9_900].tolist():
            queue.remove(requests[place])
            left.discard(place)
            assert len(queue._heap) <= 2 * len(queue) + 65
            assert len(queue._arrivals) <= 2 * len(queue) + 65
        assert len(queue) == 100
        expected = sorted(left, key=lambda arrival: (requests[arrival].rank, arrival))
        assert [request.arrival for request in queue.in_order()] == expected
        assert order_of_starts(queue) == expected

    def test_moving_all_of_them_many_times_keeps_the_order(self) -> None:
        requests = [make_request(n) for n in range(10_000)]
        queue = queue_of(requests)
        for lane in (Lane.URGENT, Lane.LATE, Lane.NORMAL):
            for request in requests[::2]:
                queue.move(request, lane)
        assert order_of_starts(queue) == list(range(10_000))

    def test_first_few_takes_nobody_out(self) -> None:
        queue = queue_of([make_request(n) for n in range(10_000)])
        for _ in range(3):
            assert [request.arrival for request in queue.first_few(8)] == list(range(8))
        assert len(queue) == 10_000
        assert order_of_starts(queue) == list(range(10_000))


def test_first_few_are_of_the_rank_and_lane_of_the_first() -> None:
    requests = [make_request(n, rank=3 if n < 5 else 5) for n in range(10)]
    queue = queue_of(requests)
    queue.move(requests[4], Lane.URGENT)
    assert [request.arrival for request in queue.first_few(8)] == [4]
    queue.remove(requests[4])
    assert [request.arrival for request in queue.first_few(8)] == [0, 1, 2, 3]
    assert [request.arrival for request in queue.first_few(2)] == [0, 1]


def test_first_few_names_nobody_twice_who_has_been_here_before() -> None:
    requests = [make_request(n) for n in range(4)]
    queue = queue_of(requests)
    for _ in range(3):
        queue.move(requests[0], Lane.LATE)
        queue.move(requests[0], Lane.NORMAL)
        queue.remove(requests[2])
        queue.push(requests[2])
    assert [request.arrival for request in queue.first_few(8)] == [0, 1, 2, 3]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "push", "remove", "move", "start", "few", "come back"]),
            st.integers(0, 100),
            st.integers(0, 2),
        ),
        max_size=80,
    ),
    st.sampled_from([0.0, 1.0, float("inf")]),
)
@pytest.mark.parametrize("by_length", [False, True])
def test_any_history_keeps_every_request_once_and_in_order(
    by_length: bool, history: list[tuple[str, int, int]], aging_s: float
) -> None:
    queue = KeyedQueue((lambda request: len(request.token_ids)) if by_length else by_arrival, aging_s)
    waiting: dict[int, Request] = {}
    started: list[Request] = []
    now = 0.0
    for arrival, (action, place, kind) in enumerate(history):
        now += 0.1
        chosen = list(waiting.values())[place % len(waiting)] if waiting else None
        if action == "push":
            waiting[arrival] = make_request(arrival, rank=3 + 2 * kind, num_tokens=1 + place % 5, now=now)
            queue.push(waiting[arrival])
        elif action == "come back" and started:
            back = preempted(started.pop(place % len(started)))
            waiting[back.arrival] = back
            queue.push(back)
        elif chosen is None:
            assert queue.first(now) is None
        elif action == "remove":
            queue.remove(waiting.pop(chosen.arrival))
        elif action == "move" and chosen.lane != Lane.RESUMING:
            queue.move(chosen, Lane(1 + kind))
        elif action == "few":
            few = queue.first_few(1 + kind)
            assert few == queue.in_order()[: len(few)]
        elif action == "start":
            first = queue.first(now)
            assert first is queue.in_order()[0]
            queue.remove(first)
            queue.record_start(first)
            started.append(waiting.pop(first.arrival))
        assert len(queue) == len(waiting)
        assert sorted(request.arrival for request in queue.in_order()) == sorted(waiting)
    keys = [(request.rank, int(request.lane)) for request in queue.in_order()]
    assert keys == sorted(keys)
