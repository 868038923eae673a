"""The adapters of the running requests, at most ``max_adapters`` of them.

Owns: how many requests with a row use each, and what may join. Must not know: the queue, or what an adapter is.

A step runs rows of these alone, so a decoding row never waits for another adapter's turn. A waiting request whose adapter
is one too many is passed over, at most as often as any request; then nothing starts before it, and since each running
request ends, an adapter's place comes free.
"""

from collections import Counter

from headway_scheduler.core.state.request import Request


class RunningAdapters:
    """Requests without an adapter need no place."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_requests: Counter[str] = Counter()

    def has_place_for(self, request: Request) -> bool:
        """Whether it may start beside those that run."""
        adapter = request.new.adapter
        return not adapter or adapter in self._num_requests or len(self._num_requests) < self._most

    def join(self, request: Request) -> None:
        """It has taken a row."""
        if request.new.adapter:
            self._num_requests[request.new.adapter] += 1

    def leave(self, request: Request) -> None:
        """It has given up its row."""
        adapter = request.new.adapter
        if adapter:
            self._num_requests[adapter] -= 1
            if not self._num_requests[adapter]:
                del self._num_requests[adapter]
