"""The bench against the truth: steps of a known time, and the flight log's times of each request.

Owns: a server whose every step takes ``--step-ms`` (the simulated backend), two loads, the comparison and the result
file. Must not know: how ``headway bench`` measures.

The flight log has the time from a request's arrival at the scheduler to its first token (**TTFT**), every gap between
its tokens (**ITL**) and their mean (**TPOT**). Only requests of the measured load's tenant count. The bench's
percentiles must be within ``--within`` of these. Prompts take several chunks, so TTFT has a spread; gRPC, tokenising
and validation add 1 to 2 ms to a first token.

Then the load asks the same server for twenty times the rate, and the bench must say that it was not reached.

Exit code 1: a ratio is off, or the bench did not say so. 3: the recorded gaps are not the known time, because the
machine was busy.
"""

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

from headway_lab.bench.options import BenchOptions
from headway_lab.bench.report import warnings
from headway_lab.bench.session import BenchResult, bench
from headway_lab.flight.recording import Recording
from headway_lab.flight.source import Flight
from headway_lab.percentiles import Percentiles, percentiles
from program import count, parser_of, provenance, write_result
from served import DEMO_MODEL, served

CHUNK = 128
MAX_NUM_SEQS = 32
OVERLOAD = 20.0
TENANT = "measured"
BUSY_EXIT_CODE = 3


class Truth(NamedTuple):
    """By the flight log, in milliseconds."""

    ttft_ms: Percentiles
    itl_ms: Percentiles
    tpot_ms: Percentiles


def truth_of(log: Path) -> Truth:
    flight, recording = Flight(str(log)), Recording()
    for event in flight.events("the truth"):
        recording.record(event, flight.replay)
    measured = [request for request in recording.measurement().requests() if request.tenant == TENANT]
    return Truth(
        ttft_ms=percentiles([request.ttft_s * 1e3 for request in measured]),
        itl_ms=percentiles([gap for request in measured for gap in request.itl_ms]),
        tpot_ms=percentiles([statistics.fmean(request.itl_ms) for request in measured]),
    )


def rows_of(result: BenchResult, truth: Truth) -> list[dict[str, object]]:
    rows = []
    totals = result.totals
    for name, known, reported in (
        ("ITL", truth.itl_ms, totals.itl_ms),
        ("TTFT", truth.ttft_ms, totals.ttft_ms),
        ("TPOT", truth.tpot_ms, totals.tpot_ms),
    ):
        for share in ("p50", "p90", "p99"):
            expected, seen = getattr(known, share), getattr(reported, share)
            rows.append({"figure": name, "at": share, "truth_ms": expected, "bench_ms": seen, "ratio": seen / expected})
    return rows


def options_of(
    address: str, arguments: argparse.Namespace, rate: float, tenant: str = "", times: int = 1
) -> BenchOptions:
    return BenchOptions(
        address=address,
        arrivals="poisson",
        rate=rate,
        num_requests=times * arguments.requests,
        prompt_tokens=f"uniform:{CHUNK},{4 * CHUNK}",
        output_tokens=str(arguments.tokens),
        processes=arguments.processes,
        tenants={tenant: "1"} if tenant else {},
        seed=arguments.seed,
    )


def main() -> None:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--requests", type=count, default=100)
    parser.add_argument("--tokens", type=count, default=24, help="of each answer")
    parser.add_argument("--rate", type=float, default=1.5, help="requests per second, which the server can serve")
    parser.add_argument("--processes", type=count, default=1, help="of the client")
    parser.add_argument("--within", type=float, default=0.02, help="how far each ratio may be from 1")
    arguments = parser.parse_args()
    flags = (
        *("--model", str(DEMO_MODEL), "--backend", "simulated", "--backend-option", "verify_kv=false"),
        *("--backend-option", f"step_base_us={arguments.step_ms * 1e3:g}"),
        *("--max-num-batched-tokens", str(CHUNK + MAX_NUM_SEQS), "--max-num-seqs", str(MAX_NUM_SEQS)),
        "--no-enable-prefix-caching",
    )
    with tempfile.TemporaryDirectory(prefix="hwtruth") as directory:
        log = Path(directory) / "log"
        with served(*flags, "--flight-log", str(log)) as address:
            asyncio.run(bench(options_of(address, arguments, 20.0), "requests to warm up"))
            result = asyncio.run(bench(options_of(address, arguments, arguments.rate, TENANT)))
            overloaded = asyncio.run(
                bench(options_of(address, arguments, OVERLOAD * arguments.rate, times=2), "requests too many")
            )
        truth = truth_of(log)
    rows = rows_of(result, truth)
    print(f"{'':10}{'truth ms':>12}{'bench ms':>12}{'ratio':>9}")
    for row in rows:
        print(f"{row['figure']:5}{row['at']:5}{row['truth_ms']:12.2f}{row['bench_ms']:12.2f}{row['ratio']:9.4f}")
    worst = max(abs(float(str(row["ratio"])) - 1) for row in rows)
    said = [line for line in warnings(overloaded.totals, float("inf")) if "was not reached" in line]
    print(f"worst: {100 * worst:.2f}% off\nat {OVERLOAD:g} times the rate: {' '.join(said) or 'nothing was said'}")
    document = {
        "benchmark": "bench_truth",
        **provenance(arguments.seed),
        "step_ms": arguments.step_ms,
        "load": {"requests": arguments.requests, "tokens": arguments.tokens, "rate": arguments.rate},
        "rows": rows,
        "worst_off": worst,
        "client_late_p99_ms": result.totals.client.late_ms.p99,
        "overload": said,
    }
    write_result(arguments.json, document)
    raise SystemExit(exit_code(truth, worst, arguments) if said else 1)


def exit_code(truth: Truth, worst: float, arguments: argparse.Namespace) -> int:
    """Return 0 if the bench is right, 1 if not, 3 if the machine was too busy."""
    stretched = (truth.itl_ms.p90 or 0.0) / arguments.step_ms - 1
    if worst > arguments.within and stretched > arguments.within:
        print(f"too busy: by the flight recorder, steps took {100 * stretched:.0f}% longer than they were to")
        return BUSY_EXIT_CODE
    return int(worst > arguments.within)


if __name__ == "__main__":
    main()
