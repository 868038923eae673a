"""Ranges of numeric settings.

Owns: the check, its words. Must not know: any setting.
"""

import math
from collections.abc import Mapping
from typing import ClassVar, Protocol

from headway_proto.wording import shown


class Bounded(Protocol):
    """The least and most of each field, both allowed."""

    RANGES: ClassVar[Mapping[str, tuple[float, float]]]


def check_ranges(config: Bounded) -> None:
    """Refuse a number out of its range.

    Raises:
        ValueError: one line with field, value and what is allowed.
    """
    for field, (least, most) in config.RANGES.items():
        value = getattr(config, field)
        if not (least <= value <= most and math.isfinite(value)):
            unit = " seconds" * (field.endswith("_s") and not field.endswith("per_s"))
            raise ValueError(f"{field}: {shown(value)} is not allowed; allowed: {range_text((least, most))}{unit}")


def range_text(bounds: tuple[float, float]) -> str:
    """``0 to 64``, or ``0 or more``."""
    least, most = bounds
    return f"{number_text(least)} or more" if math.isinf(most) else f"{number_text(least)} to {number_text(most)}"


def number_text(bound: float) -> str:
    """Write whole numbers with all digits."""
    return f"{int(bound)}" if bound == int(bound) else f"{bound:g}"
