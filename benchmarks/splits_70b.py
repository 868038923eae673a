"""Every division of 8 devices into executors of a 70B model, simulated: which TP, PP and roles serve most requests.

Owns: which divisions there are, their search, the table, the picture and the result file. Must not know: costs, how a
system runs.

``headway plan`` searches for the best and leaves out what cannot be better. Here nothing is left out:

- *together*: equal executors that do both, with ``--budget slo``.
- *split*: equal executors for prefill and equal ones for decode, of the same degrees or of others, as ``headway plan``
  simulates them.
- *hybrid*: equal executors behind one scheduler with ``--placement hybrid --budget slo``, without roles and with half of
  them for prefill, as ``headway simulate`` simulates them.

Degrees are powers of two that divide the layers. *Goodput* is the highest rate, to 5%, at which the required share of the
requests keeps both objectives: on the first token, and on the mean gap. A division of which one request alone misses an
objective has none. Beside it stands one run of each at the same rate: percentiles of the first token and of single gaps,
the share of idle time of stages, and the time of a hand-off. All devices are in one node, so hand-offs go over its link.

    python benchmarks/splits_70b.py --json benchmarks/results/splits_70b.json --png docs/pictures/splits_70b.png
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headway.terminal.progress import ProgressLine
from headway.terminal.tables import aligned
from headway_lab.percentiles import rounded
from headway_lab.plan.bounds import ceiling
from headway_lab.plan.cluster import Cluster, Degrees, hand_off
from headway_lab.plan.executors import make_instance
from headway_lab.plan.goodput import (
    FIRST_SHARE_OF_CEILING,
    WARM_UP_SHARE,
    Goal,
    Trial,
    appraise,
    highest_rate,
    keeps_up,
    requests_to_settle,
)
from headway_lab.plan.instance import Instance, Phase
from headway_lab.plan.options import MEAN_GAP, PlanOptions
from headway_lab.plan.search import make_cluster
from headway_lab.plan.system import Check, check_split, check_together, trial_of
from headway_lab.plan.workload import make_workload
from headway_lab.simulate.cases import Case
from headway_lab.simulate.hardware import ACCELERATORS
from headway_lab.simulate.options import SimulationOptions
from headway_lab.simulate.roofline import USABLE_MEMORY_SHARE
from headway_lab.simulate.world import make_world, simulate
from headway_scheduler.core.state.limits import SchedulerLimits
from program import count, parser_of, provenance, write_result

TOGETHER, SPLIT, HYBRID = KINDS = ("together", "split", "hybrid")
LEAST_RATE = 0.5
"""Requests per second below which a division counts as useless."""
WORDS = {"ttft": "one request alone gets its first token too late", "itl": "one request alone has too long gaps"}


class Part(NamedTuple):
    """Equal executors."""

    phase: Phase
    degrees: Degrees
    num_executors: int

    @property
    def label(self) -> str:
        """As in the table."""
        return f"{self.num_executors} x {self.degrees.label}"


class Division(NamedTuple):
    """All devices. ``num_prefill``: of a hybrid one, how many executors have the role."""

    kind: str
    parts: tuple[Part, ...]
    num_prefill: int = 0

    @property
    def label(self) -> str:
        """As in the table."""
        return " + ".join(part.label for part in self.parts) + f", {self.num_prefill} prefill" * bool(self.num_prefill)


def divisions(cluster: Cluster) -> Iterator[Division]:
    """Yield all that use every device, also those into which the model does not fit."""
    total, degrees = cluster.most_devices, list(cluster.all_degrees())
    for one in degrees:
        number, rest = divmod(total, one.num_devices)
        if rest:
            continue
        whole = (Part(Phase.BOTH, one, number),)
        yield Division(TOGETHER, whole)
        for num_prefill in (0, number // 2) if number > 1 else ():
            yield Division(HYBRID, whole, num_prefill)
    for prefill in degrees:
        for decode in degrees:
            for num_prefill in range(1, total // prefill.num_devices + 1):
                num_decode, rest = divmod(total - num_prefill * prefill.num_devices, decode.num_devices)
                if num_decode and not rest:
                    parts = Part(Phase.PREFILL, prefill, num_prefill), Part(Phase.DECODE, decode, num_decode)
                    yield Division(SPLIT, parts)


class Bench:
    """Runs of all divisions with the same requests."""

    def __init__(self, cluster: Cluster, options: PlanOptions) -> None:
        self.cluster, self._options = cluster, options
        workload = make_workload(
            prompt_tokens=options.prompt_tokens,
            output_tokens=options.output_tokens,
            variation=options.variation,
            objectives=options.objectives,
            context_length=cluster.shape.context_length,
            seed=options.seed,
        )
        self.goal = Goal(
            workload=workload,
            attainment=options.attainment,
            gaps=options.gaps,
            least_requests=options.num_requests,
            transfer_token_s=hand_off(cluster.shape, 1, cluster.link_bandwidth).seconds,
            least_rate=LEAST_RATE / cluster.most_devices,
        )

    def instance(self, part: Part) -> Instance:
        """Return one of the part's executors."""
        roofline = self.cluster.roofline(part.degrees)
        return make_instance(part.phase, part.degrees, roofline, self._options, self.goal.workload)

    def check(self, division: Division, rate: float) -> Check:
        """Run a division at a rate."""
        if division.kind == HYBRID:
            return self._check_hybrid(division, rate)
        instances = [self.instance(part) for part in division.parts]
        counts = [part.num_executors for part in division.parts]
        if division.kind == TOGETHER:
            return check_together(instances[0], counts[0], self.goal, rate)
        return check_split(instances[0], counts[0], instances[1], counts[1], self.goal, rate)

    def missed(self, division: Division) -> str:
        """Return the objective that one request alone misses, if any."""
        return next(filter(None, (appraise(self.instance(part), self.goal).missed for part in division.parts)), "")

    def goodput(self, division: Division, progress: ProgressLine) -> float | None:
        """Search for the highest rate."""
        most = min(part.num_executors * ceiling(self.instance(part), self.goal.workload) for part in division.parts)
        first_rate = max(FIRST_SHARE_OF_CEILING * most, LEAST_RATE)

        def show(trial: Trial) -> None:
            progress.note(f"{division.kind} {division.label}: {100 * trial.share:.0f}% at {trial.rate:.2f} requests/s")

        def take(rate: float) -> Trial:
            return trial_of(self.check(division, rate))

        return highest_rate(first_rate, LEAST_RATE, self.goal.attainment, take, show)[0]

    def _check_hybrid(self, division: Division, rate: float) -> Check:
        """One scheduler places the requests; blocks go from device to device over the node's link."""
        (part,), options, goal = division.parts, self._options, self.goal
        num_requests = requests_to_settle({Phase.BOTH}, goal, rate)
        requests, times_s = goal.workload.requests[:num_requests], goal.workload.times_s(rate, num_requests)
        roles = ["prefill"] * division.num_prefill + ["decode"] * (part.num_executors - division.num_prefill)
        first_counted = num_requests // WARM_UP_SHARE
        world = make_world(
            SimulationOptions(
                model=options.model,
                hardware=options.hardware,
                tensor_parallel=part.degrees.tensor_parallel,
                pipeline_parallel=part.degrees.pipeline_parallel,
                executors=part.num_executors,
                roles=",".join(roles) if division.num_prefill else "",
                transfer_direct=True,
                num_requests=num_requests,
                warmup_requests=first_counted,
                seed=options.seed,
            )
        )
        load = msgspec.structs.replace(world.load, requests=requests, times_s=times_s.tolist())
        world = world._replace(load=load)
        limits = SchedulerLimits(
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            enable_prefix_caching=False,
            budget="slo",
        )
        result = simulate(world, Case(label=division.label, limits=limits, placement=HYBRID))
        ended = {request.number: request for request in result.requests if request.ttft_s is not None}
        first_s, mean_gap_s = np.full((2, num_requests), np.inf)
        for number, request in ended.items():
            first_s[number] = request.ttft_s
            mean_gap_s[number] = sum(request.itl_ms) / 1e3 / max(len(request.itl_ms), 1)
        limits_s = goal.workload.objectives.limits_s
        keeps = np.stack((first_s <= limits_s[0], mean_gap_s <= limits_s[1]))[:, first_counted:]
        return Check(
            rate=rounded(rate),
            num_requests=num_requests,
            share=rounded(float(np.mean(keeps.all(axis=0)))),
            ttft_share=rounded(float(np.mean(keeps[0]))),
            itl_share=rounded(float(np.mean(keeps[1]))),
            decode_step_ms=result.totals.mean_step_ms,
            keeps_up=keeps_up(times_s, first_s),
            ttft_ms=result.totals.ttft_ms,
            gap_ms=result.totals.itl_ms,
            hand_off_ms=result.totals.pull_ms,
            bubble_shares={Phase.BOTH.value: result.totals.bubble_share},
        )


