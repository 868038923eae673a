"""The search for the highest rate that meets an objective. Must not know: how a rate is tried.

A rate *meets* the objective if the required share of requests keeps theirs and the server keeps up.

Rates double until one misses (or halve until one meets), then the geometric mean of both is tried. A rate is measured
again, at most four times, until the required share is outside the 95% interval (Wilson's).
"""

import math
from collections.abc import Awaitable, Callable

import msgspec

_Z95 = 1.96
_MOST_LOOKS = 4
_LEAST_FRACTION = 1 / 1024


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """One run at a rate."""

    num_requests: int
    num_meeting: int
    keeps_up: bool | None
    """Whether the server kept up; None if the run was too short to tell."""
    trustworthy: bool
    """Whether the client itself was in time."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """All runs at one rate. ``low`` and ``high`` are 95% bounds of the true share."""

    rate: float
    num_looks: int
    num_requests: int
    share: float
    low: float
    high: float
    keeps_up: bool | None
    trustworthy: bool
    meets: bool
    close: bool
    """Whether chance may have decided."""


class Search:
    """The state of the search."""

    def __init__(self, first_rate: float, most_rate: float, tolerance: float) -> None:
        self._first = min(first_rate, most_rate)
        self._most = most_rate
        self._tolerance = tolerance
        self.met: float | None = None
        """The highest rate that met the objective."""
        self.missed: float | None = None
        """The lowest above it that did not."""

    def next_rate(self) -> float | None:
        """Return the rate to try now, if any."""
        if self.met is None and self.missed is None:
            return self._first
        if self.missed is None:
            assert self.met is not None
            return None if self.met >= self._most else min(2 * self.met, self._most)
        if self.met is None:
            return None if self.missed <= self._first * _LEAST_FRACTION else self.missed / 2
        if self.missed / self.met <= 1 + self._tolerance:
            return None
        return math.sqrt(self.met * self.missed)

    def record(self, rate: float, *, meets: bool) -> None:
        """Record the verdict on a rate."""
        if meets:
            self.met = rate
        else:
            self.missed = rate


TakeLook = Callable[[float], Awaitable[Look]]
"""Sends requests at a rate, other ones each time."""


async def find_capacity(
    search: Search, attainment: float, look: TakeLook, on_trial: Callable[[Trial], None]
) -> list[Trial]:
    """Search to the end; return the trials."""
    trials = []
    while (rate := search.next_rate()) is not None:
        trial = await _try(rate, attainment, look)
        search.record(rate, meets=trial.meets)
        trials.append(trial)
        on_trial(trial)
    return trials


async def _try(rate: float, attainment: float, take_look: TakeLook) -> Trial:
    looks: list[Look] = []
    while True:
        looks.append(await take_look(rate))
        num_requests = sum(look.num_requests for look in looks)
        num_meeting = sum(look.num_meeting for look in looks)
        low, high = wilson_interval(num_meeting, num_requests)
        verdicts = [look.keeps_up for look in looks]
        keeps_up = False if False in verdicts else None if None in verdicts else True
        is_close = bool(keeps_up) and low < attainment <= high
        if not is_close or len(looks) == _MOST_LOOKS:
            share = num_meeting / num_requests
            return Trial(
                rate=rate,
                num_looks=len(looks),
                num_requests=num_requests,
                share=share,
                low=low,
                high=high,
                keeps_up=keeps_up,
                trustworthy=all(look.trustworthy for look in looks),
                meets=bool(keeps_up) and share >= attainment,
                close=is_close,
            )


def wilson_interval(num_good: int, num_all: int) -> tuple[float, float]:
    """Return 95% bounds of a share (Wilson, 1927)."""
    share, spread = num_good / num_all, _Z95**2 / num_all
    middle = (share + spread / 2) / (1 + spread)
    half = _Z95 * math.sqrt(share * (1 - share) / num_all + spread / (4 * num_all)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)
