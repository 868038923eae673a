"""The queue of the order ``fair``: a virtual token counter per tenant.

Owns: the counters, and which tenant is next. Must not know: rows, blocks, or how tokens are made.

Algorithm 2 (VTC) of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024: a counter grows by
``INPUT_WEIGHT`` per prompt token at a start and ``OUTPUT_WEIGHT`` per output token, over the tenant's weight. The
waiting tenant with the lowest counter is next. A tenant that returns is lifted to the lowest of the others, less a
burst (``burst_tokens_of``), so that one that sends little starts before one that floods. The burst is within the
difference that the paper allows: the service of two tenants that always wait differs by at most ``2 * max(INPUT_WEIGHT
* longest prompt, OUTPUT_WEIGHT * tokens that fit the pool)`` (Theorem 4.4), times the weight.

In the paper a prompt runs in one step; here it may take many. So running prompts are served by their tenants' counters
at the start, and a waiting request of a tenant with less starts first (start-time fair queueing: Goyal, Vin and Cheng,
SIGCOMM 1996). The charge for a prompt lets no other overtake it.
"""

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
from mypy_extensions import mypyc_attr
from numpy.typing import NDArray

from headway_scheduler.core.admission.waiting_queue import UNRANKED, Lane, PromptPlace
from headway_scheduler.core.state.counters import PreemptionReason
from headway_scheduler.core.state.indices import NO_ROWS, RowIndices
from headway_scheduler.core.state.request import Request, RequestStatus

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
"""The service of an output token; both weights are from Sheng et al., section 5.1."""

MAX_IDLE_TENANTS = 4096
"""Counters kept for tenants without a request; the longest idle tenant is dropped first."""

KEPT_ROWS_SHARE = 16
"""One row in so many is kept from tenants that already run their share of rows."""

BURST_REQUESTS = 4


def burst_tokens_of(longest_request: int, pool_tokens: int) -> int:
    """Return how many weighted tokens a returning tenant may catch up on.

    Half the pool is a quarter of the difference that the paper allows.
    """
    return min(BURST_REQUESTS * longest_request, pool_tokens // 2)


@mypyc_attr(allow_interpreted_subclasses=True)
class _Tenant:
    __slots__ = ("index", "resuming", "waiting", "weight")

    def __init__(self, index: int, weight: float) -> None:
        self.index = index
        self.weight = weight
        self.waiting: OrderedDict[int, Request] = OrderedDict()
        """Requests that have not started yet, by arrival."""
        self.resuming: list[Request] = []
        """Preempted requests, by arrival; they go before the others."""

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.resuming)

    def in_order(self) -> Iterator[Request]:
        return chain(self.resuming, self.waiting.values())


