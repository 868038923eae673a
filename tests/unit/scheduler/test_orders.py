"""Who comes next: promotions for age beside classes, and what a tenant finds beside one that floods."""

import numpy as np
import pytest

from core_driver import CoreDriver
from headway_proto.sampling import SamplingParams
from headway_scheduler.core.admission.fair_queue import INPUT_WEIGHT, KEPT_ROWS_SHARE, FairQueue, burst_tokens_of
from headway_scheduler.core.admission.waiting_queue import (
    HEAD_RANK,
    HIGHEST_CLASS_RANK,
    PROMOTED_RANK,
    STARTS_PER_PROMOTION,
    UNRANKED,
    KeyedQueue,
    by_arrival,
    is_promoted,
    rank_of_class,
)
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.state.request import Request

REALTIME, HIGH, LOW = 1, 2, 4
AGING_S = 10.0


def request(arrival, *, rank=UNRANKED, tenant="", num_tokens=8, now=0.0):
    new = NewRequestEvent(
        origin=Origin(0, arrival),
        request_id=str(arrival),
        token_ids=np.zeros(num_tokens, dtype=np.int32),
        num_prompt_tokens=num_tokens,
        max_tokens=8,
        sampling=SamplingParams(),
        stop_token_ids=frozenset(),
        tenant=tenant,
    )
    return Request(new, arrival=arrival, rank=rank, limit=num_tokens + 8, now=now)


class ClassQueue:
    """A queue with one LOW request from the start, and as many others as are asked for."""

    def __init__(self):
        self.queue = KeyedQueue(by_arrival, AGING_S)
        self.low = request(0, rank=rank_of_class(LOW))
        self.queue.push(self.low)
        self._num_arrivals = 1

    def start(self, priority, now):
        """Another arrives, and whoever is first starts."""
        self.queue.push(request(self._num_arrivals, rank=rank_of_class(priority), now=now))
        self._num_arrivals += 1
        first = self.queue.first(now)
        self.queue.remove(first)
        self.queue.record_start(first)
        return first


def test_ranks_of_classes_leave_room_for_promotions():
    ranks = [rank_of_class(priority) for priority in (1, 2, 3, 4)]
    assert ranks == sorted(ranks)
    assert not any(map(is_promoted, [*ranks, UNRANKED]))
    assert HEAD_RANK < HIGHEST_CLASS_RANK == ranks[0] < PROMOTED_RANK < ranks[1]
    assert PROMOTED_RANK < UNRANKED


def test_an_old_request_goes_before_all_classes_but_the_highest():
    classes = ClassQueue()
    for _ in range(STARTS_PER_PROMOTION):
        assert classes.start(HIGH, 0.0).rank == rank_of_class(HIGH)
    assert classes.start(REALTIME, AGING_S).rank == HIGHEST_CLASS_RANK
    assert classes.low.rank == rank_of_class(LOW)
    assert classes.start(HIGH, AGING_S) is classes.low
    assert classes.low.rank == PROMOTED_RANK


def test_only_once_in_a_number_of_starts_is_somebody_promoted():
    classes = ClassQueue()
    for _ in range(STARTS_PER_PROMOTION - 1):
        assert classes.start(HIGH, AGING_S) is not classes.low
    classes.start(HIGH, AGING_S)
    assert classes.start(HIGH, AGING_S) is classes.low


def test_a_highest_class_that_leaves_no_room_does_not_starve_the_others():
    classes = ClassQueue()
    for _ in range(STARTS_PER_PROMOTION):
        assert classes.start(REALTIME, AGING_S) is not classes.low
    assert classes.start(REALTIME, AGING_S) is classes.low
    assert classes.low.rank == HEAD_RANK


def test_who_was_promoted_behind_a_class_that_then_leaves_no_room_is_promoted_again():
    classes = ClassQueue()
    for _ in range(STARTS_PER_PROMOTION):
        classes.start(HIGH, 0.0)
    classes.queue.push(request(90, rank=rank_of_class(HIGH)))
    assert classes.queue.first(AGING_S) is classes.low
    started = [classes.start(REALTIME, AGING_S) for _ in range(2 * STARTS_PER_PROMOTION)]
    assert classes.low in started
    assert classes.low.rank == HEAD_RANK