def why_not(cluster: Cluster, degrees: Degrees) -> str:
    """Return why the model does not fit into one executor, or nothing."""
    if cluster.roofline(degrees).num_blocks(cluster.block_size) >= 1:
        return ""
    shape, accelerator = cluster.shape, cluster.accelerator
    weights = shape.num_parameters * shape.bytes_per_value / 1e9
    usable = USABLE_MEMORY_SHARE * accelerator.memory_bytes * degrees.num_devices / 1e9
    return f"weights of {weights:.1f} GB leave no block of {usable:.1f} GB"


def measured(bench: Bench, division: Division, rate: float, progress: ProgressLine) -> dict[str, Any]:
    """Search for a division's goodput, and run it at ``rate``."""
    missed = bench.missed(division)
    goodput = None if missed else bench.goodput(division, progress)
    return {
        "kind": division.kind,
        "division": division.label,
        "goodput": goodput,
        "per_device": rounded((goodput or 0.0) / bench.cluster.most_devices),
        "why_none": WORDS[missed] if missed else "" if goodput else "misses them under load",
        "at_rate": msgspec.to_builtins(bench.check(division, rate)),
    }


def run_all(options: PlanOptions, only: int | None) -> dict[str, Any]:
    """Measure every division of one kind of device, or the first ``only`` of them."""
    cluster = make_cluster(options)
    bench, progress = Bench(cluster, options), ProgressLine(sys.stderr)
    found = list(divisions(cluster))
    refused = {degrees: words for degrees in cluster.all_degrees() if (words := why_not(cluster, degrees))}
    fitting = [one for one in found if not any(part.degrees in refused for part in one.parts)][:only]
    started, rows = time.perf_counter(), []
    for number, division in enumerate(fitting, start=1):
        progress.note(f"{number} of {len(fitting)}: {division.kind} {division.label}")
        rows.append(measured(bench, division, options.rate, progress))
    progress.erase()
    return {
        "divisions": len(found),
        "impossible": [
            {
                "degrees": degrees.label,
                "why": words,
                "divisions": sum(any(part.degrees == degrees for part in one.parts) for one in found),
            }
            for degrees, words in refused.items()
        ],
        "wall_s": round(time.perf_counter() - started, 1),
        "rows": sorted(rows, key=lambda row: -(row["goodput"] or 0.0)),
    }


