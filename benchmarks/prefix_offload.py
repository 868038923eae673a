"""What the host's tier of the prefix cache is worth, in virtual time: hits and latencies with and without it.

    python benchmarks/prefix_offload.py

Owns: the working set and the comparison. Must not know: how anything is scheduled; the real scheduler runs on the simulated
device of ``headway simulate``.

Many prompts begin with one of a few texts. All of these together take ``--times`` as many blocks as the device's pool has;
the host's pool holds them all. The same requests arrive at the same times in each case.
"""

from typing import Any

import msgspec

from headway_lab.simulate.cases import Case
from headway_lab.simulate.options import SimulationOptions
from headway_lab.simulate.world import make_world, simulate
from headway_scheduler.core.memory.preemption import OFFLOADS
from headway_scheduler.core.state.limits import SchedulerLimits
from program import count, parser_of, provenance, write_result

NUM_PREFIXES = 64
PREFIX_TOKENS = 2048
BLOCK_SIZE = 16


def main() -> None:
    """Run the cases and print them."""
    parser = parser_of(__doc__, seed=1)
    parser.add_argument("--requests", type=count, default=1200, help="requests in all (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=12.0, help="requests per second (default: %(default)s)")
    parser.add_argument("--times", type=count, default=4, help="working set over device pool (default: %(default)s)")
    arguments = parser.parse_args()
    num_blocks = NUM_PREFIXES * PREFIX_TOKENS // BLOCK_SIZE
    options = SimulationOptions(
        model="llama-3-8b",
        hardware="h100",
        arrivals="poisson",
        rate=arguments.rate,
        num_requests=arguments.requests,
        warmup_requests=arguments.requests // 4,
        prefixes=NUM_PREFIXES,
        prefix_tokens=PREFIX_TOKENS,
        prompt_tokens="uniform:16,128",
        output_tokens="uniform:32,128",
        num_kv_blocks=num_blocks // arguments.times,
        host_blocks=num_blocks * 3 // 2,
        block_size=BLOCK_SIZE,
        seed=arguments.seed,
    )
    world = make_world(options)
    rows = [
        _row(name, simulate(world, Case(label=name, limits=SchedulerLimits(prefix_offload=name))).totals)
        for name in OFFLOADS
    ]
    print(
        f"{NUM_PREFIXES} beginnings of {PREFIX_TOKENS} tokens, {arguments.times} times the device's pool; {options.rate:g} requests/s"
    )
    print(
        f"{'offload':8} {'device hits':>12} {'from host':>10} {'TTFT ms p50/p99':>16} {'ITL ms p90/p99':>15} {'moving':>7}"
    )
    for row in rows:
        print(
            f"{row['offload']:8} {row['hit_rate']:12.1%} {row['restore_rate']:10.1%} "
            f"{row['ttft_ms']['p50']:8.0f}/{row['ttft_ms']['p99']:.0f}".ljust(50)
            + f" {row['itl_ms']['p90']:8.1f}/{row['itl_ms']['p99']:.1f} {row['swap_share']:7.1%}"
        )
    write_result(
        arguments.json, {**provenance(arguments.seed), "times": arguments.times, "rate": arguments.rate, "rows": rows}
    )


def _row(name: str, totals: Any) -> dict[str, Any]:
    return {
        "offload": name,
        "hit_rate": totals.prefix_hit_rate,
        "restore_rate": totals.prefix_restore_rate,
        "ttft_ms": msgspec.structs.asdict(totals.ttft_ms),
        "itl_ms": msgspec.structs.asdict(totals.itl_ms),
        "swap_share": totals.swap_share,
        "requests_per_s": totals.requests_per_s,
    }


if __name__ == "__main__":
    main()
