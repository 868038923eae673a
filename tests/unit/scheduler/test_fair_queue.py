"""The order ``fair``: what is counted, who is next, and how far two tenants can drift apart."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway_scheduler.core.admission.fair_queue import INPUT_WEIGHT, MAX_IDLE_TENANTS, OUTPUT_WEIGHT, FairQueue
from headway_scheduler.core.admission.orders import ORDERS
from headway_scheduler.core.admission.waiting_queue import Lane
from headway_scheduler.core.state.request import Request
from waiting_requests import make_request, preempted, queue_settings


def make_queue(weights: Mapping[str, float] | None, burst_tokens: int) -> FairQueue:
    """An empty queue."""
    queue = ORDERS["fair"].make_queue(queue_settings(tenant_weights=weights, burst_tokens=burst_tokens))
    assert isinstance(queue, FairQueue)
    return queue


class Service:
    """Serves one request after the other, wholly, and counts what each tenant has got."""

    def __init__(self, weights: Mapping[str, float] | None = None, *, burst_tokens: int = 0) -> None:
        self.queue = make_queue(weights, burst_tokens)
        self.served: dict[str, float] = {}
        self._num_arrivals = 0

    def arrive(self, tenant: str, num_tokens: int = 4) -> Request:
        request = make_request(self._num_arrivals, tenant=tenant, num_tokens=num_tokens)
        self._num_arrivals += 1
        self.queue.push(request)
        return request

    def start(self) -> Request:
        request = self.queue.first(0.0)
        assert request is not None
        self.queue.remove(request)
        self.queue.record_start(request)
        request.scheduled_time = 0.0
        tenant = request.new.tenant
        self.served[tenant] = self.served.get(tenant, 0.0) + INPUT_WEIGHT * len(request.token_ids)
        return request

    def put_out(self, request: Request, num_tokens: int) -> None:
        place = self.queue.place_of_tenant(request)
        for _ in range(num_tokens):
            self.queue.charge_token(place)
        self.served[request.new.tenant] += OUTPUT_WEIGHT * num_tokens

    def serve(self, num_output_tokens: int = 1) -> str:
        request = self.start()
        self.put_out(request, num_output_tokens)
        self.queue.forget(request)
        return request.new.tenant


def test_prompts_count_once_and_outputs_twice_as_they_come() -> None:
    service = Service()
    request = service.arrive("a", 10)
    assert service.queue.counter_of("a") == 0
    service.start()
    assert service.queue.counter_of("a") == 10
    service.put_out(request, 3)
    service.put_out(request, 1)
    assert service.queue.counter_of("a") == 18


def test_a_comeback_is_not_charged_again_and_goes_before_the_tenants_other_requests() -> None:
    service = Service()
    first = service.arrive("a", 10)
    service.start()
    service.arrive("a", 10)
    service.queue.push(preempted(first))
    assert service.start() is first
    assert service.queue.counter_of("a") == 10


def test_weights_divide_what_is_counted() -> None:
    service = Service({"gold": 4.0, "lead": 0.5})
    for tenant in ("gold", "lead", "other"):
        service.arrive(tenant, 8)
    for _ in range(3):
        service.start()
    assert [service.queue.counter_of(tenant) for tenant in ("gold", "lead", "other")] == [2.0, 16.0, 8.0]


def test_shares_follow_weights() -> None:
    service = Service({"gold": 3.0})
    for _ in range(400):
        service.arrive("gold")
        service.arrive("plain")
    turns = [service.serve() for _ in range(400)]
    assert 295 <= turns.count("gold") <= 305


def test_a_tenant_who_floods_does_not_delay_one_who_sends_little() -> None:
    service = Service()
    for _ in range(100):
        service.arrive("flood")
    for _ in range(10):
        service.serve()
    service.arrive("light")
    assert "light" in [service.serve() for _ in range(2)]


def test_idleness_earns_no_credit() -> None:
    """Who comes back after a long time shares from then on, and does not catch up."""
    service = Service()
    service.arrive("away")
    service.serve()
    for _ in range(200):
        service.arrive("busy")
    for _ in range(100):
        service.serve()
    for _ in range(50):
        service.arrive("away")
    turns = [service.serve() for _ in range(50)]
    assert 24 <= turns.count("away") <= 26


@pytest.mark.parametrize(("weights", "most"), [({}, 40.0), ({"away": 4.0}, 10.0)])
def test_who_comes_back_may_lag_by_a_burst_over_its_weight_and_no_more(weights: dict[str, float], most: float) -> None:
    service = Service(weights, burst_tokens=40)
    service.arrive("away")
    service.serve()
    for _ in range(200):
        service.arrive("busy")
    for _ in range(100):
        service.serve()
    service.arrive("away")
    assert service.queue.counter_of("away") == service.queue.counter_of("busy") - most
    for _ in range(40):
        service.arrive("away")
    turns = [service.serve() for _ in range(30)]
    num_in_a_row = turns.index("busy")
    assert num_in_a_row * (4 + 2) >= 40
    assert (num_in_a_row - 2) * (4 + 2) <= 40


def test_of_tenants_that_are_level_the_one_that_runs_less_is_next() -> None:
    service = Service({"a": 1.0})
    first = service.arrive("a", 6)
    assert service.start() is first
    service.arrive("a", 6)
    late = service.arrive("b", 6)
    assert service.queue.counter_of("a") == service.queue.counter_of("b")
    assert service.start() is late


def test_a_tenant_that_comes_to_an_empty_queue_begins_where_the_last_one_left() -> None:
    service = Service()
    for _ in range(20):
        service.arrive("first")
    for _ in range(20):
        service.serve()
    service.arrive("second")
    assert service.queue.counter_of("second") == service.queue.counter_of("first")


def test_own_requests_are_served_by_arrival_and_lanes_change_nothing() -> None:
    service = Service()
    requests = [service.arrive("a") for _ in range(4)]
    service.queue.move(requests[3], Lane.URGENT)
    assert service.queue.first_few(3) == requests[:3]
    assert service.queue.in_order() == requests
    assert [service.start() for _ in range(4)] == requests


def test_idle_tenants_are_forgotten_first_come_first_and_their_places_used_again() -> None:
    service = Service()
    for number in range(MAX_IDLE_TENANTS + 500):
        service.arrive(f"tenant {number}")
        service.serve()
    assert len(service.queue._tenants) == MAX_IDLE_TENANTS
    assert len(service.queue._names) <= MAX_IDLE_TENANTS + 1
    assert service.queue.counter_of("tenant 499") == 0.0
    assert service.queue.counter_of("tenant 500") > 0.0
    request = service.arrive("tenant 0")
    assert service.queue.first(0.0) is request


def test_a_tenant_with_a_live_request_is_never_forgotten() -> None:
    service = Service()
    running = service.arrive("runs on")
    service.start()
    for number in range(MAX_IDLE_TENANTS + 500):
        service.arrive(f"tenant {number}")
        service.serve()
    before = service.queue.counter_of("runs on")
    service.put_out(running, 5)
    assert service.queue.counter_of("runs on") == before + 5 * OUTPUT_WEIGHT
    assert before == 4.0


class ByTheBook:
    """Algorithm 2 of Sheng et al. as it is printed, with a dictionary."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self.counters: dict[str, float] = {}
        self.waiting: dict[str, list[int]] = {}
        self._last = ""

    def arrive(self, tenant: str, arrival: int) -> None:
        if not self.waiting.get(tenant):
            others = [self.counters[name] for name, queue in self.waiting.items() if queue]
            floor = min(others) if others else self.counters.get(self._last, 0.0)
            self.counters[tenant] = max(self.counters.get(tenant, 0.0), floor)
        self.waiting.setdefault(tenant, []).append(arrival)

    def start(self, tenant: str, cost: float) -> int:
        assert self.counters[tenant] == pytest.approx(
            min(self.counters[name] for name, queue in self.waiting.items() if queue)
        )
        self.counters[tenant] += cost / self._weights.get(tenant, 1.0)
        arrival = self.waiting[tenant].pop(0)
        if not self.waiting[tenant]:
            self._last = tenant
        return arrival


