"""Figures as short texts: counts, durations, bars, sparklines."""

from collections.abc import Sequence

import msgspec


class Glyphs(msgspec.Struct, frozen=True):
    """The characters of bars and, in rising order, of sparklines."""

    filled: str
    empty: str
    sparks: str
    ellipsis: str


UNICODE = Glyphs("█", "░", "▁▂▃▄▅▆▇█", "…")
ASCII = Glyphs("#", ".", "_.-=+*%#", "~")


def glyphs_for(encoding: str) -> Glyphs:
    """Return the glyphs that an encoding can show."""
    try:
        "".join(msgspec.structs.astuple(UNICODE)).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def bar(share: float, width: int, glyphs: Glyphs) -> str:
    """Return a bar of ``width`` cells. Any value above 0 fills a cell, and only 1 fills all."""
    filled = round(share * width)
    if share > 0:
        filled = max(filled, 1)
    if share < 1:
        filled = min(filled, width - 1)
    filled = min(max(filled, 0), width)
    return glyphs.filled * filled + glyphs.empty * (width - filled)


def sparkline(values: Sequence[float], width: int, glyphs: Glyphs) -> str:
    """Return the last ``width`` values as columns; empty for fewer than two."""
    shown = values[-width:] if width > 0 and len(values) > 1 else ()
    highest = max(shown, default=0.0)
    if highest <= 0:
        return glyphs.sparks[0] * len(shown)
    top = len(glyphs.sparks) - 1
    return "".join(glyphs.sparks[round(top * value / highest)] for value in shown)


def count(value: float) -> str:
    """Return a count with separators, shortened from ten million on."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= 10 * size or (unit != "M" and value >= size):
            return f"{value / size:.1f}{unit}"
    return f"{value:,.0f}"


def short_count(value: int) -> str:
    """Return a count in thousands or millions."""
    if value < 10_000:
        return f"{value:,}"
    return f"{value / 1e3:.1f}k" if value < 1_000_000 else f"{value / 1e6:.1f}M"


def rate(value: float) -> str:
    """Return events per second; small rates have a decimal."""
    return f"{value:.1f}" if 0 < value < 100 else count(value)


def percent(share: float) -> str:
    """Return a share as percent."""
    return f"{100 * share:.1f}%"


def age(seconds: float) -> str:
    """Return a passed time in its two largest units."""
    if seconds < 60:
        return f"{max(seconds, 0.0):.1f}s"
    minutes, hours, days = int(seconds) // 60, int(seconds) // 3600, int(seconds) // 86400
    if hours < 1:
        return f"{minutes}m{int(seconds) % 60:02d}s"
    return f"{hours}h{minutes % 60:02d}m" if days < 1 else f"{days}d{hours % 24:02d}h"


def duration(seconds: float) -> str:
    """Return a measured time with three digits."""
    if seconds <= 0:
        return "0 s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds / 1e-9)} ns"


def _three_digits(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def numbered(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun, in the singular or plural."""
    return f"{number} {one if number == 1 else many or one + 's'}"
