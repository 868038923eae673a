"""The waiting queue of the order ``fair``: a virtual token counter per tenant.

Owns: the counters, and which tenant's request is next. Must not know: rows, blocks, or how tokens come about.

After Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, Algorithm 2 (VTC): a tenant's counter grows
with the service that it gets, ``INPUT_WEIGHT`` per prompt token when a request starts and ``OUTPUT_WEIGHT`` per output
token as it comes, over the tenant's weight; the tenant with the lowest counter among those that wait starts a request
next; a tenant that had nothing waiting is lifted to the lowest counter of those that had, so that idleness earns no credit.
So the service of two tenants that both always wait differs by at most
``2 * max(INPUT_WEIGHT * longest prompt, OUTPUT_WEIGHT * tokens that fit the pool)`` (their Theorem 4.4), times
the weight. A tenant's own requests are served by arrival; preempted requests, which have been charged, before all others.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway_scheduler.core.request import Request, RequestStatus
from headway_scheduler.core.waiting_queue import KeyedQueue, Lane, by_arrival

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
"""What a token of a prompt and one of an output count for (Sheng et al., section 5.1)."""

MAX_IDLE_TENANTS = 4096
"""Counters that are kept of tenants without a request; the tenants that left first are forgotten first."""


class _Tenant:
    __slots__ = ("index", "num_live", "waiting", "weight")

    def __init__(self, index: int, weight: float) -> None:
        self.index = index
        self.weight = weight
        self.waiting: OrderedDict[int, Request] = OrderedDict()
        self.num_live = 0
        """Its requests that wait or run."""


class FairQueue:
    """Waiting requests by tenant. ``weights``: shares of tenants relative to each other, 1 where nothing is said."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._tenants: dict[str, _Tenant] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._free_indices: deque[int] = deque()
        # Columns by tenant index.
        self._counters: NDArray[np.float64] = np.zeros(8)
        self._weight: NDArray[np.float64] = np.ones(8)
        self._num_waiting: NDArray[np.int64] = np.zeros(8, dtype=np.int64)
        self._names: list[str] = []
        self._resuming = KeyedQueue(by_arrival, aging_s=float("inf"))
        self._size = 0
        self._last_to_leave = -1

    def __len__(self) -> int:
        return self._size

    def counter_of(self, tenant: str) -> float:
        """The service that a tenant has had, in weighted tokens; lifts included."""
        return float(self._counters[self._tenants[tenant].index]) if tenant in self._tenants else 0.0

    def place_of_tenant(self, request: Request) -> int:
        """The place of a live request's tenant, for ``charge_output``."""
        return self._tenants[request.new.tenant].index

    def push(self, request: Request) -> None:
        """Add a request behind those of its tenant; a preempted one before all."""
        self._size += 1
        if request.status is RequestStatus.PREEMPTED:
            self._resuming.push(request)
            return
        tenant = self._tenant(request.new.tenant)
        tenant.num_live += 1
        if not tenant.waiting:
            self._lift(tenant)
        tenant.waiting[request.arrival] = request
        self._num_waiting[tenant.index] += 1

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is."""
        self._size -= 1
        tenant = self._tenants[request.new.tenant]
        if request.arrival in tenant.waiting:
            del tenant.waiting[request.arrival]
            self._num_waiting[tenant.index] -= 1
            if not tenant.waiting:
                self._last_to_leave = tenant.index
        else:
            self._resuming.remove(request)

    def forget(self, request: Request) -> None:
        """``request`` has ended: its tenant may have nothing left."""
        name = request.new.tenant
        tenant = self._tenants[name]
        tenant.num_live -= 1
        if not tenant.num_live:
            self._idle[name] = None
            if len(self._idle) > MAX_IDLE_TENANTS:
                self._drop(self._idle.popitem(last=False)[0])

    def first(self, now: float) -> Request | None:
        """The oldest request of the tenant with the lowest counter."""
        if len(self._resuming):
            return self._resuming.first(now)
        if not self._size:
            return None
        tenant = self._tenants[self._names[self._least_served()]]
        return next(iter(tenant.waiting.values()))

    def first_few(self, count: int) -> list[Request]:
        """Up to ``count`` requests of the tenant that is next."""
        first = self.first(0.0)
        if first is None or first.status is RequestStatus.PREEMPTED:
            return self._resuming.first_few(min(count, 1))
        waiting = iter(self._tenants[first.new.tenant].waiting.values())
        return [request for _, request in zip(range(count), waiting, strict=False)]

    def note_start(self, request: Request) -> None:
        """Charge the prompt of a request that starts for the first time."""
        if request.scheduled_time is None:
            tenant = self._tenants[request.new.tenant]
            self._counters[tenant.index] += INPUT_WEIGHT * len(request.token_ids) / tenant.weight

    def charge_output(self, num_tokens: NDArray[np.integer[Any] | np.bool_]) -> None:
        """Charge output tokens, shape ``[n]`` by tenant index."""
        count = len(num_tokens)
        self._counters[:count] += OUTPUT_WEIGHT * num_tokens / self._weight[:count]

    def move(self, request: Request, lane: Lane) -> None:
        """Nothing: an objective gives no tenant more than its share."""

    def in_order(self) -> list[Request]:
        """Preempted requests, then the others by their tenants' counters; an estimate, since counters move on."""
        order = sorted(
            (tenant for tenant in self._tenants.values() if tenant.waiting),
            key=lambda tenant: (float(self._counters[tenant.index]), tenant.index),
        )
        return self._resuming.in_order() + [request for tenant in order for request in tenant.waiting.values()]

    def _least_served(self) -> int:
        end = len(self._names)
        return int(np.where(self._num_waiting[:end] > 0, self._counters[:end], np.inf).argmin())

    def _lift(self, tenant: _Tenant) -> None:
        """Let a tenant that had nothing waiting begin no lower than those that had (Algorithm 2, lines 6 to 13)."""
        end = len(self._names)
        waits = self._num_waiting[:end] > 0
        if waits.any():
            floor = self._counters[:end][waits].min()
        elif self._last_to_leave >= 0:
            floor = self._counters[self._last_to_leave]
        else:
            return
        self._counters[tenant.index] = max(self._counters[tenant.index], floor)

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
        return len(self._names) - 1

    def _drop(self, name: str) -> None:
        index = self._tenants.pop(name).index
        self._counters[index] = 0.0
        if self._last_to_leave == index:
            self._last_to_leave = -1
        self._free_indices.append(index)
