"""When requests arrive. *Open* arrivals have known times. *Closed* arrivals come from users who send a request when
their last has ended.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headway_lab.workload.requests import PlannedRequest

REJECTED_PAUSE_S = 1.0
"""How long a refused user waits before the next request."""


class Arrival(NamedTuple):
    """A request and its intended time in seconds; sorts by both."""

    time_s: float
    number: int
    request: PlannedRequest


class Arrivals(Protocol):
    """The source of a run's requests."""

    def first(self) -> Iterable[Arrival]:
        """Return the arrivals that wait for no end."""
        ...

    def after_end(self, now: float, *, rejected: bool = False) -> Arrival | None:
        """Return the arrival that follows an end, or a refusal, at ``now``."""
        ...


class OpenArrivals:
    """Requests at given times of shape ``[requests]``."""

    def __init__(self, requests: Sequence[PlannedRequest], times_s: Sequence[float]) -> None:
        self._arrivals = [
            Arrival(time_s, request.number, request) for time_s, request in zip(times_s, requests, strict=True)
        ]

    def first(self) -> Iterable[Arrival]:
        """See ``Arrivals.first``."""
        return self._arrivals

    def after_end(self, now: float, *, rejected: bool = False) -> None:
        """See ``Arrivals.after_end``: never any."""
        del now, rejected


class ClosedArrivals:
    """``num_users`` users, who start within ``ramp_s`` and wait for each answer and ``think_s`` seconds."""

    def __init__(self, requests: Sequence[PlannedRequest], num_users: int, think_s: float, ramp_s: float = 0.0) -> None:
        self._first = requests[:num_users]
        self._ramp_s = ramp_s
        self._rest = iter(requests[num_users:])
        self._think_s = think_s

    def first(self) -> Iterable[Arrival]:
        """See ``Arrivals.first``: one request per user, evenly over the ramp."""
        gap_s = self._ramp_s / max(len(self._first), 1)
        return [Arrival(place * gap_s, request.number, request) for place, request in enumerate(self._first)]

    def after_end(self, now: float, *, rejected: bool = False) -> Arrival | None:
        """See ``Arrivals.after_end``."""
        request = next(self._rest, None)
        if request is None:
            return None
        pause_s = REJECTED_PAUSE_S if rejected else self._think_s
        return Arrival(now + pause_s, request.number, request)


def gamma_times(rng: np.random.Generator, count: int, rate: float, variation: float) -> NDArray[np.float64]:
    """Return arrival times with gaps from a gamma distribution of mean ``1 / rate`` seconds, shape ``[count]``.

    ``variation`` is the gaps' deviation over their mean: 1 is a Poisson process, above 1 comes in bursts.
    """
    shape = variation**-2
    return np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), size=count))
