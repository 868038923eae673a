"""Distributions of prompt and answer lengths, and their notation."""

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway_proto.wording import shown

NOTATION = "N, uniform:LOW,HIGH, lognormal:MEDIAN,SIGMA[,MOST] or pareto:LEAST,ALPHA[,MOST]"


class LengthDistribution(msgspec.Struct, frozen=True, kw_only=True):
    """Whole numbers of tokens, at least 1. ``KINDS`` defines the parameters."""

    kind: str
    parameters: tuple[float, ...]

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Draw ``count`` lengths."""
        values = KINDS[self.kind].draw(rng, count, *self.parameters)
        return np.maximum(np.floor(values), 1).astype(np.int64)


class LengthKind(msgspec.Struct, frozen=True):
    """A family of distributions, with its parameters' allowed values."""

    least_parameters: int
    most_parameters: int
    admits: Callable[..., bool]
    draw: Callable[..., NDArray[np.float64]]


# Larger lengths exceed any model's context, and would not fit a 64-bit integer.
_UNBOUNDED = float(1 << 40)


def _draw_fixed(rng: np.random.Generator, count: int, length: float) -> NDArray[np.float64]:
    del rng
    return np.full(count, length)


def _draw_uniform(rng: np.random.Generator, count: int, low: float, high: float) -> NDArray[np.float64]:
    return rng.integers(int(low), int(high), size=count, endpoint=True).astype(np.float64)


def _draw_lognormal(
    rng: np.random.Generator, count: int, median: float, sigma: float, most: float = _UNBOUNDED
) -> NDArray[np.float64]:
    return np.minimum(median * np.exp(sigma * rng.standard_normal(count)), most)


def _draw_pareto(
    rng: np.random.Generator, count: int, least: float, alpha: float, most: float = _UNBOUNDED
) -> NDArray[np.float64]:
    return np.minimum(least * (1.0 - rng.random(count)) ** (-1.0 / alpha), most)


KINDS = {
    "fixed": LengthKind(1, 1, lambda length: length >= 1, _draw_fixed),
    "uniform": LengthKind(2, 2, lambda low, high: 1 <= low <= high, _draw_uniform),
    "lognormal": LengthKind(
        2, 3, lambda median, sigma, most=_UNBOUNDED: 1 <= median <= most and sigma >= 0, _draw_lognormal
    ),
    "pareto": LengthKind(2, 3, lambda least, alpha, most=_UNBOUNDED: 1 <= least <= most and alpha > 0, _draw_pareto),
}


def check_lengths(**texts: str) -> None:
    """Check the notation of settings, by name.

    Raises:
        ValueError: one line that begins with the field's name.
    """
    for field, text in texts.items():
        try:
            parse_lengths(text)
        except ValueError as error:
            raise ValueError(f"{field}: {error}") from None


def parse_lengths(text: str) -> LengthDistribution:
    """Read the notation of the command line.

    Raises:
        ValueError: it is no distribution; the message has no line break.
    """
    name, separator, rest = text.partition(":")
    kind, numbers = (name, rest) if separator else ("fixed", text)
    try:
        parameters = tuple(float(number) for number in numbers.split(","))
    except ValueError:
        parameters = ()
    family = KINDS.get(kind)
    if (
        family is None
        or not family.least_parameters <= len(parameters) <= family.most_parameters
        or not all(abs(parameter) < _UNBOUNDED for parameter in parameters)
        or not family.admits(*parameters)
    ):
        raise ValueError(f"{shown(text)} is not allowed; allowed: {NOTATION}")
    return LengthDistribution(kind=kind, parameters=parameters)
