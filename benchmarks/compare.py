"""The published comparison of batching policies, measured with a real model on this machine's CPU.

    python benchmarks/compare.py
    python benchmarks/compare.py --url http://127.0.0.1:8000/v1 --peer-name "vLLM 0.32"

Owns: the settings of each case, the load, the table, the picture and the result file. Must not know: how a load is sent
or measured; ``headway bench`` does that, for a peer too.

The load is that of ``headway simulate --compare`` (see ``headway_lab.simulate.comparison``): ``--users`` who always
wait for an answer, which saturates the machine. Prompts are 40 tokens in the median and 2,000 at most, so a whole
prompt delays all other tokens. The model has random weights in a Llama shape of 40M parameters by default; the demo
model's steps and context would be too short. "chunk C" is a budget of C tokens beside one per user; the others get
2,048 tokens a step.

Cases take turns for ``--rounds`` rounds, and medians count, because a shared machine drifts. Only the order of figures
compares with the published ones.
"""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headway_lab.bench.options import BenchOptions
from headway_lab.bench.report import warnings
from headway_lab.bench.session import BenchResult, bench
from headway_lab.published_comparison import CHUNKS, PUBLISHED, Figures, beside_published, findings
from headway_lab.simulate.comparison import SETTINGS
from program import count, parser_of, provenance, write_result
from served import DEMO_MODEL, served, write_random_model
from slo_on_cpu import SHAPE_40M

WHOLE_PROMPTS_BUDGET = 2048
MAX_MODEL_LEN = 2560
PANELS = (
    ("output_tokens_per_s", "output tokens/s"),
    ("itl_p50_ms", "P50 ITL, ms"),
    ("itl_p99_ms", "P99 ITL, ms"),
    ("ttft_p99_ms", "P99 TTFT, ms"),
)
SHOWN_FROM_PERCENT = 5
BLUE, GREY = "#2563a8", "#b5b5b5"


def settings_of_cases(num_users: int) -> dict[str, tuple[str, ...]]:
    """Return the flags of each case: those of ``PUBLISHED``, and ``prefill_first``, which the article does not have."""
    whole = ("--max-num-batched-tokens", str(WHOLE_PROMPTS_BUDGET))
    chunked = {
        f"chunk {chunk}": ("--batching", "chunked", "--max-num-batched-tokens", str(chunk + num_users))
        for chunk in CHUNKS
    }
    return {
        "static": ("--batching", "static", *whole),
        "orca": ("--batching", "orca", *whole),
        "prefill first": ("--batching", "prefill_first", *whole),
        **chunked,
    }


