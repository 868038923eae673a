"""Estimates when a refused request may try again, from the rate of recent starts.

Owns: that estimate. Must not know: reasons of refusals, the clock.
"""

import math

MEMORY_S = 10.0
"""The time constant with which older starts lose weight."""

LEAST_S = 0.1
MOST_S = 10.0
"""An outage looks like an endless queue, but ends sooner."""

UNKNOWN_S = 1.0
SHARE = 0.1
"""The share of the queue to start before a retry: a single free place would be taken again."""


class QueuePace:
    """Counts starts; estimates waits in seconds."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._since: float | None = None
        self._last = 0.0

    def count_starts(self, count: int, now: float) -> None:
        """Count first starts."""
        if self._since is None:
            self._since = now
        else:
            self._weight = self._weight_at(now) + count
        self._last = now

    def retry_after_s(self, num_waiting: int, now: float) -> float:
        """Return the time until a share of ``num_waiting`` requests has started."""
        if self._since is None or now <= self._since:
            return UNKNOWN_S
        if not self._weight:  # All came at once, so there is no pace yet: as long again as none has come.
            return min(MOST_S, max(UNKNOWN_S, now - self._since))
        # Correct for a short history.
        known = 1 - math.exp((self._since - now) / MEMORY_S)
        per_second = self._weight_at(now) / (MEMORY_S * known)
        wanted = max(1.0, SHARE * num_waiting)
        return MOST_S if per_second * MOST_S <= wanted else max(LEAST_S, wanted / per_second)

    def _weight_at(self, now: float) -> float:
        return self._weight * math.exp((self._last - now) / MEMORY_S)
