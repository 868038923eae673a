"""The latency objectives of live requests.

Owns: the tightest inter-token objective, and the first tokens at risk. Must not know: queues or rows.
"""

import heapq
from enum import Enum

from headway_scheduler.core.state.request import Request, RequestStatus

_LEAST_PRUNED = 256


class TightestObjective:
    """The least of changing objectives, in milliseconds; O(log n) per change."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._heap: list[int] = []

    def change(self, objective_ms: int, by: int) -> None:
        """Add ``by`` requests with this objective, which may be negative."""
        count = self._counts.get(objective_ms, 0) + by
        if count:
            if objective_ms not in self._counts:
                heapq.heappush(self._heap, objective_ms)
            self._counts[objective_ms] = count
        else:
            # Prune even if nobody asks for the least: each request may bring another objective.
            del self._counts[objective_ms]
            if len(self._heap) > 2 * len(self._counts):
                self._heap = sorted(self._counts)

    @property
    def tightest_ms(self) -> int | None:
        """The least; None if there is none."""
        while self._heap and self._heap[0] not in self._counts:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    @property
    def tightest_s(self) -> float | None:
        """The least in seconds."""
        tightest_ms = self.tightest_ms
        return None if tightest_ms is None else tightest_ms / 1e3


class Danger(Enum):
    """How a waiting request stands with its objective."""

    AT_RISK = "about to miss its objective"
    TOO_LATE = "can no longer meet it"


class FirstTokenWatch:
    """Reports when a waiting request is at risk of missing its first-token objective, and when it is too late.

    It is too late at its ``latest_start``, and at risk for ``GUARD_SHARE`` of the objective before. O(log n) per request.
    """

    GUARD_SHARE = 0.5

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Danger, Request]] = []
        self._prune_at = _LEAST_PRUNED
        self.next_due = float("inf")
        """When ``due`` next has a change to report, in seconds."""

    def watch(self, request: Request, objective_s: float) -> None:
        """Watch a waiting request; ``objective_s`` in seconds."""
        assert request.latest_start is not None
        at_risk = max(request.arrival_time, request.latest_start - self.GUARD_SHARE * objective_s)
        heapq.heappush(self._due, (at_risk, 2 * request.arrival, Danger.AT_RISK, request))
        heapq.heappush(self._due, (request.latest_start, 2 * request.arrival + 1, Danger.TOO_LATE, request))
        if len(self._due) > self._prune_at:
            # Requests that started long before their time would be held until then.
            self._due = [entry for entry in self._due if entry[3].status is RequestStatus.WAITING]
            heapq.heapify(self._due)
            self._prune_at = 2 * len(self._due) + _LEAST_PRUNED
        self.next_due = self._due[0][0] if self._due else float("inf")

    def due(self, now: float) -> list[tuple[Request, Danger]]:
        """Return changes up to ``now`` of waiting requests, by time."""
        found = []
        while self._due and self._due[0][0] <= now:
            _, _, danger, request = heapq.heappop(self._due)
            if request.status is RequestStatus.WAITING:
                found.append((request, danger))
        self.next_due = self._due[0][0] if self._due else float("inf")
        return found
