"""Waiting requests in service order.

Owns: the order. Must not know: why a request waits.

A key, lower first, is the rank (the class, where classes are ranked), the lane, the order's value, and the arrival.
Keys change only at events, so a queue is a heap.

No request waits for ever: the oldest is promoted after ``aging_s`` seconds, but only once in ``STARTS_PER_PROMOTION``
starts. More promotions would turn each order into ``fcfs`` under overload.

Where classes are ranked, a promoted request stands behind the highest class only. After ``STARTS_PER_PROMOTION`` starts
of that class in a row, the next promotion goes to the head.
"""

import heapq
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headway_scheduler.core.state.counters import PreemptionReason
from headway_scheduler.core.state.indices import RowIndices
from headway_scheduler.core.state.request import Request, RequestStatus

HEAD_RANK = 0
"""Before all classes."""
HIGHEST_CLASS_RANK = 1
PROMOTED_RANK = 2
"""Behind the highest class, before all others."""
UNRANKED = 3
"""The rank of all requests if the order does not rank classes."""

STARTS_PER_PROMOTION = 8
"""At most one of so many starts is promoted."""

_MAX_HOLES = 64

ValueOf: TypeAlias = Callable[[Request], int]
"""The order's value of a request when it enters the queue; lower is served first."""

PromptPlace: TypeAlias = tuple[float, ...]
"""Places of one queue compare with each other."""

_Key: TypeAlias = tuple[int, int, int, int]


def rank_of_class(priority: int) -> int:
    """Return an odd rank: only promoted ranks are even."""
    return 2 * priority - 1


def is_promoted(rank: int) -> bool:
    """Whether a rank comes from a promotion."""
    return rank % 2 == 0


class Lane(IntEnum):
    """Within a rank: preempted, about to miss its objective, neither, too late for it."""

    RESUMING = 0
    URGENT = 1
    NORMAL = 2
    LATE = 3


class WaitingQueue(Protocol):
    """``now`` is in seconds."""

    def __len__(self) -> int: ...

    def push(self, request: Request) -> None:
        """Add a request."""

    def remove(self, request: Request) -> None:
        """Remove a request at any place."""

    def first(self, now: float) -> Request | None:
        """Return the next request."""

    def first_few(self, count: int) -> list[Request]:
        """Return up to ``count`` next requests of equal standing."""

    def rank_of(self, priority: int) -> int:
        """Return the rank of a new request of this class."""

    def prompt_place(self, running: Request) -> PromptPlace:
        """Return the place of a running prompt; lower is served first."""

    def may_overtake(self) -> bool:
        """Whether waiting requests may start before running prompts go on."""

    def is_starved(self, running: Request, now: float) -> bool:
        """Whether a running prompt was overtaken for too long and must go first."""

    def reason_to_preempt_for(self, request: Request) -> PreemptionReason | None:
        """Return why lower classes are preempted for this request; None if they are not."""

    def goes_before(self, request: Request, running: Request) -> bool:
        """Whether a waiting request starts before a running prompt goes on."""

    def num_kept_rows(self, request: Request, num_rows: int) -> int:
        """Return the rows that must stay free when it starts."""

    def record_start(self, request: Request) -> None:
        """Record that a removed request starts to run."""

    def move(self, request: Request, lane: Lane) -> None:
        """Give a waiting request another lane."""

    def adopt(self, request: Request) -> None:
        """``request``, which another queue forgot, is about to be pushed."""

    def forget(self, request: Request) -> None:
        """Drop a request that has ended."""

    def place_of_tenant(self, request: Request) -> int:
        """Return the tenant's index; 0 if service is not counted."""

    def counter_of(self, tenant: str) -> float | None:
        """Return its service in weighted tokens; None if not counted."""

    def charge_rows(self, tenants: NDArray[np.intp], rows: RowIndices) -> None:
        """Charge an output token for each of ``rows``; ``tenants`` holds indices by row.

        The same array ``rows`` as before means the same tenants.
        """

    def charge_token(self, tenant: int, count: int = 1) -> None:
        """Charge ``count`` output tokens."""

    def in_order(self) -> list[Request]:
        """Return all in service order, for operators; O(n log n)."""


def by_arrival(request: Request) -> int:
    """Return the same for all, so that arrival decides."""
    del request
    return 0


