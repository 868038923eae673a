"""Requests that wait for a row, in service order.

Owns: the order of waiting requests, and that nobody waits for ever. Must not know: why a request waits or what it needs.

A request's place is a key, lower first: its *rank* (its class, where the order ranks classes), its *lane* within the
rank (``Lane``), what the order says, and its arrival. Keys change only at events, so that a queue is a heap.

Nobody waits for ever, whatever the order: when the request that came first of all that wait, preempted ones included,
came ``aging_s`` seconds ago and is not the next anyway, it is promoted, though only once in ``STARTS_PER_PROMOTION``
starts. A promotion for every old request would turn each order into ``fcfs`` as soon as the load exceeds what can be
served, and the highest class would wait as long as the lowest; so the share of the starts that age can take is bounded
instead.

Where classes are ranked, a promoted request stands behind the highest class and before all others: for as long as that
class leaves room for anybody, what is old takes its time from the classes between. Once ``STARTS_PER_PROMOTION`` starts
in a row were of the highest class, the next promotion is to the very head.
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
"""The rank of all requests where the order does not rank classes."""

STARTS_PER_PROMOTION = 8
"""Of so many requests that start, at least all but one are those that the order wants."""

_MAX_HOLES = 64

ValueOf: TypeAlias = Callable[[Request], int]
"""What an order says of a request when it takes its place in the queue; lower is served first."""

PromptPlace: TypeAlias = tuple[float, ...]
"""Compares with those of the same queue."""

_Key: TypeAlias = tuple[int, int, int, int]


def rank_of_class(priority: int) -> int:
    """The rank of a class, 1 for the highest: odd, as of all who have not been promoted."""
    return 2 * priority - 1


def is_promoted(rank: int) -> bool:
    """Whether a request of this rank has been promoted."""
    return rank % 2 == 0


class Lane(IntEnum):
    """Within a rank: preempted requests first, then those about to miss their objective, those that missed it last."""

    RESUMING = 0
    URGENT = 1
    NORMAL = 2
    LATE = 3


class WaitingQueue(Protocol):
    """What the scheduler asks of a queue. ``now`` in seconds."""

    def __len__(self) -> int: ...

    def push(self, request: Request) -> None:
        """Add a request at its place in the order."""

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is."""

    def first(self, now: float) -> Request | None:
        """The request that is served next."""

    def first_few(self, count: int) -> list[Request]:
        """Up to ``count`` requests that are served next and that the order does not care to tell apart."""

    def rank_of(self, priority: int) -> int:
        """The rank of a new request of this class."""

    def prompt_place(self, running: Request) -> PromptPlace:
        """The place of a running request's prompt among those under way, lower is served first."""

    def may_overtake(self) -> bool:
        """Whether a waiting request may start before prompts under way go on."""

    def is_starved(self, running: Request, now: float) -> bool:
        """Whether a prompt under way must go before all classes, because it was overtaken for too long."""

    def reason_to_preempt_for(self, request: Request) -> PreemptionReason | None:
        """Why running requests of lower classes make way for a waiting one; None: they do not."""

    def goes_before(self, request: Request, running: Request) -> bool:
        """Whether a waiting request is to start before the prompt of a running one goes on."""

    def num_kept_rows(self, request: Request, num_rows: int) -> int:
        """How many of all rows must stay free when this waiting request starts."""

    def note_start(self, request: Request) -> None:
        """``request`` was taken out because it starts to run."""

    def move(self, request: Request, lane: Lane) -> None:
        """Give a waiting request another lane."""

    def forget(self, request: Request) -> None:
        """``request``, which is neither waiting nor running any more, has ended."""

    def place_of_tenant(self, request: Request) -> int:
        """The number of a live request's tenant in the books; 0 where none are kept."""

    def counter_of(self, tenant: str) -> float | None:
        """The service that a tenant has had by the books, in weighted tokens; None where none are kept."""

    def charge_rows(self, tenants: NDArray[np.intp], rows: RowIndices) -> None:
        """Each of ``rows`` has brought one output token. ``tenants``: numbers of tenants by row.

        The same array ``rows`` as in the call before means the same tenants.
        """

    def charge_token(self, tenant: int) -> None:
        """A request of the tenant with this number has brought one output token."""

    def in_order(self) -> list[Request]:
        """All waiting requests in service order, for operators; O(n log n)."""


def by_arrival(request: Request) -> int:
    """All alike: what is left is the arrival."""
    del request
    return 0


