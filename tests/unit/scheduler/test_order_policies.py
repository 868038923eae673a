"""The orders by name: who each of them serves first."""

import numpy as np
import pytest

from headway_scheduler.core.admission.orders import ORDERS, OUTPUT_TOKEN_WORK
from headway_scheduler.core.admission.waiting_queue import STARTS_PER_PROMOTION, Lane, WaitingQueue
from headway_scheduler.core.state.counters import PreemptionReason
from headway_scheduler.core.state.request import Request
from waiting_requests import make_request, preempted, queue_settings


def queue_of(order: str, requests: list[Request], *, predicted: dict[int, int] | None = None) -> WaitingQueue:
    """``predicted``: output tokens by arrival, none for those not named."""
    outputs = predicted or {}
    queue = ORDERS[order].make_queue(queue_settings(predicted_output=lambda request: outputs.get(request.arrival, 0)))
    for request in requests:
        queue.push(request)
    return queue


def arrivals(queue: WaitingQueue) -> list[int]:
    return [request.arrival for request in queue.in_order()]


def test_fcfs_is_by_arrival_whatever_the_class() -> None:
    requests = [make_request(n, priority=4 - n % 4, num_tokens=9 - n) for n in range(8)]
    assert arrivals(queue_of("fcfs", requests)) == list(range(8))


def test_priority_is_by_rank_then_arrival() -> None:
    ranks = [queue_of("priority", []).rank_of(priority) for priority in (1, 2, 3)]
    assert ranks == sorted(set(ranks))
    requests = [make_request(n, rank=(7, 5, 3)[n % 3]) for n in range(6)]
    assert arrivals(queue_of("priority", requests)) == [2, 5, 1, 4, 0, 3]


def test_only_orders_with_classes_let_a_prompt_that_was_overtaken_for_too_long_go_before_all_classes() -> None:
    prompt = make_request(0, rank=3)
    prompt.served_time = 5.0
    starved = {order for order in ORDERS if queue_of(order, []).is_starved(prompt, 15.0)}
    assert starved == {"priority", "class_deadline"}
    assert not queue_of("priority", []).is_starved(prompt, 14.9)


def test_whom_running_requests_make_way_for() -> None:
    calm, urgent = make_request(0), make_request(1)
    urgent.lane = Lane.URGENT
    for order in ("fcfs", "shortest", "deadline"):
        queue = queue_of(order, [])
        assert queue.reason_to_preempt_for(calm) is None
        assert queue.reason_to_preempt_for(urgent) is PreemptionReason.LATE_FIRST_TOKEN
    for order in ("priority", "class_deadline"):
        assert queue_of(order, []).reason_to_preempt_for(calm) is PreemptionReason.HIGHER_CLASS
    assert queue_of("fair", []).reason_to_preempt_for(calm) is None


def test_fair_serves_prompts_in_the_service_order_while_a_preempted_request_waits() -> None:
    prompt, back = make_request(0, tenant="a"), make_request(1, tenant="a")
    queue = queue_of("fair", [prompt, back])
    for request in (prompt, back):
        queue.remove(request)
        queue.record_start(request)
    place = queue.prompt_place(prompt)
    queue.push(preempted(back))
    assert not queue.may_overtake()
    assert queue.prompt_place(prompt) == (prompt.order_key,)
    queue.remove(back)
    assert queue.may_overtake()
    assert queue.prompt_place(prompt) == place != (prompt.order_key,)


def test_shortest_counts_an_output_token_as_several_of_a_prompt() -> None:
    requests = [make_request(n, num_tokens=length) for n, length in enumerate((100, 50, 10, 100))]
    work = {0: 0, 1: 50 // OUTPUT_TOKEN_WORK + 1, 2: 100 // OUTPUT_TOKEN_WORK + 1, 3: 0}
    assert arrivals(queue_of("shortest", requests, predicted=work)) == [0, 3, 1, 2]


def test_shortest_counts_what_is_left_when_a_request_comes_back() -> None:
    requests = [preempted(make_request(n, num_tokens=20)) for n in range(2)]
    assert arrivals(queue_of("shortest", requests, predicted={0: 9, 1: 1})) == [1, 0]


def test_deadline_is_by_latest_start_and_then_those_without_one() -> None:
    requests = [make_request(n) for n in range(5)]
    for request, latest_start in zip(requests, (None, 7.5, 2.25, None, 2.250001), strict=True):
        request.latest_start = latest_start
    assert arrivals(queue_of("deadline", requests)) == [2, 4, 1, 0, 3]


def test_class_deadline_is_by_rank_then_latest_start_and_then_those_without_one() -> None:
    requests = [make_request(n, rank=(5, 3)[n % 2]) for n in range(6)]
    for request, latest_start in zip(requests, (1.0, None, 0.5, 7.5, None, 2.25), strict=True):
        request.latest_start = latest_start
    queue = queue_of("class_deadline", requests)
    assert arrivals(queue) == [5, 3, 1, 2, 0, 4]
    queue.move(requests[3], Lane.URGENT)
    assert arrivals(queue) == [3, 5, 1, 2, 0, 4]


def test_fair_takes_turns_between_tenants() -> None:
    requests = [make_request(n, tenant="ab"[n >= 3]) for n in range(6)]
    queue = queue_of("fair", requests)
    turns = []
    for _ in range(6):
        request = queue.first(0.0)
        assert request is not None
        queue.remove(request)
        queue.record_start(request)
        turns.append(request.new.tenant)
    assert sorted(turns[:2]) == sorted(turns[2:4]) == sorted(turns[4:]) == ["a", "b"]


@pytest.mark.parametrize("order", ["fcfs", "priority", "shortest", "deadline", "class_deadline"])
def test_whoever_has_waited_too_long_is_promoted_in_all_but_fair(order: str) -> None:
    """It came first; whatever the order asks for, all others have more of it."""
    old = make_request(0, rank=7, num_tokens=1000)
    others = [make_request(n, now=5.0) for n in range(1, 40)]
    for request in others:
        request.latest_start = 1.0
    queue = queue_of(order, [old, *others])
    started = []
    while old not in started:
        request = queue.first(20.0)
        assert request is not None
        queue.remove(request)
        queue.record_start(request)
        started.append(request)
    assert len(started) == STARTS_PER_PROMOTION + 1


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_only_fair_keeps_books_on_outputs(order: str) -> None:
    queue = queue_of(order, [make_request(n, tenant=f"t{n % 2}") for n in range(4)])
    assert (queue.counter_of("t0") is not None) == (order == "fair")
    before = arrivals(queue)
    queue.charge_rows(np.asarray([0]), np.zeros(50, dtype=np.intp))
    assert (arrivals(queue) != before) == (order == "fair")
