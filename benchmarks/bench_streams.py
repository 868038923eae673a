"""How many streams one process of ``headway bench`` drives, and at what cost: users against the simulated backend.

Owns: the server, the load, and the table. Must not know: how ``headway bench`` sends.

``--users`` send one request each within ``--ramp-s``, and every step of ``--step-ms`` brings a token of each. All
processes share this machine, so a busy server makes the client late too. The figures that count are the processor time
per token, and that all streams are open at once.
"""

import asyncio

from headway_lab.bench.options import BenchOptions
from headway_lab.bench.session import BenchResult, bench
from program import count, counts, parser_of, provenance, write_result
from served import DEMO_MODEL, served

PROMPT_TOKENS = 32


def most_open(result: BenchResult) -> int:
    """Return the most requests that were open at one time."""
    starts = [(request.intended_s + request.late_s, 1) for request in result.requests]
    ends = [(request.intended_s + request.end_to_end_s, -1) for request in result.requests]
    now_open = most = 0
    for _, change in sorted(starts + ends):
        now_open += change
        most = max(most, now_open)
    return most


def row_of(result: BenchResult) -> dict[str, float | None]:
    totals = result.totals
    client = totals.client
    num_tokens = totals.mean_output_tokens * totals.num_ok
    return {
        "processes": client.num_processes,
        "answered": totals.num_ok,
        "most_open": most_open(result),
        "tokens_per_s": round(totals.output_tokens_per_s, 1),
        "busiest_process_share_of_a_core": round(client.cpu_share, 3),
        "busiest_process_us_per_token": round(
            1e6 * client.cpu_share * totals.window_s / (num_tokens / client.num_processes), 1
        ),
        "late_p99_ms": client.late_ms.p99,
        "lag_p99_ms": client.lag_ms.p99,
    }


def main() -> None:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--users", type=count, default=2000)
    parser.add_argument("--tokens", type=count, default=80, help="of each answer")
    parser.add_argument("--step-ms", type=float, default=200.0)
    parser.add_argument("--ramp-s", type=float, default=5.0)
    parser.add_argument("--processes", type=counts, default="1,2", help="of the client: a row each")
    parser.add_argument("--connections", type=count, default=4)
    arguments = parser.parse_args()
    length = PROMPT_TOKENS + arguments.tokens
    flags = (
        *("--model", str(DEMO_MODEL), "--backend", "simulated", "--backend-option", "verify_kv=false"),
        *("--backend-option", f"step_base_us={arguments.step_ms * 1e3:g}"),
        *("--max-num-seqs", str(arguments.users), "--max-num-batched-tokens", "8192"),
        *("--max-model-len", str(length), "--num-kv-blocks", str((arguments.users + 1) * (length // 16 + 1))),
        *("--hang-s", "0"),
    )
    rows = []
    with served(*flags) as address:
        for processes in arguments.processes:
            options = BenchOptions(
                address=address,
                users=arguments.users,
                num_requests=arguments.users,
                ramp_s=arguments.ramp_s,
                prompt_tokens=str(PROMPT_TOKENS),
                output_tokens=str(arguments.tokens),
                processes=processes,
                connections=arguments.connections,
                seed=arguments.seed,
            )
            rows.append(row_of(asyncio.run(bench(options))))
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    load = {name: getattr(arguments, name) for name in ("users", "tokens", "step_ms", "ramp_s", "connections")}
    document = {"benchmark": "bench_streams", **provenance(arguments.seed), "load": load, "rows": rows}
    write_result(arguments.json, document)


if __name__ == "__main__":
    main()