BURST = 100


def fair_queue():
    return FairQueue({"double": 2.0}, lambda: BURST)


def started(queue, *requests):
    for each in requests:
        queue.push(each)
        queue.remove(each)
        queue.record_start(each)


def test_a_tenant_that_comes_back_lags_by_a_burst_at_most():
    queue = fair_queue()
    started(queue, request(0, tenant="flood", num_tokens=1000))
    queue.push(request(1, tenant="flood"))
    queue.push(request(2, tenant="new"))
    queue.push(request(3, tenant="double"))
    assert queue.counter_of("flood") == 1000 * INPUT_WEIGHT
    assert queue.counter_of("new") == 1000 - BURST
    assert (
        queue.counter_of("double") == 1000 - BURST / 2 - BURST
    )  # no lower than the lowest that waits, less its credit


def test_of_tenants_that_are_level_the_one_that_runs_less_comes_first():
    queue = fair_queue()
    started(queue, request(0, tenant="busy", num_tokens=50), request(1, tenant="idle", num_tokens=50))
    started(queue, request(2, tenant="busy", num_tokens=1), request(3, tenant="busy", num_tokens=1))
    queue.forget(request(1, tenant="idle"))
    queue.push(request(4, tenant="busy"))
    queue.push(request(5, tenant="idle", num_tokens=2))
    queue.charge_token(1)
    assert queue.counter_of("busy") == queue.counter_of("idle")
    assert queue.first(0.0).new.tenant == "idle"


def test_a_burst_is_no_more_than_half_the_pool():
    assert burst_tokens_of(100, 100_000) == 400
    assert burst_tokens_of(100, 120) == 60


def driver(**limits):
    capacity = ExecutorCapacity(num_blocks=400, block_size=4, max_model_len=64, vocab_size=8, max_num_rows=64)
    settings = {"enable_prefix_caching": False, "max_steps_in_flight": 1, **limits}
    return CoreDriver(SchedulerLimits(**settings), capacity)


@pytest.mark.parametrize(("order", "expected"), [("fair", {9: 1, 1: 9}), ("fcfs", {9: 1, 0: 9})])
def test_a_prompt_under_way_does_not_delay_a_tenant_that_has_had_less(order, expected):
    run = driver(order=order, max_num_batched_tokens=10)
    run.add(9, 2, 30, tenant="flood")
    run.next_steps(1)
    run.add(0, 40, 2, tenant="flood")
    assert run.next_steps(1) == [{9: 1, 0: 9}]
    run.add(1, 18, 2, tenant="modest")
    assert run.next_steps(1) == [expected]


def test_a_prompt_that_has_overtaken_is_not_overtaken_for_what_it_was_charged():
    run = driver(order="fair", max_num_batched_tokens=10)
    run.add(9, 2, 30, tenant="flood")
    run.next_steps(1)
    run.add(0, 40, 2, tenant="flood")
    run.next_steps(1)
    run.add(1, 60, 2, tenant="modest")
    run.add(2, 8, 2, tenant="flood")
    steps = run.next_steps(8)
    assert [step.get(1) for step in steps] == [9, 9, 9, 9, 9, 9, 6, 1]
    assert [step.get(0) for step in steps] == [None] * 6 + [3, 8]


def test_whoever_runs_its_share_of_rows_leaves_a_few_alone():
    num_rows = 2 * KEPT_ROWS_SHARE
    run = driver(order="fair", max_num_batched_tokens=400, max_num_seqs=num_rows)
    for handle in range(num_rows):
        run.add(handle, 2, 16, tenant="flood")
    run.next_steps(2)
    assert run.core.num_running == num_rows - 2
    run.add(100, 2, 16, tenant="modest")
    assert 100 in run.next_steps(1)[0]
