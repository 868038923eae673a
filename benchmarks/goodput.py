"""Goodput of roles and placements on equal devices, in virtual time: DistServe's figures with the real scheduler.

Owns: the workloads, the systems, the search for goodput, the table, the picture and the result file. Must not know: how
requests are placed or handed off.

Goodput is the highest rate of Poisson arrivals at which 90% of the requests keep both objectives: on the first token, and
on the mean gap between tokens of the request (DistServe, Zhong et al., OSDI 2024, sections 2 and 6). Every system has the
same executors and requests. Those that know the objectives are told them.

- *prefill first*: every executor does everything, whole prompts before any decode, as the vLLM that DistServe compares with.
- *chunked*: every executor does everything, with Headway's defaults.
- *aggregated*: the same, with prompts in what the objective on gaps leaves of each step (``--budget slo``).
- *disaggregated*: prompts and decoding on executors of their own. The split is the best for these objectives.
- *hybrid*: ``--placement hybrid --budget slo``, with that split as preferences, an even one, or none: whichever is best.

One axis makes the objective on gaps tighter or looser, as a multiple of the time of a lone decode step; the other scales
both objectives. Rates are from a grid of 2%, and a run has few hundred requests, so goodputs that differ by some percent
are level: how the arrivals of a seed bunch decides more. ``--seeds`` judges the requests of several seeds together. One
step is in flight at a time: in virtual time, the next one comes at once. Blocks go from device to device over NVLink. What
slower ways cost is measured at the end; "by host memory" is what the executor can do today.

    python benchmarks/goodput.py --json benchmarks/results/goodput.json --png docs/pictures/goodput.png
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headway_lab.simulate.cases import Case
from headway_lab.simulate.collector import SimulatedRequest
from headway_lab.simulate.options import SimulationOptions
from headway_lab.simulate.world import make_world, simulate
from headway_proto.wording import shown
from headway_scheduler.core.state.limits import SchedulerLimits
from program import count, parser_of, provenance, write_result

EXECUTORS = 4
SHARE = 0.9
GRID = 1.02
MOST_REQUESTS, LEAST_REQUESTS = 300, 120
SECONDS = 8
"""Of arrivals in a run, as far as the two counts allow."""
WARMUP_SHARE = 0.1
GAP_SCALES = (1.2, 1.35, 1.5, 1.8, 4.5)
BOTH_SCALES = (0.85, 1.6)
"""Of both objectives, beside 1, at the gap scale ``BASE_SCALE``."""
BASE_SCALE = 1.5
RATE_SHARES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
"""Rates of the curves of attainment, over the best goodput at the base objectives."""

PREFILL_FIRST, CHUNKED, AGGREGATED, DISAGGREGATED, HYBRID = SYSTEMS = (
    "prefill first",
    "chunked",
    "aggregated",
    "disaggregated",
    "hybrid",
)
KNOWS_OBJECTIVES = {AGGREGATED, HYBRID}
LIMITS: dict[str, dict[str, Any]] = {
    PREFILL_FIRST: {"batching": "prefill_first"},
    CHUNKED: {},
    AGGREGATED: {"budget": "slo"},
    DISAGGREGATED: {},
    HYBRID: {"budget": "slo"},
}
PLACEMENTS = {DISAGGREGATED: "disaggregated", HYBRID: "hybrid"}
WAYS: dict[str, dict[str, Any]] = {
    "NVLink, direct": {},
    "NVLink, by host memory": {"transfer_direct": False},
    "25 Gbit/s, direct": {"transfer_bandwidth_gb_s": 3.125, "transfer_latency_us": 20.0},
    "25 Gbit/s, by host memory": {
        "transfer_bandwidth_gb_s": 3.125,
        "transfer_latency_us": 20.0,
        "transfer_direct": False,
    },
}


class Workload(NamedTuple):
    """``ttft_ms``: the objective on the first token; ``step_ms``: a lone decode step in the middle of a request."""

    options: Mapping[str, Any]
    ttft_ms: int
    step_ms: float


CHAT = {"prompt_tokens": "lognormal:500,0.9,2048", "output_tokens": "lognormal:130,0.9,1000"}
"""Means of ShareGPT as DistServe gives them: 755 and 200 tokens."""
SUMMARIES = {"prompt_tokens": "lognormal:1500,0.6,3500", "output_tokens": "lognormal:75,0.6,400"}
"""Means of LongBench as DistServe gives them: 1,738 and 91 tokens."""
WORKLOADS = {
    "llama-3-8b": Workload({"model": "llama-3-8b", "hardware": "h100", **SUMMARIES}, 200, 6.6),
    "llama-2-13b": Workload({"model": "llama-2-13b", "hardware": "a100-80g", **CHAT}, 1000, 20.8),
    "llama-2-70b": Workload({"model": "llama-2-70b", "hardware": "h100", "tensor_parallel": 4, **SUMMARIES}, 600, 16.5),
}
PROMPT_HEAVY = "llama-3-8b"
"""The workload that shows what ways between executors cost."""


class Objectives(NamedTuple):
    """In milliseconds; ``gap_ms`` for the mean gap of a request."""

    ttft_ms: int
    gap_ms: int


class Judged(NamedTuple):
    """Shares of requests: that kept both objectives, and that kept the second with every single gap."""

    both: float
    every_gap: float


class Run(NamedTuple):
    """The requests of one seed; those from ``first_measured`` on count."""

    requests: list[SimulatedRequest]
    first_measured: int


def judge(runs: list[Run], objectives: Objectives) -> Judged:
    """Look at the requests behind the warm-up, of all runs together."""
    measured = [request for run in runs for request in run.requests if request.number >= run.first_measured]
    kept = [request for request in measured if request.ttft_s * 1e3 <= objectives.ttft_ms]
    on_mean = [request for request in kept if sum(request.itl_ms) <= objectives.gap_ms * max(len(request.itl_ms), 1)]
    every_gap = [request for request in on_mean if max(request.itl_ms, default=0.0) <= objectives.gap_ms]
    return Judged(len(on_mean) / len(measured), len(every_gap) / len(measured))


class Bench:
    """Runs of one workload, each once for every seed. ``most``: the most requests of a run."""

    def __init__(self, workload: Workload, seeds: Sequence[int], most: int, **more: Any) -> None:
        self._workload = workload
        self._seeds = seeds
        self._most = most
        self._more = more
        self._runs: dict[tuple[Any, ...], list[Run]] = {}

    def judged(self, system: str, num_prefill: int, place: int, objectives: Objectives) -> Judged:
        """At the grid's rate ``place``, with so many executors for prompts if the system knows roles."""
        told = objectives if system in KNOWS_OBJECTIVES else Objectives(0, 0)
        num_prefill = num_prefill if system in PLACEMENTS else 0
        key = (system, num_prefill, place, told)
        if key not in self._runs:
            self._runs[key] = [self._run(system, num_prefill, rate_of(place), told, seed) for seed in self._seeds]
        return judge(self._runs[key], objectives)

    def goodput(self, system: str, num_prefill: int, objectives: Objectives, near: int) -> int:
        """The highest place on the grid with enough requests that keep ``objectives``; -1 for none. Bisection."""
        low, high, place = -1, _HIGHEST + 1, near
        while high - low > 1:
            if self._is_enough(system, num_prefill, place, objectives):
                low = place
            else:
                high = place
            # By strides at first, since neighbours are alike, and then by halves.
            place = min(max((low + high) // 2, place - _STRIDE), place + _STRIDE)
        return low

    def _is_enough(self, system: str, num_prefill: int, place: int, objectives: Objectives) -> bool:
        return self.judged(system, num_prefill, place, objectives).both >= SHARE

    def _run(self, system: str, num_prefill: int, rate: float, told: Objectives, seed: int) -> Run:
        num_requests = int(max(min(LEAST_REQUESTS, self._most), min(self._most, rate * SECONDS)))
        given: dict[str, Any] = {
            "arrivals": "poisson",
            "rate": rate,
            "executors": EXECUTORS,
            "roles": ",".join(["prefill"] * num_prefill + ["decode"] * (EXECUTORS - num_prefill))
            if num_prefill
            else "",
            "num_requests": num_requests,
            "warmup_requests": int(WARMUP_SHARE * num_requests),
            "ttft_slo_ms": told.ttft_ms,
            "itl_slo_ms": told.gap_ms,
            "transfer_direct": True,
            "seed": seed,
            **self._workload.options,
            **self._more,
        }
        options = SimulationOptions(**given)
        limits = SchedulerLimits(max_steps_in_flight=1, **LIMITS[system])
        case = Case(label=system, limits=limits, placement=PLACEMENTS.get(system, "aggregated"))
        return Run(simulate(make_world(options), case).requests, options.warmup_requests)


_LEAST_RATE = 1.0
_HIGHEST = 240
"""Its rate is 116 times the least."""
_STRIDE = 24


def rate_of(place: int) -> float:
    """Requests per second at this place of the grid; 0 below it."""
    return 0.0 if place < 0 else _LEAST_RATE * GRID**place


def compared(bench: Bench, objectives: Objectives, near: dict[str, int]) -> dict[str, Any]:
    """Every system's goodput. ``near`` has places where to begin, and gets those that were found."""
    splits = {
        number: bench.goodput(DISAGGREGATED, number, objectives, near.get(f"split {number}", 120))
        for number in range(1, EXECUTORS)
    }
    near |= {f"split {number}": max(place, 0) for number, place in splits.items()}
    num_prefill = max(splits, key=lambda number: splits[number])
    found = {DISAGGREGATED: splits[num_prefill]}
    for system in (PREFILL_FIRST, CHUNKED, AGGREGATED, HYBRID):
        found[system] = bench.goodput(system, num_prefill, objectives, near.get(system, 120))
        near[system] = max(found[system], 0)
    preferred = {num_prefill: found[HYBRID], 0: bench.goodput(HYBRID, 0, objectives, near[AGGREGATED])}
    if EXECUTORS // 2 not in preferred:
        preferred[EXECUTORS // 2] = bench.goodput(HYBRID, EXECUTORS // 2, objectives, near[HYBRID])
    hybrid_prefill = max(preferred, key=lambda number: preferred[number])
    found[HYBRID] = preferred[hybrid_prefill]
    found = {system: found[system] for system in SYSTEMS}
    rates = {system: round(rate_of(place), 2) for system, place in found.items()}
    better = max(rates[AGGREGATED], rates[DISAGGREGATED])
    return {
        **objectives._asdict(),
        "num_prefill": num_prefill,
        "hybrid_num_prefill": hybrid_prefill,
        "goodput": rates,
        "hybrid_by_num_prefill": {number: round(rate_of(place), 2) for number, place in preferred.items()},
        "every_gap_share": {
            system: _every_gap(bench, system, hybrid_prefill if system == HYBRID else num_prefill, place, objectives)
            for system, place in found.items()
        },
        "disaggregated_over_prefill_first": _ratio(rates[DISAGGREGATED], rates[PREFILL_FIRST]),
        "disaggregated_over_aggregated": _ratio(rates[DISAGGREGATED], rates[AGGREGATED]),
        "hybrid_over_better": _ratio(rates[HYBRID], better),
    }


def _every_gap(bench: Bench, system: str, num_prefill: int, place: int, objectives: Objectives) -> float | None:
    return round(bench.judged(system, num_prefill, place, objectives).every_gap, 3) if place >= 0 else None


def _ratio(over: float, under: float) -> float | None:
    return round(over / under, 3) if under else None


def curves(bench: Bench, point: dict[str, Any]) -> dict[str, Any]:
    """Attainment against the rate at one point's objectives."""
    objectives = Objectives(point["ttft_ms"], point["gap_ms"])
    best = max(point["goodput"].values())
    places = [_place_of(share * best) for share in RATE_SHARES]
    return {
        "requests_per_s": [round(rate_of(place), 2) for place in places],
        "attainment": {
            system: [
                round(bench.judged(system, _split_of(point, system), place, objectives).both, 3) for place in places
            ]
            for system in SYSTEMS
        },
    }


def _split_of(point: dict[str, Any], system: str) -> int:
    number: int = point["hybrid_num_prefill" if system == HYBRID else "num_prefill"]
    return number


def _place_of(rate: float) -> int:
    place = 0
    while place < _HIGHEST and rate_of(place) < rate:
        place += 1
    return place


def measured(name: str, seeds: Sequence[int], most: int) -> dict[str, Any]:
    """All points of one workload."""
    workload = WORKLOADS[name]
    bench = Bench(workload, seeds, most)
    by_gap, near = points_by_gap(name, bench, GAP_SCALES)
    base = by_gap[GAP_SCALES.index(BASE_SCALE)]
    by_both = []
    for scale in BOTH_SCALES:
        objectives = Objectives(round(scale * base["ttft_ms"]), round(scale * base["gap_ms"]))
        by_both.append({"scale": scale, **compared(bench, objectives, near)})
        print(line(name, by_both[-1]), flush=True)
    by_both = sorted([*by_both, {**base, "scale": 1.0}], key=lambda point: point["scale"])
    return {
        "options": workload.options,
        "step_ms": workload.step_ms,
        "by_gap": by_gap,
        "by_both": by_both,
        "base": curves(bench, base),
    }


def points_by_gap(name: str, bench: Bench, scales: Sequence[float]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The points of one workload by its objective on gaps, and the places where they were found."""
    workload, points, near = WORKLOADS[name], list[dict[str, Any]](), dict[str, int]()
    for scale in scales:
        objectives = Objectives(workload.ttft_ms, round(scale * workload.step_ms))
        points.append({"scale": scale, **compared(bench, objectives, near)})
        print(line(name, points[-1]), flush=True)
    return points, near


def ways(seeds: Sequence[int], most: int, point: dict[str, Any]) -> dict[str, float]:
    """Goodput of the disaggregated placement at one point, by the way between executors."""
    objectives = Objectives(point["ttft_ms"], point["gap_ms"])
    near = _place_of(point["goodput"][DISAGGREGATED])
    found = {}
    for way, more in WAYS.items():
        bench = Bench(WORKLOADS[PROMPT_HEAVY], seeds, most, **more)
        found[way] = round(rate_of(bench.goodput(DISAGGREGATED, point["num_prefill"], objectives, near)), 2)
        print(f"{way:>26}: {found[way]:.1f} requests/s", flush=True)
    return found


def line(name: str, point: dict[str, Any]) -> str:
    """Return a row of the table."""
    rates = ", ".join(f"{system} {rate:.1f}" for system, rate in point["goodput"].items())
    return (
        f"{name} TTFT {point['ttft_ms']} ms, gap {point['gap_ms']} ms, {point['num_prefill']} for prompts | {rates} | "
        f"disaggregated over prefill first {point['disaggregated_over_prefill_first']}, over aggregated "
        f"{point['disaggregated_over_aggregated']}; hybrid over the better {point['hybrid_over_better']}"
    )


def draw(path: Path, results: Mapping[str, Any]) -> None:
    """Draw a column per workload: attainment by rate, goodput by the objective on gaps, goodput by both objectives."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    colors = dict(zip(SYSTEMS, ("tab:gray", "tab:olive", "tab:blue", "tab:orange", "tab:green"), strict=True))
    figure, axes = plt.subplots(3, len(results), figsize=(5 * len(results), 11), squeeze=False)
    for column, (name, result) in enumerate(results.items()):
        base, attained = axes[0][column], result["base"]
        for system in SYSTEMS:
            style = {"label": system, "color": colors[system], "marker": ".", "linewidth": 1.5}
            base.plot(attained["requests_per_s"], [100 * one for one in attained["attainment"][system]], **style)
            for place, key in ((1, "by_gap"), (2, "by_both")):
                points = result[key]
                axes[place][column].plot(
                    [point["scale"] for point in points], [point["goodput"][system] for point in points], **style
                )
        options = result["options"]
        device = f"{EXECUTORS} x {options.get('tensor_parallel', 1)} x {options['hardware']}"
        base.set_title(f"{name}, {device}")
        base.axhline(100 * SHARE, color="black", linestyle=":", linewidth=0.8)
        base.set_xlabel("requests per second")
        axes[1][column].set_xlabel("objective on the mean gap, over a lone decode step")
        axes[2][column].set_xlabel("scale of both objectives")
        for row, label in enumerate(("requests that keep both, %", "goodput, requests/s", "goodput, requests/s")):
            axes[row][column].set_ylabel(label)
            axes[row][column].set_ylim(bottom=0)
            axes[row][column].grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--png", type=Path, help="draw the result to this file; needs matplotlib")
    parser.add_argument(
        "--most-requests", type=count, default=MOST_REQUESTS, help=f"in a run (default: {MOST_REQUESTS})"
    )
    parser.add_argument("--workloads", type=_names, default=list(WORKLOADS), help="names with commas (default: all)")
    parser.add_argument("--seeds", type=count, default=1, help="judged together, from --seed on (default: 1)")
    parser.add_argument("--gap-scales", type=float, nargs="+", help="only these points by the objective on gaps")
    arguments = parser.parse_args()
    seeds, most = range(arguments.seed, arguments.seed + arguments.seeds), arguments.most_requests
    record: dict[str, Any] = {
        **provenance(arguments.seed),
        "executors": EXECUTORS,
        "share": SHARE,
        "most_requests": most,
        "seeds": arguments.seeds,
    }
    if arguments.gap_scales:
        for name in arguments.workloads:
            record[name], _ = points_by_gap(name, Bench(WORKLOADS[name], seeds, most), arguments.gap_scales)
        write_result(arguments.json, record)
        return
    results = record["results"] = {name: measured(name, seeds, most) for name in arguments.workloads}
    if PROMPT_HEAVY in results:
        base = next(point for point in results[PROMPT_HEAVY]["by_gap"] if point["scale"] == BASE_SCALE)
        record["ways"] = ways(seeds, most, base)
    write_result(arguments.json, record)
    if arguments.png is not None:
        draw(arguments.png, results)


def _names(text: str) -> list[str]:
    for name in text.split(","):
        if name not in WORKLOADS:
            raise argparse.ArgumentTypeError(f"{shown(name)} is not allowed; allowed: {', '.join(WORKLOADS)}")
    return text.split(",")


if __name__ == "__main__":
    main()