TENANTS = ("a", "b", "c")


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(TENANTS), st.integers(1, 20)),
            st.tuples(st.just("serve"), st.integers(0, 20)),
        ),
        max_size=120,
    ),
    st.sampled_from([{}, {"a": 4.0}, {"a": 0.5, "c": 2.0}]),
)
def test_it_is_the_algorithm_and_keeps_its_bound(events: list[tuple[str, int]], weights: dict[str, float]) -> None:
    """Served one at a time, the service of two who both always wait differs by one request at most, over its weight.

    That is Theorem 4.4 with a pool for one request: twice the most that one request can count for.
    """
    service, book = Service(weights), ByTheBook(weights)
    most = INPUT_WEIGHT * 20 + OUTPUT_WEIGHT * 20
    num_arrivals = 0
    num_waiting = dict.fromkeys(TENANTS, 0)
    served_before: dict[tuple[str, str], tuple[float, float]] = {}
    for action, size in events:
        if action != "serve":
            service.arrive(action, size)
            book.arrive(action, num_arrivals)
            num_arrivals += 1
            num_waiting[action] += 1
        elif any(num_waiting.values()):
            request = service.start()
            tenant = request.new.tenant
            cost = INPUT_WEIGHT * len(request.token_ids) + OUTPUT_WEIGHT * size
            assert book.start(tenant, cost) == request.arrival
            service.put_out(request, size)
            service.queue.forget(request)
            num_waiting[tenant] -= 1
        for tenant, counter in book.counters.items():
            assert service.queue.counter_of(tenant) == pytest.approx(counter)
        shares = {tenant: service.served.get(tenant, 0.0) / weights.get(tenant, 1.0) for tenant in TENANTS}
        for one in TENANTS:
            for other in TENANTS[TENANTS.index(one) + 1 :]:
                if not (num_waiting[one] and num_waiting[other]):
                    served_before.pop((one, other), None)
                    continue
                since = served_before.setdefault((one, other), (shares[one], shares[other]))
                drift = (shares[one] - since[0]) - (shares[other] - since[1])
                assert abs(drift) <= 2 * most / min(weights.get(one, 1.0), weights.get(other, 1.0))