class KeyedQueue:
    """A heap by key. Removal is O(1) and leaves a hole that is skipped later."""

    def __init__(self, value_of: ValueOf, aging_s: float) -> None:
        self._value_of = value_of
        self._aging_s = aging_s
        self._heap: list[_Key] = []
        self._members: dict[int, tuple[_Key, Request]] = {}
        self._arrivals: list[int] = []
        """A heap of the waiting requests, and of some that no longer wait."""
        self._num_starts = 0
        self._num_highest_starts = 0
        """Starts of the highest class since the last start of another."""

    def __len__(self) -> int:
        return len(self._members)

    def push(self, request: Request) -> None:
        if request.status is RequestStatus.PREEMPTED:
            request.lane = Lane.RESUMING
        heapq.heappush(self._arrivals, request.arrival)
        self._place(request, self._value_of(request))

    def remove(self, request: Request) -> None:
        del self._members[request.arrival]
        # Without this bound, a client that cancels its requests would grow the heap for ever.
        if len(self._heap) > 2 * len(self._members) + _MAX_HOLES:
            self._heap = [key for key, _ in self._members.values()]
            heapq.heapify(self._heap)
        if len(self._arrivals) > 2 * len(self._members) + _MAX_HOLES:
            self._arrivals = sorted(self._members)

    def first(self, now: float) -> Request | None:
        request = self._head()
        if request is None or self._num_starts < STARTS_PER_PROMOTION:
            return request
        if self._arrivals and self._arrivals[0] == request.arrival:
            return request  # the usual case
        if is_promoted(request.rank):
            return request
        is_highest = request.rank == HIGHEST_CLASS_RANK
        if is_highest and self._num_highest_starts < STARTS_PER_PROMOTION:
            return request
        oldest = self._oldest()
        if oldest is None or oldest is request or now - oldest.arrival_time < self._aging_s:
            return request
        oldest.rank = HEAD_RANK if is_highest else PROMOTED_RANK
        self._num_starts = 0
        self._place(oldest, self._value(oldest))
        return oldest

    def first_few(self, count: int) -> list[Request]:
        found: list[Request] = []
        keys: list[_Key] = []
        while len(found) < count:
            request = self._head()
            if request is None or (found and (request.rank, request.lane) != (found[0].rank, found[0].lane)):
                break
            found.append(request)
            keys.append(heapq.heappop(self._heap))
            while self._heap and self._heap[0] == keys[-1]:
                heapq.heappop(self._heap)  # the same key, left by an earlier stay
        for key in keys:
            heapq.heappush(self._heap, key)
        return found

    def rank_of(self, priority: int) -> int:
        del priority
        return UNRANKED

    def prompt_place(self, running: Request) -> PromptPlace:
        return (running.order_key,)

    def may_overtake(self) -> bool:
        return False

    def is_starved(self, running: Request, now: float) -> bool:
        del running, now
        return False

    def reason_to_preempt_for(self, request: Request) -> PreemptionReason | None:
        return PreemptionReason.LATE_FIRST_TOKEN if request.lane == Lane.URGENT else None

    def goes_before(self, request: Request, running: Request) -> bool:
        """Within a rank, a start never delays a running prompt."""
        return request.rank < running.rank

    def num_kept_rows(self, request: Request, num_rows: int) -> int:
        del request, num_rows
        return 0

    def record_start(self, request: Request) -> None:
        self._num_starts += 1
        self._num_highest_starts = self._num_highest_starts + 1 if request.rank == HIGHEST_CLASS_RANK else 0
        if self._arrivals and self._arrivals[0] == request.arrival:
            heapq.heappop(self._arrivals)

    def move(self, request: Request, lane: Lane) -> None:
        request.lane = lane
        self._place(request, self._value(request))

    def adopt(self, request: Request) -> None:
        """Keep nothing."""

    def forget(self, request: Request) -> None:
        """Keep nothing."""

    def place_of_tenant(self, request: Request) -> int:
        del request
        return 0

    def counter_of(self, tenant: str) -> float | None:
        del tenant
        return None

    def charge_rows(self, tenants: NDArray[np.intp], rows: RowIndices) -> None:
        """Count no service."""

    def charge_token(self, tenant: int, count: int = 1) -> None:
        """Count no service."""

    def in_order(self) -> list[Request]:
        return [request for _, request in sorted(self._members.values(), key=lambda member: member[0])]

    def _value(self, request: Request) -> int:
        return self._members[request.arrival][0][2]

    def _place(self, request: Request, value: int) -> None:
        key = (request.rank, int(request.lane), value, request.arrival)
        self._members[request.arrival] = (key, request)
        heapq.heappush(self._heap, key)

    def _head(self) -> Request | None:
        while self._heap:
            key = self._heap[0]
            member = self._members.get(key[-1])
            if member is not None and member[0] == key:
                return member[1]
            heapq.heappop(self._heap)
        return None

    def _oldest(self) -> Request | None:
        """Preempted requests count: where classes are ranked, they wait as well."""
        while self._arrivals:
            member = self._members.get(self._arrivals[0])
            if member is not None:
                return member[1]
            heapq.heappop(self._arrivals)
        return None


class ClassQueue(KeyedQueue):
    """No class waits for a lower one."""

    def rank_of(self, priority: int) -> int:
        return rank_of_class(priority)

    def may_overtake(self) -> bool:
        return True

    def is_starved(self, running: Request, now: float) -> bool:
        """Higher classes may come in every step."""
        return running.rank != HEAD_RANK and now - running.served_time >= self._aging_s

    def reason_to_preempt_for(self, request: Request) -> PreemptionReason | None:
        del request
        return PreemptionReason.HIGHER_CLASS
