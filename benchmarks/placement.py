"""One queue for several executors against as many replicas: the real placement and cores, in virtual time.

Owns: the workloads, the runs, the table and the result file. Must not know: how requests are placed.

Both sides get the same arrivals on the same simulated devices. One queue is ``headway serve --executors N``: placement
above the cores. Replicas are N schedulers behind a router that gives each the next request in turn.

- *skewed*: most prompts are short and a few are very long. Behind a long one, a replica's queue waits while another
  replica idles.
- *prefixes*: prompts share one of many long beginnings, and one executor's KV blocks hold few of them. In turn, each
  replica sees all beginnings; placement sends requests to where theirs is cached.

The ratio is that of the P99 times to the first token, replicas over one queue: above 1, one queue is better.

    python benchmarks/placement.py --json benchmarks/results/placement.json
"""

import argparse
from typing import Any

from headway_lab.simulate.cases import Case
from headway_lab.simulate.options import SimulationOptions
from headway_lab.simulate.report import CaseResult
from headway_lab.simulate.world import make_world, simulate
from headway_scheduler.core.state.limits import SchedulerLimits
from program import count, parser_of, provenance, write_result

WORKLOADS: dict[str, dict[str, Any]] = {
    "skewed": {"prompt_tokens": "lognormal:1200,1.3,8000", "output_tokens": "lognormal:100,0.9,600"},
    "prefixes": {
        "prompt_tokens": "lognormal:300,0.8,2000",
        "output_tokens": "lognormal:100,0.8,600",
        "prefixes": 24,
        "prefix_tokens": 3000,
        "num_kv_blocks": 4096,
    },
}
RATES_PER_EXECUTOR = {"skewed": (4.0, 7.0, 10.0), "prefixes": (4.0, 8.0, 12.0)}
"""Requests per second, to a little below what the devices can do."""
WARMUP_SHARE = 0.1
ONE_QUEUE, REPLICAS = "one_queue", "replicas"


def compared(workload: str, rate: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the same arrivals both ways."""
    options = SimulationOptions(
        arrivals="poisson",
        rate=rate * arguments.executors,
        executors=arguments.executors,
        num_requests=arguments.requests,
        warmup_requests=int(WARMUP_SHARE * arguments.requests),
        seed=arguments.seed,
        **WORKLOADS[workload],
    )
    world, case = make_world(options), Case(label="", limits=SchedulerLimits())
    results = {
        ONE_QUEUE: simulate(world, case),
        REPLICAS: simulate(world, case, as_replicas=True),
    }
    ttft = [results[kind].totals.ttft_ms.p99 or 0.0 for kind in (REPLICAS, ONE_QUEUE)]
    return {
        "workload": workload,
        "requests_per_s": options.rate,
        **{kind: _figures(result) for kind, result in results.items()},
        "ttft_p99_ratio": round(ttft[0] / ttft[1], 3) if ttft[1] else None,
    }


def _figures(result: CaseResult) -> dict[str, Any]:
    totals = result.totals
    return {
        "ttft_ms": {"p50": totals.ttft_ms.p50, "p90": totals.ttft_ms.p90, "p99": totals.ttft_ms.p99},
        "itl_ms": {"p50": totals.itl_ms.p50, "p99": totals.itl_ms.p99},
        "output_tokens_per_s": totals.output_tokens_per_s,
        "prefix_hit_rate": totals.prefix_hit_rate,
        "num_preemptions": totals.num_preemptions,
        "share_of_requests": [one.share_of_requests for one in result.executors],
        "busy_share": [one.busy_share for one in result.executors],
    }


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    cells = [f"{row['workload']:>9} {row['requests_per_s']:>7.1f}/s"]
    for kind in (ONE_QUEUE, REPLICAS):
        figures = row[kind]
        ttft, itl = figures["ttft_ms"], figures["itl_ms"]
        shares = "/".join(f"{100 * share:.0f}" for share in figures["share_of_requests"])
        cells.append(
            f"{kind} TTFT p50 {ttft['p50']:.0f} p99 {ttft['p99']:.0f} ms, ITL p99 {itl['p99']:.0f} ms, "
            f"hits {100 * figures['prefix_hit_rate']:.0f}%, shares {shares}%"
        )
    return " | ".join((*cells, f"ratio {row['ttft_p99_ratio']}"))


def main() -> None:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--executors", type=count, default=2, help="behind one scheduler, at least 2 (default: 2)")
    parser.add_argument("--requests", type=count, default=1500, help="in each run (default: 1500)")
    arguments = parser.parse_args()
    if arguments.executors < 2:
        parser.error(f"--executors: {arguments.executors} is not allowed; allowed: 2 or more")
    rows = []
    for workload, rates in RATES_PER_EXECUTOR.items():
        for rate in rates:
            rows.append(compared(workload, rate, arguments))
            print(line(rows[-1]), flush=True)
    record = {
        **provenance(arguments.seed),
        "executors": arguments.executors,
        "requests": arguments.requests,
        "workloads": WORKLOADS,
        "results": rows,
    }
    write_result(arguments.json, record)


if __name__ == "__main__":
    main()
