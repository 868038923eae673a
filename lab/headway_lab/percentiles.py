"""Percentiles of latencies, and rates, as every report of a run tells them.

Owns: how they are computed and rounded. Must not know: what was measured.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of values in milliseconds; None where there are none."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


def percentiles(values: NDArray[np.float64] | Sequence[float]) -> Percentiles:
    """Interpolated linearly between the two nearest values; what is not finite is left out."""
    finite = np.asarray(values)[np.isfinite(values)]
    if not len(finite):
        return Percentiles()
    p50, p90, p99 = np.percentile(finite, (50, 90, 99)).tolist()
    return Percentiles(p50=rounded(p50), p90=rounded(p90), p99=rounded(p99))


def ratio(numerator: float, denominator: float) -> float:
    """The quotient, 0 where there is nothing to divide by."""
    return rounded(numerator / denominator) if denominator else 0.0


def rounded(value: float) -> float:
    """A nanosecond at most where the value is in seconds; what is behind it is noise of additions."""
    return round(value, 9)
