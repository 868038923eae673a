"""Slow start after a loss: how many of those who were in the steps that were lost may run again at once.

Owns: who has not come further since, and the width of the window. Must not know: why steps were lost, or who is suspected.

If one of them brings the executor down again, only those in the window can be to blame, and each of them has to be tried
alone; with everybody back at once, that would take as long as there are requests. A window of w lets N requests start in
some N / w rounds and leaves w to be tried, so that a width near the square root of N makes the sum of both small.
"""

import math
from collections.abc import Iterable

from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.request import Request

WINDOWS_PER_ROOT = 2
"""The width by the square root. Above one: that a second loss follows is the rarer case."""


class StartWindow:
    """Asked before a request starts; wide open unless ``narrow`` was called."""

    def __init__(self) -> None:
        self._goals: dict[Origin, tuple[Request, int]] = {}
        """Who has not come further yet, and the number of tokens with which it has."""
        self._width = 0
        self._num_running = 0

    @property
    def is_narrow(self) -> bool:
        """Whether anybody has to wait for a place."""
        return bool(self._goals)

    def unproven(self) -> list[Request]:
        """Who has not come further yet."""
        return [request for request, _ in self._goals.values()]

    def narrow(self, goals: Iterable[tuple[Request, int]]) -> None:
        """From now on these need a place, and those that did before, until each has as many tokens as its goal."""
        self._goals |= {request.new.origin: (request, goal) for request, goal in goals}
        self._width = WINDOWS_PER_ROOT * math.isqrt(len(self._goals))

    def note_tokens(self, request: Request, num_tokens: int) -> None:
        """It has ``num_tokens`` tokens by now. If these are enough it leaves its place to somebody else."""
        if num_tokens >= self._goals[request.new.origin][1]:
            del self._goals[request.new.origin]

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._goals.pop(request.new.origin, None)

    def begin_step(self) -> None:
        """Count who has a place."""
        self._num_running = sum(request.row >= 0 for request, _ in self._goals.values())

    def has_place_for(self, request: Request) -> bool:
        """Whether ``request`` may start in this step."""
        return request.new.origin not in self._goals or self._num_running < self._width

    def note_start(self, request: Request) -> None:
        """``request`` has started in this step."""
        self._num_running += request.new.origin in self._goals