def table(result: dict[str, Any], rate: float) -> str:
    """Return the divisions by goodput, and those that cannot be."""
    heads = ("", "division", "goodput", "per device", "TTFT p50", "p99", "gap p50", "p99", "bubbles %", "hand-off")
    lines = aligned([heads, *(cells(row) for row in result["rows"])], left=(0, 1))
    lines += [
        f"impossible: {one['divisions']} divisions with {one['degrees']}: {one['why']}" for one in result["impossible"]
    ]
    return "\n".join((f"milliseconds at {rate:g} requests/s; * at which waits grow without end", *lines))


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a row of the table."""
    at = row["at_rate"]
    mark = "" if at["keeps_up"] else "*"
    bubbles = "/".join(f"{100 * share:.0f}" for share in at["bubble_shares"].values())
    return (
        row["kind"],
        row["division"],
        f"{row['goodput']:.1f}" if row["goodput"] else "-",
        f"{row['per_device']:.2f}" if row["goodput"] else "-",
        *(f"{at[name][one] or 0:.0f}{mark}" for name, one in (("ttft_ms", "p50"), ("ttft_ms", "p99"))),
        *(f"{at[name][one] or 0:.1f}" for name, one in (("gap_ms", "p50"), ("gap_ms", "p99"))),
        bubbles,
        f"{at['hand_off_ms']:.1f}" if at["hand_off_ms"] else "-",
    )


def draw(path: Path, title: str, rows: Sequence[dict[str, Any]], rate: float) -> None:
    """Draw goodput per device, waits and gaps of each division that has a goodput."""
    from matplotlib.figure import Figure

    from headway_lab.pictures import BLUE, GREY, ORANGE, write_picture

    colors = dict(zip(KINDS, (GREY, ORANGE, BLUE), strict=True))
    kept = [row for row in reversed(rows) if row["goodput"]]
    figure = Figure(figsize=(13, 1.5 + 0.2 * len(kept)), layout="constrained")
    figure.suptitle(title, fontsize=9)
    goodput, first, gaps, bubbles = figure.subplots(1, 4, sharey=True, width_ratios=(2, 1, 1, 1))
    for kind, color in colors.items():
        places = [place for place, row in enumerate(kept) if row["kind"] == kind]
        own = [kept[place] for place in places]
        goodput.barh(places, [row["per_device"] for row in own], color=color, label=kind)
        for axes, name in ((first, "ttft_ms"), (gaps, "gap_ms")):
            for one, marker in (("p50", "o"), ("p99", "|")):
                axes.plot([row["at_rate"][name][one] for row in own], places, marker, color=color, markersize=5)
        shares = [100 * max(row["at_rate"]["bubble_shares"].values()) for row in own]
        bubbles.barh(places, shares, color=color)
    goodput.set_yticks(range(len(kept)), [row["division"] for row in kept], fontsize=7)
    goodput.set_xlabel("goodput per device, requests/s")
    goodput.legend(frameon=False, fontsize=8)
    first.set_xlabel(f"first token at {rate:g}/s, ms (o p50, | p99)")
    gaps.set_xlabel(f"gap at {rate:g}/s, ms")
    bubbles.set_xlabel("idle share of stages, %")
    for axes in (goodput, first, gaps, bubbles):
        axes.xaxis.label.set_size(8)
    write_picture(figure, path)


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--png", type=Path, help="draw the first device's result to this file; needs matplotlib")
    parser.add_argument("--hardware", default="h100", help=f"of {', '.join(ACCELERATORS)}, with commas (default: h100)")
    parser.add_argument("--model", default="llama-3-70b")
    parser.add_argument("--devices", type=count, default=8)
    parser.add_argument("--rate", type=float, default=4.0, help="the common rate in requests/s (default: 4)")
    parser.add_argument("--ttft-slo-ms", type=count, default=2000)
    parser.add_argument("--itl-slo-ms", type=count, default=30, help="of a request's mean gap (default: 30)")
    parser.add_argument("--prompt-tokens", default="lognormal:1024,0.6,3000")
    parser.add_argument("--output-tokens", default="lognormal:200,0.5,800")
    parser.add_argument("--requests", type=count, default=300, help="fewest of a run (default: 300)")
    parser.add_argument("--only", type=count, help="so many divisions")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    load = {
        "model": arguments.model,
        "rate": arguments.rate,
        "ttft_slo_ms": arguments.ttft_slo_ms,
        "itl_slo_ms": arguments.itl_slo_ms,
        "devices": arguments.devices,
        "devices_per_node": arguments.devices,
        "prompt_tokens": arguments.prompt_tokens,
        "output_tokens": arguments.output_tokens,
        "num_requests": arguments.requests,
    }
    results: dict[str, Any] = {}
    for hardware in arguments.hardware.split(","):
        options = PlanOptions(**load, hardware=hardware, gaps=MEAN_GAP, seed=arguments.seed)
        result = results[hardware] = run_all(options, arguments.only)
        title = (
            f"{arguments.model} on {arguments.devices} x {hardware}: 90% within {arguments.ttft_slo_ms} ms to the first "
            f"token and mean gaps of {arguments.itl_slo_ms} ms; seed {arguments.seed}"
        )
        print(f"{title}; {len(result['rows'])} of {result['divisions']} divisions in {result['wall_s']:.0f} s")
        print(table(result, arguments.rate), flush=True)
        if arguments.png is not None and hardware == next(iter(results)):
            draw(arguments.png, title, result["rows"], arguments.rate)
    write_result(arguments.json, {**provenance(arguments.seed), "load": load, "results": results})


if __name__ == "__main__":
    main()
