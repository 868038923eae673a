"""The steady part of open arrivals, as docs/bench.md defines it. Must not know: sending or layout.

At the beginning no request has ended yet, and at the end no more come. An overloaded server looks fast in the one and
slow in the other. So the steady part begins after a run-in: the shortest TTFT of the first tenth of requests, plus the
time from first token to end that nine in ten of them needed. This leaves out waiting in a queue, which the rule is to
find.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from headway_lab.bench.records import RequestRecord
from headway_lab.percentiles import ratio

REACHED_SHARE = 0.95
LEAST_ARRIVALS = 20

_MOST_CHANCE = 0.1
_FIRST_SHARE, _LEAST_FIRST = 0.1, 10
_TYPICAL = 90
_SIGMAS = 2.0


class SteadyPart(msgspec.Struct, frozen=True, kw_only=True):
    """The steady part's arrivals and answers. Times are in seconds."""

    run_in_s: float
    """How long the first requests took, without their wait in a queue."""
    span_s: float
    """From the first arrival of the load to its last."""
    length_s: float
    num_arrived: int
    num_answered: int
    chance: float
    """The gap between arrivals and answers that chance explains."""

    def reaches(self, share: float) -> bool | None:
        """Return whether this share was answered, if the load was long enough."""
        if self.num_arrived < LEAST_ARRIVALS:
            return None
        if self.num_answered + self.chance < share * self.num_arrived:
            return False
        if self.num_answered < share * self.num_arrived or self.chance > _MOST_CHANCE * self.num_arrived:
            return None
        return True

    @property
    def keeps_up(self) -> bool | None:
        """Whether the server kept up, if the load was long enough."""
        return self.reaches(REACHED_SHARE)

    @property
    def answered_per_s(self) -> float | None:
        """The achieved rate, if the load was long enough."""
        return None if self.keeps_up is None else ratio(self.num_answered, self.length_s)

    def num_requests_to_tell(self, rate: float) -> int:
        """Return about how many requests are enough."""
        under_way = rate * self.run_in_s
        num_steady = max(2 * LEAST_ARRIVALS, _SIGMAS * math.sqrt(2 * under_way) / _MOST_CHANCE)
        return math.ceil(1.5 * (under_way + num_steady))


def steady_part(records: Sequence[RequestRecord], measured_from_s: float) -> SteadyPart | None:
    """Return the steady part from ``measured_from_s`` on, if any."""
    answered = sorted((record for record in records if record.is_ok), key=lambda record: record.intended_s)
    if not answered:
        return None
    arrivals = np.sort([record.intended_s for record in records])
    ends = np.array([record.end_s for record in records])
    first = answered[: max(_LEAST_FIRST, round(_FIRST_SHARE * len(records)))]
    run_in_s = min(map(_wait_s, first)) + float(
        np.percentile([record.end_s - record.intended_s - _wait_s(record) for record in first], _TYPICAL)
    )
    end_s = float(arrivals[-1])
    start_s = min(max(float(arrivals[0]) + run_in_s, measured_from_s), end_s)
    came = arrivals > start_s
    went = np.array([start_s < record.end_s <= end_s for record in answered])
    num_open = [int((arrivals <= time_s).sum() - (ends <= time_s).sum()) for time_s in (start_s, end_s)]
    return SteadyPart(
        run_in_s=run_in_s,
        span_s=end_s - float(arrivals[0]),
        length_s=end_s - start_s,
        num_arrived=int(came.sum()),
        num_answered=int(went.sum()),
        chance=_SIGMAS * math.sqrt(sum(num_open)) * _burstiness(arrivals),
    )


def _wait_s(record: RequestRecord) -> float:
    return (record.chunk_times_s[0] if record.chunk_times_s else record.end_s) - record.intended_s


def _burstiness(arrivals: np.typing.NDArray[np.float64]) -> float:
    """Return the gaps' variation, at least 1 as for random arrivals."""
    gaps = np.diff(arrivals)
    return max(1.0, float(gaps.std() / gaps.mean())) if len(gaps) and gaps.any() else 1.0