@contextmanager
def target_of(label: str, model: Path, arguments: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Return the bench's options for the server of a case; a peer runs already."""
    if label == arguments.peer_name:
        yield {"url": arguments.url, "endpoint": arguments.endpoint, "model": arguments.peer_model}
        return
    shared = (
        *("--model", str(model), "--backend", "torch", "--max-num-seqs", str(arguments.users)),
        *("--num-kv-blocks", str(arguments.num_kv_blocks), "--max-model-len", str(arguments.max_model_len)),
        *("--num-threads", str(arguments.threads), "--swap-space-mib", "0"),
    )
    with served(*shared, *settings_of_cases(arguments.users)[label]) as address:
        yield {"address": address}


def options_of(target: Mapping[str, str], arguments: argparse.Namespace) -> BenchOptions:
    return BenchOptions(
        **target,
        users=arguments.users,
        num_requests=arguments.num_requests,
        warmup_requests=arguments.warmup_requests,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        seed=arguments.seed,
    )


def run_case(label: str, model: Path, arguments: argparse.Namespace) -> BenchResult:
    with target_of(label, model, arguments) as target:
        # The same few requests first: threads, caches, connections.
        options = options_of(target, arguments)
        short = msgspec.structs.replace(options, num_requests=min(16, arguments.users), warmup_requests=0, seed=1 << 40)
        asyncio.run(bench(short, f"requests to warm up {label}"))
        return asyncio.run(bench(options, f"requests of {label}"))


def figures_of(results: list[BenchResult]) -> Figures:
    """Return the median of each figure over the rounds."""

    def median(values: Iterator[float | None]) -> float:
        return statistics.median(value or 0.0 for value in values)

    totals = [result.totals for result in results]
    return Figures(
        output_tokens_per_s=median(one.output_tokens_per_s for one in totals),
        itl_p50_ms=median(one.itl_ms.p50 for one in totals),
        itl_p99_ms=median(one.itl_ms.p99 for one in totals),
        ttft_p99_ms=median(one.ttft_ms.p99 for one in totals),
    )


def draw(path: Path, title: str, figures: Mapping[str, Figures], results: Mapping[str, list[BenchResult]]) -> None:
    """Draw each figure over orca's, published and measured, and below the distribution of ITLs."""
    figure = Figure(figsize=(11, 9), layout="constrained")
    figure.suptitle(title, fontsize=10)
    above, below = figure.subfigures(2, 1, height_ratios=(3, 2))
    reference = "orca" if "orca" in figures else next(iter(figures))
    for axes, (name, words) in zip(above.subplots(2, 2).flat, PANELS, strict=True):
        draw_panel(axes, name, words, figures, reference)
    draw_gaps(below.subplots(), results)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    figure.savefig(path, format="png")


def draw_panel(axes: Axes, name: str, words: str, figures: Mapping[str, Figures], reference: str) -> None:
    places = np.arange(len(figures))
    measured = [getattr(one, name) for one in figures.values()]
    unit = getattr(figures[reference], name) or 1.0
    heights = [value / unit for value in measured]
    bars = axes.bar(places - 0.2, heights, 0.38, color=BLUE, label="measured")
    axes.bar_label(bars, labels=[f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in measured], fontsize=7)
    known = [place for place, label in enumerate(figures) if label in PUBLISHED and reference in PUBLISHED]
    labels = list(figures)
    published = [getattr(PUBLISHED[labels[place]], name) for place in known]
    if known:
        over = [value / getattr(PUBLISHED[reference], name) for value in published]
        bars = axes.bar(np.array(known) + 0.2, over, 0.38, color=GREY, label="published")
        axes.bar_label(bars, labels=[f"{value:.0f}" for value in published], fontsize=7)
    axes.set_xticks(places, labels, fontsize=7)
    axes.set_title(f"{words} ({reference} = 1)", fontsize=9)
    axes.margins(y=0.12)
    if name == PANELS[0][0]:
        axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
        axes.margins(y=0.3)


def draw_gaps(axes: Axes, results: Mapping[str, list[BenchResult]]) -> None:
    shortest = float("inf")
    for label, rounds in results.items():
        gaps = np.sort([gap for result in rounds for request in result.requests for gap in request.itl_ms])
        above_zero = gaps > 0
        # From the top: it is the longest gaps that differ.
        rest = 1.0 - np.arange(len(gaps)) / len(gaps)
        axes.plot(gaps[above_zero], rest[above_zero], label=label)
        shortest = min(shortest, float(np.percentile(gaps[above_zero], SHOWN_FROM_PERCENT)))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left=shortest)
    axes.set_ylim(1e-4, 1.2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("ITL, ms")
    axes.set_ylabel("share of gaps longer")
    axes.legend(frameon=False, fontsize=8)


def record_of(
    arguments: argparse.Namespace, figures: Mapping[str, Figures], results: Mapping[str, list[BenchResult]]
) -> dict[str, object]:
    cases = settings_of_cases(arguments.users)
    load = ("users", "num_requests", "warmup_requests", "prompt_tokens", "output_tokens", "max_model_len", "rounds")
    return {
        "benchmark": "compare",
        **provenance(arguments.seed),
        "model": "demo" if arguments.model == DEMO_MODEL else "given" if arguments.model else SHAPE_40M,
        "load": {name: getattr(arguments, name) for name in load},
        "published": PUBLISHED,
        "measured": figures,
        "orderings": findings(figures),
        "cases": {
            label: {"flags": cases.get(label), "rounds": [result.totals for result in rounds]}
            for label, rounds in results.items()
        },
    }


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--model", type=Path, help="a checkpoint, or demo, instead of random weights")
    parser.add_argument("--cases", help="comma-separated; default: all, or none with --url")
    parser.add_argument("--url", default="", help="an OpenAI-compatible peer that runs already, as another case")
    parser.add_argument("--endpoint", default="completions", choices=("completions", "chat"))
    parser.add_argument("--peer-name", default="peer")
    parser.add_argument(
        "--peer-model", default="", help="the model to ask the peer for; empty: the first that it lists"
    )
    parser.add_argument("--users", type=count, default=SETTINGS["users"])
    parser.add_argument("--num-requests", type=count, default=SETTINGS["num_requests"])
    parser.add_argument("--warmup-requests", type=int, default=SETTINGS["warmup_requests"])
    parser.add_argument("--prompt-tokens", default=SETTINGS["prompt_tokens"])
    parser.add_argument("--output-tokens", default=SETTINGS["output_tokens"])
    parser.add_argument("--num-kv-blocks", type=count, default=4096)
    parser.add_argument("--max-model-len", type=count, default=MAX_MODEL_LEN)
    parser.add_argument("--threads", type=int, default=0, help="of the backend; 0: as it chooses")
    parser.add_argument("--rounds", type=count, default=1)
    parser.add_argument("--png", type=Path, help="draw it")
    arguments = parser.parse_args()
    if arguments.model == Path("demo"):
        arguments.model = DEMO_MODEL
    return arguments


def labels_of(arguments: argparse.Namespace) -> list[str]:
    known = settings_of_cases(arguments.users)
    if arguments.cases is None:
        labels = [] if arguments.url else list(known)
    else:
        labels = [label.strip() for label in arguments.cases.split(",")]
    unknown = [label for label in labels if label not in known]
    if unknown:
        raise SystemExit(f"--cases: {unknown[0]!r} is not allowed; allowed: {', '.join(known)}")
    return labels + [arguments.peer_name] * bool(arguments.url)


def main() -> None:
    arguments = parse_arguments()
    results: dict[str, list[BenchResult]] = {label: [] for label in labels_of(arguments)}
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.model or Path(scratch)
        if arguments.model is None:
            write_random_model(model, arguments.seed, SHAPE_40M)
        for place in range(arguments.rounds):
            for label, rounds in results.items():
                rounds.append(run_case(label, model, arguments))
                totals = rounds[-1].totals
                print(
                    f"round {place + 1}, {label}: {totals.output_tokens_per_s:.0f} output tokens/s, P99 ITL "
                    f"{totals.itl_ms.p99 or 0.0:.0f} ms",
                    flush=True,
                )
                for line in warnings(totals, options_of({}, arguments).max_late_ms):
                    print(f"  {line}", flush=True)
    figures = {label: figures_of(rounds) for label, rounds in results.items()}
    print("", *beside_published("measured", figures), sep="\n")
    document = msgspec.to_builtins(record_of(arguments, figures, results))
    write_result(arguments.json, document)
    if arguments.png:
        title = f"{arguments.users} users, {arguments.num_requests} requests, prompts {arguments.prompt_tokens}, answers {arguments.output_tokens}"
        draw(arguments.png, title, figures, results)


if __name__ == "__main__":
    main()
