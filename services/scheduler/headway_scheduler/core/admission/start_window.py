"""Slow start after a loss: few requests of the lost steps run at once.

Owns: the requests without progress since. Must not know: why steps were lost.

After a second loss, each request in the window must be tried alone. With width w, N requests start in N / w rounds, and
w are left to try: w near the square root of N makes the sum small.
"""

import math
from collections.abc import Iterable

from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.request import Request

WINDOWS_PER_ROOT = 2
"""The width over the square root. It is above 1 because a second loss is the rarer case."""


class StartWindow:
    """Limits starts once ``narrow`` was called."""

    def __init__(self) -> None:
        self._goals: dict[Origin, tuple[Request, int]] = {}
        """Requests without progress, and the number of tokens that counts as progress."""
        self._width = 0
        self._num_running = 0

    @property
    def is_narrow(self) -> bool:
        """Whether any request needs a place."""
        return bool(self._goals)

    def unproven(self) -> list[Request]:
        """Return the requests without progress."""
        return [request for request, _ in self._goals.values()]

    def narrow(self, goals: Iterable[tuple[Request, int]]) -> None:
        """Limit these requests, beside earlier ones, until each reaches its goal of tokens."""
        self._goals |= {request.new.origin: (request, goal) for request, goal in goals}
        self._width = WINDOWS_PER_ROOT * math.isqrt(len(self._goals))

    def record_tokens(self, request: Request, num_tokens: int) -> None:
        """Free its place at its goal."""
        if num_tokens >= self._goals[request.new.origin][1]:
            del self._goals[request.new.origin]

    def forget(self, request: Request) -> None:
        """Drop a request that has ended."""
        self._goals.pop(request.new.origin, None)

    def begin_step(self) -> None:
        """Count the places taken."""
        self._num_running = sum(request.row >= 0 for request, _ in self._goals.values())

    def has_place_for(self, request: Request) -> bool:
        """Whether it may start in this step."""
        return not self._goals or request.new.origin not in self._goals or self._num_running < self._width

    def record_start(self, request: Request) -> None:
        """Count a start."""
        if self._goals:
            self._num_running += request.new.origin in self._goals
