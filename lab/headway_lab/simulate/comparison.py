"""The published comparison of batching policies, run again. Must not know: how a run comes about.

The article's table prices each token at 0.34 ms, decode or not: only arithmetic counts there. The device here is the
same ("compute-bound"). On a real device decodes wait for the weights and a small chunk adds little, so the orderings of
throughput do not hold.

The lengths here are short, chosen from some dozens that were tried. With answers below a hundred tokens, the gap before
the second token reaches the 99th percentile. With few prompt tokens per answer token, most steps are decodes only, so
the median gap is not just the size of a chunk. All statements held with twelve of thirteen seeds.

A "chunk of C" is a budget of C beside one token per user. Whole prompts get the article's 2,048 tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from headway.flags.configuration import Given, Layer
from headway_lab.measurement import Totals
from headway_lab.published_comparison import CHUNKS, PUBLISHED, Figures, beside_published, findings
from headway_lab.simulate.cases import Case, case_of
from headway_lab.simulate.report import CaseResult

COMPARE_SOURCES = "sources"
_ORIGIN = "--compare"
_WHOLE_PROMPTS_BUDGET = 2048


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
"""The defaults of the comparison; flags replace them."""

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
    """Return the workload's settings below the ``given`` flags."""
    settings = dict(_as_given(SETTINGS))
    if "num_requests" in given:
        del settings["warmup_requests"]  # it might be all of them
    return settings


def source_cases(given: Layer, num_users: int) -> tuple[Case, ...]:
    """Return the cases of ``PUBLISHED``; ``given`` limits hold for all.

    Raises:
        ConfigurationError: a limit is wrong.
    """
    policies: dict[str, dict[str, Any]] = {
        "static": {"batching": "static", "max_num_batched_tokens": _WHOLE_PROMPTS_BUDGET},
        "orca": {"batching": "orca", "max_num_batched_tokens": _WHOLE_PROMPTS_BUDGET},
    }
    for chunk in CHUNKS:
        policies[f"chunk {chunk}"] = {"batching": "chunked", "max_num_batched_tokens": chunk + num_users}
    shared = _as_given({"max_num_seqs": num_users, "max_steps_in_flight": 1})
    return tuple(case_of(label, {**shared, **given, **_as_given(own)}) for label, own in policies.items())


def _as_given(values: Mapping[str, Any]) -> Layer:
    return {name: Given(value, _ORIGIN) for name, value in values.items()}


def figures_of(totals: Totals) -> Figures:
    """Return a run's compared figures; a missing latency is 0."""
    return Figures(
        output_tokens_per_s=totals.output_tokens_per_s,
        itl_p50_ms=totals.itl_ms.p50 or 0.0,
        itl_p99_ms=totals.itl_ms.p99 or 0.0,
        ttft_p99_ms=totals.ttft_ms.p99 or 0.0,
    )


def comparison_text(results: Sequence[CaseResult]) -> str:
    """Return the table, the orderings, and the reasons for differences."""
    figures = {result.case.label: figures_of(result.totals) for result in results}
    return "\n".join((*beside_published("simulated", figures), "", _NOTES))


def comparison_document(results: Sequence[CaseResult]) -> dict[str, Any]:
    """Return the comparison for the JSON."""
    figures = {result.case.label: figures_of(result.totals) for result in results}
    return {"published": PUBLISHED, "simulated": figures, "orderings": findings(figures)}
