"""The waiting queue of the order ``fair``: a virtual token counter per tenant.

Owns: the counters, and which tenant's request is next. Must not know: rows, blocks, or how tokens come about.

After Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, Algorithm 2 (VTC): a tenant's counter grows
with the service that it gets, ``INPUT_WEIGHT`` per prompt token when a request starts and ``OUTPUT_WEIGHT`` per output
token as it comes, over the tenant's weight; the tenant with the lowest counter among those that wait starts a request
next; a tenant that had nothing waiting is lifted to the lowest counter of those that had, so that idleness earns no credit,
but for that of a burst (``burst_tokens_of``): somebody who sends little now and then is not made to take turns with
somebody who floods. That is less than the counters of two who wait may differ by anyway, so it leaves the bound as it is. So the service of two tenants that both always wait differs by at most
``2 * max(INPUT_WEIGHT * longest prompt, OUTPUT_WEIGHT * tokens that fit the pool)`` (their Theorem 4.4), times
the weight. A tenant's own requests are served by arrival, preempted ones, which have been charged, before its others.

In the paper a prompt runs in one step; here it may take many, and who comes while somebody else's is under way would
wait for the rest of it. So prompts under way are served by where their tenants stood when they started, and a waiting
request whose tenant stands before that starts first (start-time fair queueing: Goyal, Vin and Cheng, SIGCOMM 1996); of
tenants that are level, the one that runs less. A prompt is never overtaken by what is charged for it.
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
"""What a token of a prompt and one of an output count for (Sheng et al., section 5.1)."""

MAX_IDLE_TENANTS = 4096
"""Counters that are kept of tenants without a request; the tenants that left first are forgotten first."""

KEPT_ROWS_SHARE = 16
"""One row in so many is not for tenants that run their share of rows already."""

BURST_REQUESTS = 4


def burst_tokens_of(longest_request: int, pool_tokens: int) -> int:
    """The service, in weighted tokens, that a tenant may catch up on: of a few of the longest requests, at most half the
    pool, which is a quarter of what the paper lets counters differ by.
    """
    return min(BURST_REQUESTS * longest_request, pool_tokens // 2)


@mypyc_attr(allow_interpreted_subclasses=True)
class _Tenant:
    __slots__ = ("index", "num_live", "resuming", "waiting", "weight")

    def __init__(self, index: int, weight: float) -> None:
        self.index = index
        self.weight = weight
        self.waiting: OrderedDict[int, Request] = OrderedDict()
        """Those that have not started yet, by arrival."""
        self.resuming: list[Request] = []
        """Those that were preempted, by arrival: they are before the others."""
        self.num_live = 0
        """Its requests that wait or run."""

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.resuming)

    def in_order(self) -> Iterator[Request]:
        """Its waiting requests in service order."""
        return chain(self.resuming, self.waiting.values())


class FairQueue:
    """Waiting requests by tenant.

    ``weights``: shares of tenants relative to each other, 1 where nothing is said. ``burst_tokens``: the service, in weighted
    tokens, by which a tenant that comes back may lag behind all others.
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
        self._names: list[str] = []
        self._size = 0
        self._num_preempted = 0
        """Of the waiting requests."""
        self._charged_rows: RowIndices = NO_ROWS
        self._num_charged: NDArray[np.intp] = np.empty(0, dtype=np.intp)
        """How many of these rows are of each tenant, by its index."""
        self._last_to_leave = -1
        self._live_weight = 0.0
        """Of the tenants with a request."""

    def __len__(self) -> int:
        return self._size

    def counter_of(self, tenant: str) -> float | None:
        """The service that a tenant has had, in weighted tokens; lifts included."""
        return float(self._counters[self._tenants[tenant].index]) if tenant in self._tenants else 0.0

    def place_of_tenant(self, request: Request) -> int:
        """The number of a live request's tenant, for ``charge_rows``."""
        return self._tenants[request.new.tenant].index

    def push(self, request: Request) -> None:
        """Add a request behind those of its tenant; a preempted one before those that have not started."""
        self._size += 1
        tenant = self._tenant(request.new.tenant)
        if not tenant.num_waiting:
            self._lift(tenant)
        if request.status is RequestStatus.PREEMPTED:
            request.lane = Lane.RESUMING
            self._num_preempted += 1
            insort(tenant.resuming, request, key=attrgetter("arrival"))
        else:
            if not tenant.num_live:
                self._live_weight += tenant.weight
            tenant.num_live += 1
            tenant.waiting[request.arrival] = request
        self._num_waiting[tenant.index] += 1

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is."""
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

    def forget(self, request: Request) -> None:
        """``request`` has ended: its tenant may have nothing left."""
        name = request.new.tenant
        tenant = self._tenants[name]
        tenant.num_live -= 1
        if not tenant.num_live:
            self._idle[name] = None
            # Nothing is left of rounding when everybody is idle.
            self._live_weight = self._live_weight - tenant.weight if len(self._idle) < len(self._tenants) else 0.0
            if len(self._idle) > MAX_IDLE_TENANTS:
                self._drop(self._idle.popitem(last=False)[0])

    def first(self, now: float) -> Request | None:
        """The oldest request of the tenant with the lowest counter; if several have that, of the one that runs least."""
        del now
        return next(self._least_served().in_order()) if self._size else None

    def first_few(self, count: int) -> list[Request]:
        """Up to ``count`` requests of the tenant that is next."""
        first = self.first(0.0)
        if first is None or first.status is RequestStatus.PREEMPTED:
            return [] if first is None else [first]
        waiting = iter(self._tenants[first.new.tenant].waiting.values())
        return [request for _, request in zip(range(count), waiting, strict=False)]

    def rank_of(self, priority: int) -> int:
        """The same for all classes."""
        del priority
        return UNRANKED

    def prompt_place(self, running: Request) -> PromptPlace:
        """By the place of its tenant when it started, then by arrival; in the service order while a preempted one waits.

        Memory is short then, and it is taken away in the service order. In another order one prompt could take what
        another must wait for, be preempted, and come back first.
        """
        return (running.order_key,) if self._num_preempted else (*running.start_place, running.arrival)

    def may_overtake(self) -> bool:
        """Unless a preempted request waits, as in ``prompt_place``."""
        return not self._num_preempted

    def is_starved(self, running: Request, now: float) -> bool:
        """No: service is charged, so that nobody overtakes for ever."""
        del running, now
        return False

    def reason_to_preempt_for(self, request: Request) -> PreemptionReason | None:
        """None: an objective or a class gives no tenant more than its share."""
        del request
        return None

    def goes_before(self, request: Request, running: Request) -> bool:
        """If its tenant stands before where the other's stood when that started."""
        return self._standing(self._tenants[request.new.tenant]) < running.start_place

    def num_kept_rows(self, request: Request, num_rows: int) -> int:
        """A few, if its tenant runs its share of them: who comes next would wait until a request of somebody else ends.

        The share is what it would be with one tenant more, for whoever has nothing to run now.
        """
        tenant = self._tenants[request.new.tenant]
        num_running = tenant.num_live - tenant.num_waiting
        has_share = num_running * (self._live_weight + 1.0) >= tenant.weight * num_rows
        return num_rows // KEPT_ROWS_SHARE if has_share else 0

    def note_start(self, request: Request) -> None:
        """Note where its tenant stands; charge the prompt of a request that starts for the first time."""
        tenant = self._tenants[request.new.tenant]
        counter, num_running = self._standing(tenant)
        request.start_place = counter, num_running - 1  # it does not wait any more and counts as running
        if request.scheduled_time is None:
            self._counters[tenant.index] += INPUT_WEIGHT * len(request.token_ids) / tenant.weight

    def charge_rows(self, tenants: NDArray[np.intp], rows: RowIndices) -> None:
        """Charge one output token for each of ``rows``; their tenants are counted only when the rows change."""
        if self._charged_rows is not rows:
            self._charged_rows = rows
            self._num_charged = np.bincount(tenants[rows])
        self._charge(self._num_charged)

    def charge_token(self, tenant: int) -> None:
        """Charge one output token."""
        self._charge(np.arange(tenant + 1) == tenant)

    def _charge(self, num_tokens: NDArray[np.integer[Any] | np.bool_]) -> None:
        """Charge output tokens, shape ``[n]`` by tenant index."""
        count = len(num_tokens)
        self._counters[:count] += OUTPUT_WEIGHT * num_tokens / self._weight[:count]

    def move(self, request: Request, lane: Lane) -> None:
        """Nothing: an objective gives no tenant more than its share."""

    def in_order(self) -> list[Request]:
        """Requests by their tenants' counters; an estimate, since counters move on."""
        order = sorted((tenant for tenant in self._tenants.values() if tenant.num_waiting), key=self._place)
        return [request for tenant in order for request in tenant.in_order()]

    def _least_served(self) -> _Tenant:
        """Of the tenants with a waiting request, the one that comes first."""
        end = len(self._names)
        counters = np.where(self._num_waiting[:end] > 0, self._counters[:end], np.inf)
        least = (counters == counters.min()).nonzero()[0].tolist()
        return min((self._tenants[self._names[index]] for index in least), key=self._place)

    def _place(self, tenant: _Tenant) -> tuple[float, int, int]:
        return (*self._standing(tenant), tenant.index)

    def _standing(self, tenant: _Tenant) -> tuple[float, int]:
        """Lower is served first. A tenant that was lifted is level with another, and probably runs less than that."""
        return float(self._counters[tenant.index]), tenant.num_live - tenant.num_waiting

    def _lift(self, tenant: _Tenant) -> None:
        """Let a tenant that had nothing waiting begin little lower than those that had (Algorithm 2, lines 6 to 13)."""
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
        return len(self._names) - 1

    def _drop(self, name: str) -> None:
        index = self._tenants.pop(name).index
        self._counters[index] = 0.0
        if self._last_to_leave == index:
            self._last_to_leave = -1
        self._free_indices.append(index)
