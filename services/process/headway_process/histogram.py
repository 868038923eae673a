"""Counts values by bucket, since the start and recently.

Owns: buckets, counts, percentiles. Must not know: what is measured, clocks.
"""

from bisect import bisect_left
from collections import deque
from typing import NamedTuple

_PER_DECADE = 20
_LEAST_S = 1e-5
_DECADES = 9


class HistogramSnapshot(NamedTuple):
    """``cumulative[i]`` of ``num_values`` values are at most ``bounds[i]``; ``total``: their sum."""

    bounds: tuple[float, ...]
    cumulative: tuple[int, ...]
    num_values: int
    total: float


class Percentiles(NamedTuple):
    """0 without values."""

    num_values: int
    p50: float
    p90: float
    p99: float


class Histogram:
    """Recent counts are those of now minus those at the oldest mark.

    Args:
        exported: bounds of a snapshot, ascending.
        finer: more bounds, for precise percentiles.
        num_marks: marks to keep.
    """

    def __init__(self, exported: tuple[float, ...], finer: tuple[float, ...] = (), num_marks: int = 12) -> None:
        self._exported = exported
        self._bounds = tuple(sorted({*exported, *finer}))
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0
        self._marks: deque[list[int]] = deque([self._counts.copy()], maxlen=num_marks)

    def observe(self, value: float, count: int = 1) -> None:
        """Count ``value``."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._total += value * count

    def mark(self) -> None:
        """Keep the counts."""
        self._marks.append(self._counts.copy())

    def snapshot(self) -> HistogramSnapshot:
        """Values since the start."""
        cumulative, places = [], []
        num_values = 0
        for count in self._counts:
            num_values += count
            cumulative.append(num_values)
        places = [bisect_left(self._bounds, bound) for bound in self._exported]
        return HistogramSnapshot(self._exported, tuple(cumulative[place] for place in places), num_values, self._total)

    def recent(self) -> Percentiles:
        """Percentiles since the oldest mark, interpolated."""
        counts = [now - before for now, before in zip(self._counts, self._marks[0], strict=True)]
        count = sum(counts)
        if not count:
            return Percentiles(0, 0.0, 0.0, 0.0)
        return Percentiles(count, *(self._percentile(counts, share * count) for share in (0.5, 0.9, 0.99)))

    def _percentile(self, counts: list[int], rank: float) -> float:
        num_below = 0
        for place, count in enumerate(counts):
            if count and num_below + count >= rank:
                low = self._bounds[place - 1] if place else 0.0
                high = self._bounds[place] if place < len(self._bounds) else low
                return low + (high - low) * (rank - num_below) / count
            num_below += count
        return self._bounds[-1]


def fine_durations() -> tuple[float, ...]:
    """Bounds from 10 us to 10,000 s, 12% apart."""
    return tuple(_LEAST_S * 10 ** (place / _PER_DECADE) for place in range(_DECADES * _PER_DECADE + 1))
