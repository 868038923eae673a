"""Two checkouts of Headway on the same work, by turns: what this one takes as a ratio of what the other takes.

    git worktree add /tmp/before COMMIT
    python benchmarks/by_turns.py --before /tmp/before --rounds 5

Owns: the turns and the ratios. Must not know: how anything is measured; the benchmarks of each checkout do that.

Each round runs the same benchmark in both checkouts, one after the other, and changes who begins. A ratio is made within
a round, since the speed of a shared machine drifts; the table shows the median of the rounds, the smallest and the largest.
Both are compiled first, so that compiled cores and kernels are compared. A figure that the older benchmark lacks is not a
number; a copy of the newer file in the other checkout measures it there too.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from program import commit_of, count, provenance

HERE = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = ("benchmarks", "proto", "kernels", "services/*", "lab", "tests/conformance")
BUILDERS = (("kernels/headway_kernels/cpu/build.py",), ("-m", "headway_scheduler.compile_core"))


class Figure(NamedTuple):
    """One figure in the result of a benchmark; ``is_rate`` where more is better."""

    name: str
    read: Callable[[Any], float]
    is_rate: bool = False


class Work(NamedTuple):
    """A benchmark with its arguments; it writes its result to the file that follows them."""

    words: tuple[str, ...]
    figures: tuple[Figure, ...]


def step_figures(num_running: int, policies: str) -> tuple[Figure, Figure]:
    """The medians of a step in which all decode and of one with churn, in microseconds."""

    def read(result: Any, work: str) -> float:
        rows = result["rows"]
        (row,) = (row for row in rows if row["policies"] == policies and row["running"] == num_running)
        return float(row[work]["median_us"])

    name = f"{num_running:,} rows, {policies}, us"
    return Figure(f"step, {name}", lambda result: read(result, "decode")), Figure(
        f"churn, {name}", lambda result: read(result, "churn")
    )


def rate_figures(what: str, model: str, all_rows: tuple[int, ...]) -> tuple[Figure, ...]:
    """Tokens per second of decodes and of prompts of one ``model`` of a benchmark that compares two, by number of rows."""
    return tuple(
        Figure(
            f"{what}, {kind} tokens/s, {rows} rows",
            lambda result, place=place, kind=kind: result["results"][place][f"{model}_{kind}_rate"],
            is_rate=True,
        )
        for place, rows in enumerate(all_rows)
        for kind in ("decode", "prompt")
    )


WORKS = {
    "scheduler": Work(
        ("scheduler_step.py", "--running", "256,4096", "--waiting", "0", "--rounds", "4", "--output"),
        tuple(
            figure
            for num_running in (256, 4096)
            for name in ("default", "everything")
            for figure in step_figures(num_running, name)
        ),
    ),
    "gateway": Work(
        ("gateway.py", "--rounds", "2", "--requests", "200", "--output"),
        (
            Figure(
                "gateway tokens/s", lambda result: max(r["tokens_per_s"] for r in result["throughput"]), is_rate=True
            ),
            *(
                Figure(name, lambda result, row=row: result["latency"].get(row, {}).get("p50_ms", math.nan))
                for name, row in (
                    ("added to a first token, ms", "added to the first token"),
                    ("the same over a plain socket, ms", "added, over a plain socket"),
                    ("a bare grpcio server, ms", "second message of a bare grpcio server"),
                    ("an echo of asyncio, ms", "echo of a bare asyncio server"),
                )
            ),
        ),
    ),
    "cpu": Work(
        ("torch_cpu.py", "--concurrency", "8", "--repetitions", "3", "--rounds", "1", "--json"),
        (Figure("CPU tokens/s, 8 at once", lambda result: result["results"][0]["best_output_rate"], is_rate=True),),
    ),
    "latent": Work(
        ("latent.py", "--rows", "1,8", "--rounds", "2", "--json"),
        rate_figures("latent attention", "latent", (1, 8)) + rate_figures("whole keys", "plain", (1, 8)),
    ),
    "experts": Work(
        ("experts.py", "--rows", "1,8,32", "--rounds", "3", "--json"),
        rate_figures("mixture", "mixture", (1, 8, 32)),
    ),
}


def environment_of(root: Path) -> dict[str, str]:
    """This environment with the packages of one checkout before all others."""
    packages = [str(path) for pattern in SOURCE_ROOTS for path in sorted(root.glob(pattern)) if path.is_dir()]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(packages)}


def run_in(root: Path, *words: str) -> None:
    """Run Python in a checkout."""
    subprocess.run([sys.executable, "-P", *words], cwd=root, env=environment_of(root), check=True, stdout=sys.stderr)


def measure(root: Path, work: Work) -> list[float]:
    """The figures of one run."""
    with tempfile.TemporaryDirectory(prefix="headway-turns-") as scratch:
        output = Path(scratch, "result.json")
        script, *words = work.words
        run_in(root, str(Path("benchmarks", script)), *words, str(output))
        result = json.loads(output.read_text())
    return [figure.read(result) for figure in work.figures]


def compare(before: Path, names: list[str], rounds: int) -> list[dict[str, object]]:
    """One row for each figure: both medians, and the ratios of time, now to before, above 1 where it is slower now."""
    rows: list[dict[str, object]] = []
    for name in names:
        work = WORKS[name]
        pairs: list[tuple[list[float], list[float]]] = []
        for place in range(rounds):
            order = (before, HERE) if place % 2 == 0 else (HERE, before)
            found = {root: measure(root, work) for root in order}
            pairs.append((found[before], found[HERE]))
            print(f"{name}: round {place + 1} of {rounds}", file=sys.stderr)
        for place, figure in enumerate(work.figures):
            old, new = [pair[0][place] for pair in pairs], [pair[1][place] for pair in pairs]
            ratios = [a / b if figure.is_rate else b / a for a, b in zip(old, new, strict=True)]
            rows.append(
                {
                    "figure": figure.name,
                    "before": statistics.median(old),
                    "now": statistics.median(new),
                    "time_ratio": statistics.median(ratios),
                    "ratios": [round(ratio, 4) for ratio in ratios],
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--works", default=",".join(WORKS), help="of these, with commas between")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    before = options.before.resolve()
    names = options.works.split(",")
    unknown = sorted(set(names) - set(WORKS))
    if unknown:
        parser.error(f"--works: {unknown[0]!r} is not allowed; allowed: {', '.join(WORKS)}")
    for root in (before, HERE):
        for builder in BUILDERS:
            run_in(root, *builder)
    rows = compare(before, names, options.rounds)
    print(f"{'':34}{'before':>12}{'now':>12}{'time, now/before':>18}{'smallest':>10}{'largest':>9}")
    for row in rows:
        ratios: list[float] = row["ratios"]  # type: ignore[assignment]
        print(
            f"{row['figure']:34}{row['before']:>12,.1f}{row['now']:>12,.1f}{row['time_ratio']:>18.3f}"
            f"{min(ratios):>10.3f}{max(ratios):>9.3f}"
        )
    if options.output:
        record = {
            "benchmark": "by_turns",
            "before": commit_of(before),
            "rounds": options.rounds,
            "rows": rows,
            **provenance(seed=0),
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
