"""Percentiles and rates of reports."""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of milliseconds; None without values."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


def percentiles(values: NDArray[np.float64] | Sequence[float]) -> Percentiles:
    """Interpolate linearly between the nearest finite values."""
    finite = np.asarray(values)[np.isfinite(values)]
    if not len(finite):
        return Percentiles()
    p50, p90, p99 = np.percentile(finite, (50, 90, 99)).tolist()
    return Percentiles(p50=rounded(p50), p90=rounded(p90), p99=rounded(p99))


def ratio(numerator: float, denominator: float) -> float:
    """Return the quotient, 0 for a denominator of 0."""
    return rounded(numerator / denominator) if denominator else 0.0


def rounded(value: float) -> float:
    """Round to 9 digits (nanoseconds); the rest is noise of additions."""
    return round(value, 9)