class FairQueue:
    """``weights``: shares of tenants, 1 by default. ``burst_tokens``: how far a returning tenant may lag behind, in
    weighted tokens.
    """

    def __init__(self, weights: Mapping[str, float], burst_tokens: Callable[[], int]) -> None:
        self._weights = weights
        self._burst_tokens = burst_tokens
        self._tenants: dict[str, _Tenant] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._free_indices: deque[int] = deque()
        # Columns by tenant index.
        self._counters: NDArray[np.float64] = np.zeros(8)
        self._weight: NDArray[np.float64] = np.ones(8)
        self._num_waiting: NDArray[np.int64] = np.zeros(8, dtype=np.int64)
        self._num_live: NDArray[np.int64] = np.zeros(8, dtype=np.int64)
        """Waiting and running requests."""
        self._names: list[str] = []
        self._size = 0
        self._num_preempted = 0
        """Of the waiting requests."""
        self._charged_rows: RowIndices = NO_ROWS
        self._num_charged: NDArray[np.intp] = np.empty(0, dtype=np.intp)
        """How many of these rows each tenant has, by its index."""
        self._last_to_leave = -1
        self._live_weight = 0.0
        """Of the tenants with a request."""

    def __len__(self) -> int:
        return self._size

    def counter_of(self, tenant: str) -> float | None:
        """Lifts count as service."""
        return float(self._counters[self._tenants[tenant].index]) if tenant in self._tenants else 0.0

    def place_of_tenant(self, request: Request) -> int:
        return self._tenants[request.new.tenant].index

    def push(self, request: Request) -> None:
        self._size += 1
        tenant = self._tenant(request.new.tenant)
        if not tenant.num_waiting:
            self._lift(tenant)
        if request.status is RequestStatus.PREEMPTED:
            request.lane = Lane.RESUMING
            self._num_preempted += 1
            insort(tenant.resuming, request, key=attrgetter("arrival"))
        else:
            self._count_live(tenant)
            tenant.waiting[request.arrival] = request
        self._num_waiting[tenant.index] += 1

    def remove(self, request: Request) -> None:
        self._size -= 1
        tenant = self._tenants[request.new.tenant]
        if request.arrival in tenant.waiting:
            del tenant.waiting[request.arrival]
        else:
            tenant.resuming.remove(request)
            self._num_preempted -= 1
        self._num_waiting[tenant.index] -= 1
        if not tenant.num_waiting:
            self._last_to_leave = tenant.index

    def adopt(self, request: Request) -> None:
        """Count a preempted request that another queue forgot as live; ``push`` counts the others."""
        if request.status is RequestStatus.PREEMPTED:
            self._count_live(self._tenant(request.new.tenant))

    def forget(self, request: Request) -> None:
        name = request.new.tenant
        tenant = self._tenants[name]
        self._num_live[tenant.index] -= 1
        if not self._num_live[tenant.index]:
            self._idle[name] = None
            # Rounding errors end when all tenants are idle.
            self._live_weight = self._live_weight - tenant.weight if len(self._idle) < len(self._tenants) else 0.0
            if len(self._idle) > MAX_IDLE_TENANTS:
                self._drop(self._idle.popitem(last=False)[0])

    def first(self, now: float) -> Request | None:
        del now
        return next(self._least_served().in_order()) if self._size else None

    def first_few(self, count: int) -> list[Request]:
        first = self.first(0.0)
        if first is None or first.status is RequestStatus.PREEMPTED:
            return [] if first is None else [first]
        waiting = iter(self._tenants[first.new.tenant].waiting.values())
        return [request for _, request in zip(range(count), waiting, strict=False)]

    def rank_of(self, priority: int) -> int:
        del priority
        return UNRANKED

    def prompt_place(self, running: Request) -> PromptPlace:
        """While a preempted request waits, memory is short and the service order decides which row loses it.

        In another order, a prompt could take what others must wait for, be preempted, and come back first.
        """
        return (running.order_key,) if self._num_preempted else (*running.start_place, running.arrival)

    def may_overtake(self) -> bool:
        return not self._num_preempted

    def is_starved(self, running: Request, now: float) -> bool:
        """Service is charged, so overtaking ends."""
        del running, now
        return False

    def reason_to_preempt_for(self, request: Request) -> PreemptionReason | None:
        del request
        return None

    def goes_before(self, request: Request, running: Request) -> bool:
        return self._standing(self._tenants[request.new.tenant]) < running.start_place

    def num_kept_rows(self, request: Request, num_rows: int) -> int:
        """If its tenant runs its share, keep a few for a new tenant.

        So the share counts one tenant more.
        """
        tenant = self._tenants[request.new.tenant]
        _, num_running = self._standing(tenant)
        has_share = num_running * (self._live_weight + 1.0) >= tenant.weight * num_rows
        return num_rows // KEPT_ROWS_SHARE if has_share else 0

    def record_start(self, request: Request) -> None:
        tenant = self._tenants[request.new.tenant]
        counter, num_running = self._standing(tenant)
        request.start_place = counter, num_running - 1  # it counts as running already
        if request.scheduled_time is None:
            self._counters[tenant.index] += INPUT_WEIGHT * len(request.token_ids) / tenant.weight

    def charge_rows(self, tenants: NDArray[np.intp], rows: RowIndices) -> None:
        """Tenants are counted only when the rows change."""
        if self._charged_rows is not rows:
            self._charged_rows = rows
            self._num_charged = np.bincount(tenants[rows])
        self._charge(self._num_charged)

    def charge_token(self, tenant: int, count: int = 1) -> None:
        self._charge(count * (np.arange(tenant + 1) == tenant))

    def _charge(self, num_tokens: NDArray[np.integer[Any] | np.bool_]) -> None:
        """``num_tokens``: shape ``[n]`` by tenant index."""
        count = len(num_tokens)
        self._counters[:count] += OUTPUT_WEIGHT * num_tokens / self._weight[:count]

    def move(self, request: Request, lane: Lane) -> None:
        """No objective gives a tenant more than its share."""

    def in_order(self) -> list[Request]:
        """An estimate, since counters move on."""
        order = sorted((tenant for tenant in self._tenants.values() if tenant.num_waiting), key=self._place)
        return [request for tenant in order for request in tenant.in_order()]

    def _count_live(self, tenant: _Tenant) -> None:
        if not self._num_live[tenant.index]:
            self._live_weight += tenant.weight
        self._num_live[tenant.index] += 1

    def _least_served(self) -> _Tenant:
        end = len(self._names)
        counters = np.where(self._num_waiting[:end] > 0, self._counters[:end], np.inf)
        # In the order of ``_place``, for thousands of tenants at once: new ones are level with each other.
        least = (counters == counters.min()).nonzero()[0]
        index = int(least[np.argmin(self._num_live[least] - self._num_waiting[least])])
        return self._tenants[self._names[index]]

    def _place(self, tenant: _Tenant) -> tuple[float, int, int]:
        return (*self._standing(tenant), tenant.index)

    def _standing(self, tenant: _Tenant) -> tuple[float, int]:
        """A tenant level with another after a lift probably runs less."""
        index = tenant.index
        return float(self._counters[index]), int(self._num_live[index] - self._num_waiting[index])

    def _lift(self, tenant: _Tenant) -> None:
        """Algorithm 2, lines 6 to 13."""
        end = len(self._names)
        waits = self._num_waiting[:end] > 0
        if waits.any():
            floor = self._counters[:end][waits].min()
        elif self._last_to_leave >= 0:
            floor = self._counters[self._last_to_leave]
        else:
            return
        credit = self._burst_tokens() / tenant.weight
        self._counters[tenant.index] = max(self._counters[tenant.index], floor - credit)

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(self._take_index(name), self._weights.get(name, 1.0))
            self._weight[tenant.index] = tenant.weight
        self._idle.pop(name, None)
        return tenant

    def _take_index(self, name: str) -> int:
        if self._free_indices:
            index = self._free_indices.popleft()
            self._names[index] = name
            return index
        self._names.append(name)
        if len(self._names) > len(self._counters):
            more = len(self._counters)
            self._counters = np.concatenate((self._counters, np.zeros(more)))
            self._weight = np.concatenate((self._weight, np.ones(more)))
            self._num_waiting = np.concatenate((self._num_waiting, np.zeros(more, dtype=np.int64)))
            self._num_live = np.concatenate((self._num_live, np.zeros(more, dtype=np.int64)))
        return len(self._names) - 1

    def _drop(self, name: str) -> None:
        index = self._tenants.pop(name).index
        self._counters[index] = 0.0
        if self._last_to_leave == index:
            self._last_to_leave = -1
        self._free_indices.append(index)
