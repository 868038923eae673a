"""Requests that wait for a row, in service order.

Owns: the order of waiting requests. Must not know: why a request waits or what it needs.
"""

import heapq
from collections.abc import Callable

from headway_scheduler.core.request import NewRequestEvent, Request

_ARRIVAL_BITS = 48

OrderPolicy = Callable[[NewRequestEvent, int], int]
"""From a request and its arrival number to its order key; lower is served first. Keys must differ."""


def first_come_first_served(new: NewRequestEvent, arrival: int) -> int:
    """Order by arrival. A preempted request keeps its key, so it returns ahead of all that came after it."""
    del new
    return arrival


def by_priority(new: NewRequestEvent, arrival: int) -> int:
    """Order by priority class (lower number first), then by arrival."""
    return new.priority << _ARRIVAL_BITS | arrival


ORDER_POLICIES: dict[str, OrderPolicy] = {"fcfs": first_come_first_served, "priority": by_priority}


class WaitingQueue:
    """A heap by order key; removal is O(1) and leaves a hole that is skipped later."""

    def __init__(self) -> None:
        self._keys: list[int] = []
        self._members: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._members)

    def push(self, request: Request) -> None:
        """Add a request at its place in the order."""
        self._members[request.order_key] = request
        heapq.heappush(self._keys, request.order_key)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is."""
        del self._members[request.order_key]
        # Holes are bounded by the requests that really wait, or a cancelling client would grow the heap for ever.
        if len(self._keys) > 2 * len(self._members) + 64:
            self._keys = sorted(self._members)

    def first(self) -> Request | None:
        """The request that is served next."""
        while self._keys:
            request = self._members.get(self._keys[0])
            if request is not None:
                return request
            heapq.heappop(self._keys)
        return None

    def in_order(self) -> list[Request]:
        """All waiting requests in service order, for operators; O(n log n)."""
        return [self._members[key] for key in sorted(self._members)]