class KeyedQueue:
    """A heap by key; removal is O(1) and leaves a hole that is skipped later."""

    def __init__(self, value_of: ValueOf, aging_s: float) -> None:
        self._value_of = value_of
        self._aging_s = aging_s
        self._heap: list[_Key] = []
        self._members: dict[int, tuple[_Key, Request]] = {}
        self._arrivals: list[int] = []
        """A heap of those that wait, and of some that do no more."""
        self._num_starts = 0
        self._num_highest_starts = 0
        """Of the highest class, since one of another."""

    def __len__(self) -> int:
        return len(self._members)

    def push(self, request: Request) -> None:
        """Add a request at its place in the order."""
        if request.status is RequestStatus.PREEMPTED:
            request.lane = Lane.RESUMING
        heapq.heappush(self._arrivals, request.arrival)
        self._place(request, self._value_of(request))

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is."""
        del self._members[request.arrival]
        # Holes are bounded by the requests that really wait, or a cancelling client would grow the heap for ever.
        if len(self._heap) > 2 * len(self._members) + _MAX_HOLES:
            self._heap = [key for key, _ in self._members.values()]
            heapq.heapify(self._heap)
        if len(self._arrivals) > 2 * len(self._members) + _MAX_HOLES:
            self._arrivals = sorted(self._members)

    def first(self, now: float) -> Request | None:
        """The request that is served next."""
        request = self._head()
        if request is None or self._num_starts < STARTS_PER_PROMOTION:
            return request
        if self._arrivals and self._arrivals[0] == request.arrival:
            return request  # the usual case, told without a look at the others
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
        """Up to ``count`` requests of the rank and the lane of the first, which comes first."""
        found: list[Request] = []
        keys: list[_Key] = []
        while len(found) < count:
            request = self._head()
            if request is None or (found and (request.rank, request.lane) != (found[0].rank, found[0].lane)):
                break
            found.append(request)
            keys.append(heapq.heappop(self._heap))
            while self._heap and self._heap[0] == keys[-1]:
                heapq.heappop(self._heap)  # the same place, left behind by an earlier stay
        for key in keys:
            heapq.heappush(self._heap, key)
        return found

    def rank_of(self, priority: int) -> int:
        """The same for all classes."""
        del priority
        return UNRANKED

    def prompt_place(self, running: Request) -> PromptPlace:
        """By rank and first start."""
        return (running.order_key,)

    def may_overtake(self) -> bool:
        """No."""
        return False

    def is_starved(self, running: Request, now: float) -> bool:
        """No: nobody overtakes."""
        del running, now
        return False

    def reason_to_preempt_for(self, request: Request) -> PreemptionReason | None:
        """Its first token is about to be late."""
        return PreemptionReason.LATE_FIRST_TOKEN if request.lane == Lane.URGENT else None

    def goes_before(self, request: Request, running: Request) -> bool:
        """If its rank does: within a rank, what has started is not delayed by what has not."""
        return request.rank < running.rank

    def num_kept_rows(self, request: Request, num_rows: int) -> int:
        """None."""
        del request, num_rows
        return 0

    def note_start(self, request: Request) -> None:
        """``request`` was taken out because it starts to run."""
        self._num_starts += 1
        self._num_highest_starts = self._num_highest_starts + 1 if request.rank == HIGHEST_CLASS_RANK else 0
        if self._arrivals and self._arrivals[0] == request.arrival:
            heapq.heappop(self._arrivals)

    def move(self, request: Request, lane: Lane) -> None:
        """Give a waiting request another lane."""
        request.lane = lane
        self._place(request, self._value(request))

    def forget(self, request: Request) -> None:
        """Nothing: no books are kept."""

    def place_of_tenant(self, request: Request) -> int:
        """No books are kept."""
        del request
        return 0

    def counter_of(self, tenant: str) -> float | None:
        """No books are kept."""
        del tenant
        return None

    def charge_rows(self, tenants: NDArray[np.intp], rows: RowIndices) -> None:
        """Nothing: no books are kept."""

    def charge_token(self, tenant: int) -> None:
        """Nothing: no books are kept."""

    def in_order(self) -> list[Request]:
        """All waiting requests in service order, for operators; O(n log n)."""
        return [request for _, request in sorted(self._members.values(), key=lambda member: member[0])]

    def _value(self, request: Request) -> int:
        """What the order said when this request took its place."""
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
        """The one that came first, preempted ones included: where classes are ranked, they wait as well."""
        while self._arrivals:
            member = self._members.get(self._arrivals[0])
            if member is not None:
                return member[1]
            heapq.heappop(self._arrivals)
        return None


class ClassQueue(KeyedQueue):
    """A queue that ranks classes: a class never waits for one below it."""

    def rank_of(self, priority: int) -> int:
        """By class."""
        return rank_of_class(priority)

    def may_overtake(self) -> bool:
        """Yes: ``goes_before`` says which request."""
        return True

    def is_starved(self, running: Request, now: float) -> bool:
        """After ``aging_s`` seconds without a chunk: there might be requests of higher classes in every step."""
        return running.rank != HEAD_RANK and now - running.served_time >= self._aging_s

    def reason_to_preempt_for(self, request: Request) -> PreemptionReason | None:
        """Its class is higher."""
        del request
        return PreemptionReason.HIGHER_CLASS
