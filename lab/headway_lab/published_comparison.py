"""A published comparison of batching policies: its figures and orderings.

The article is about iteration-level scheduling, for "Llama 70B, 128 concurrent users". A "chunk of C" is a token budget
of C. Lengths are not stated, so another device and model can only be expected to show the same order.
"""

from collections.abc import Mapping

import msgspec

from headway.terminal.tables import aligned

CHUNKS = (512, 256, 128)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The compared figures; latencies in milliseconds."""

    output_tokens_per_s: float
    itl_p50_ms: float
    itl_p99_ms: float
    ttft_p99_ms: float


class Ordering(msgspec.Struct, frozen=True, kw_only=True):
    """``figure`` of each pair's first case is below the second's."""

    text: str
    figure: str
    pairs: tuple[tuple[str, str], ...]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """``least_distance`` is the smallest upper / lower - 1 of an ordering's pairs."""

    text: str
    holds: bool
    least_distance: float


PUBLISHED = {
    "static": Figures(output_tokens_per_s=1200, itl_p50_ms=45, itl_p99_ms=850, ttft_p99_ms=3200),
    "orca": Figures(output_tokens_per_s=2800, itl_p50_ms=38, itl_p99_ms=420, ttft_p99_ms=1800),
    "chunk 512": Figures(output_tokens_per_s=2650, itl_p50_ms=40, itl_p99_ms=85, ttft_p99_ms=2100),
    "chunk 256": Figures(output_tokens_per_s=2550, itl_p50_ms=42, itl_p99_ms=65, ttft_p99_ms=2400),
    "chunk 128": Figures(output_tokens_per_s=2400, itl_p50_ms=44, itl_p99_ms=55, ttft_p99_ms=2800),
}

_OTHERS = tuple(label for label in PUBLISHED if label != "static")
_TO_SMALLER = (("chunk 512", "chunk 256"), ("chunk 256", "chunk 128"))
_TO_LARGER = tuple((after, before) for before, after in _TO_SMALLER)

ORDERINGS = (
    Ordering(
        text="static batching has the lowest throughput",
        figure="output_tokens_per_s",
        pairs=tuple(("static", label) for label in _OTHERS),
    ),
    Ordering(
        text="static batching has the longest P99 TTFT",
        figure="ttft_p99_ms",
        pairs=tuple((label, "static") for label in _OTHERS),
    ),
    Ordering(
        text="static batching has the longest P99 ITL",
        figure="itl_p99_ms",
        pairs=tuple((label, "static") for label in _OTHERS),
    ),
    Ordering(
        text="whole prompts have a longer P99 ITL than chunks",
        figure="itl_p99_ms",
        pairs=tuple((f"chunk {chunk}", "orca") for chunk in CHUNKS),
    ),
    Ordering(
        text="whole prompts have a higher throughput than chunks",
        figure="output_tokens_per_s",
        pairs=tuple((f"chunk {chunk}", "orca") for chunk in CHUNKS),
    ),
    Ordering(text="P99 ITL falls with smaller chunks", figure="itl_p99_ms", pairs=_TO_LARGER),
    Ordering(text="P50 ITL rises with smaller chunks", figure="itl_p50_ms", pairs=_TO_SMALLER),
    Ordering(text="P99 TTFT rises with smaller chunks", figure="ttft_p99_ms", pairs=_TO_SMALLER),
    Ordering(text="throughput falls with smaller chunks", figure="output_tokens_per_s", pairs=_TO_LARGER),
)


def findings(figures: Mapping[str, Figures]) -> list[Finding]:
    """Check each ordering whose cases all have figures."""
    return [
        _finding(ordering, figures)
        for ordering in ORDERINGS
        if all(label in figures for pair in ordering.pairs for label in pair)
    ]


def _finding(ordering: Ordering, figures: Mapping[str, Figures]) -> Finding:
    distances = []
    for below, above in ordering.pairs:
        lower: float = getattr(figures[below], ordering.figure)
        upper: float = getattr(figures[above], ordering.figure)
        distances.append(upper / lower - 1.0 if lower else 0.0)
    least = min(distances)
    return Finding(text=ordering.text, holds=least > 0.0, least_distance=round(least, 6))


def beside_published(kind: str, figures: Mapping[str, Figures]) -> list[str]:
    """Return a table of published and other figures, and whether each ordering holds."""
    rows: list[tuple[str, ...]] = [
        (f"published / {kind}", "output tok/s", "P50 ITL ms", "P99 ITL ms", "P99 TTFT ms"),
        *((label, *_cells(PUBLISHED.get(label), other)) for label, other in figures.items()),
    ]
    return [*aligned(rows), "", *map(_verdict, findings(figures))]


def _cells(published: Figures | None, other: Figures) -> list[str]:
    return [
        f"{'-' if published is None else format(getattr(published, figure), '.0f')} / {getattr(other, figure):.{digits}f}"
        for figure, digits in (("output_tokens_per_s", 0), ("itl_p50_ms", 1), ("itl_p99_ms", 1), ("ttft_p99_ms", 0))
    ]


def _verdict(finding: Finding) -> str:
    percent = f"{100 * abs(finding.least_distance):.1f}%"
    if finding.holds:
        return f"holds          {finding.text} (by {percent} at least)"
    return f"does not hold  {finding.text} (the other way round by {percent})"
