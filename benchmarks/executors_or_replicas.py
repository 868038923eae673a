"""Two executors behind one scheduler against two replicas behind smg, over real processes, on the same work by turns.

Owns: the workloads, the turns, the table and the result file. Must not know: how requests are placed or routed.

Both sides run the simulated backend in real time, whose steps take ``--step-ms`` and ``--token-us`` per token, with the
same limits and blocks for each executor. Clients of both speak OpenAI's API to an smg: one smg in front of the one
gateway of ``headway serve --executors 2``, and for each of ``--policies`` one in front of the gateways of ``headway
serve --replicas 2 --kv-events``. So what smg costs is in all figures alike.

- *skewed*: short prompts, and a few very long ones.
- *prefixes*: each prompt begins like many others; one executor's blocks hold about half of the beginnings.
- *both*: the prompts of *prefixes*, and a few very long ones.

Every way gets the same prompts at the same Poisson times, one after the other in changing order, with empty caches. The
first round warms up. The ratio is that of P99 times to the first token over all rounds, replicas over one scheduler:
above 1, one scheduler is better. ``wins`` counts the seeds for which it was.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from fleet import MODEL_NAME, WHOLE, Client, Prompts, Stream, connected, flush
from headway.client import AsyncClient
from headway_lab.percentiles import percentiles
from program import count, counts, parser_of, provenance, write_result
from served import DEMO_MODEL, served
from smg_overhead import running_smg

ONE_SCHEDULER = "one scheduler"
SKEWED, PREFIXES, BOTH = "skewed", "prefixes", "both"
RATES_PER_EXECUTOR = {SKEWED: 18.0, PREFIXES: 7.0, BOTH: 7.0}
"""Requests per second, to a little below what the devices can do."""
_JOIN_S = 60.0
_POLL_S = 0.1


class Way(NamedTuple):
    """A server, and a client of the smg in front of it."""

    name: str
    addresses: Sequence[str]
    client: Client


class Arrival(NamedTuple):
    """A request, ``after_s`` seconds after the one before."""

    after_s: float
    prompt: str


class Round(NamedTuple):
    """What the clients of one round saw. Times in milliseconds."""

    workload: str
    seed: int
    way: str
    ttft_ms: list[float]
    gaps_ms: list[float]
    hit_rate: float


def arrivals(workload: str, seed: int, arguments: argparse.Namespace) -> list[Arrival]:
    """Draw the requests of a round."""
    draw = random.Random(f"{workload}, {seed}")
    words = Prompts(draw.randrange(1 << 30), 0, 0, 0)
    families = [words.text(arguments.shared_tokens) for _ in range(arguments.families)]

    def prompt() -> str:
        if workload != PREFIXES and draw.random() < arguments.long_share:
            return words.text(draw.randint(arguments.long_tokens // 2, arguments.long_tokens))
        own = words.text(draw.randint(16, 2 * arguments.short_tokens - 16))
        return own if workload == SKEWED else draw.choice(families) + own

    rate = arguments.executors * arguments.rate_share * RATES_PER_EXECUTOR[workload]
    return [Arrival(draw.expovariate(rate), prompt()) for _ in range(arguments.requests)]


async def one_round(workload: str, seed: int, way: Way, arguments: argparse.Namespace) -> Round:
    """Send a round's requests at their times, into empty caches."""
    requests = arrivals(workload, seed, arguments)
    await flush(way.addresses)
    hits_before, queries_before = await _prefix_tokens(way.addresses)
    tasks: list[asyncio.Task[Stream]] = []
    due = time.perf_counter()
    for request in requests:
        due += request.after_s
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(way.client.stream(request.prompt, arguments.tokens)))
    streams = await asyncio.gather(*tasks)
    outcomes = Counter(stream.outcome for stream in streams)
    assert outcomes == {WHOLE: len(requests)}, outcomes
    hits, queries = await _prefix_tokens(way.addresses)
    gaps_ms = [(after - before) * 1e3 for one in streams for before, after in pairwise(one.arrivals)]
    ttft_ms = [one.ttft_s * 1e3 for one in streams]
    return Round(workload, seed, way.name, ttft_ms, gaps_ms, (hits - hits_before) / (queries - queries_before))


async def _prefix_tokens(addresses: Sequence[str]) -> tuple[int, int]:
    """Return the tokens found in the prefix caches, and the tokens looked for."""
    hits = queries = 0
    for address in addresses:
        async with AsyncClient(address) as client:
            status = await client.status()
        hits, queries = hits + status.num_prefix_hit_tokens, queries + status.num_prefix_query_tokens
    return hits, queries


@contextlib.contextmanager
def _model(context_length: int) -> Iterator[Path]:
    """The demo model's tokenizer with a context of this length; the simulated backend reads no weights."""
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent) / MODEL_NAME
        directory.mkdir()
        for path in DEMO_MODEL.glob("*token*.json"):
            (directory / path.name).symlink_to(path)
        config = json.loads((DEMO_MODEL / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context_length}))
        yield directory


@contextlib.asynccontextmanager
async def running_ways(arguments: argparse.Namespace) -> AsyncIterator[list[Way]]:
    """Run both servers and all smg."""
    options = (f"step_base_us={arguments.step_ms * 1e3}", f"per_token_us={arguments.token_us}", "verify_kv=false")
    context_length = max(arguments.long_tokens, arguments.shared_tokens + 2 * arguments.short_tokens) + arguments.tokens
    async with contextlib.AsyncExitStack() as stack:
        flags = [
            *("--backend", "simulated", "--model", str(stack.enter_context(_model(context_length)))),
            *("--num-kv-blocks", str(arguments.num_kv_blocks), "--swap-space-mib", "0"),
            *(word for option in options for word in ("--backend-option", option)),
        ]
        number = str(arguments.executors)
        replicas = stack.enter_context(served(*flags, "--replicas", number, "--kv-events")).split(",")
        one = [stack.enter_context(served(*flags, "--executors", number))]
        await _joined(one[0], arguments.executors)
        servers = [(ONE_SCHEDULER, one, ())] + [
            (policy, replicas, ("--policy", policy)) for policy in arguments.policies.split(",")
        ]
        ways = []
        for name, addresses, smg_flags in servers:
            url, _ = stack.enter_context(running_smg(addresses, smg_flags))
            ways.append(Way(name, addresses, await stack.enter_async_context(connected(url))))
        yield ways


async def _joined(address: str, num_executors: int) -> None:
    deadline = time.perf_counter() + _JOIN_S
    async with AsyncClient(address) as client:
        while (await client.status()).num_epochs < num_executors:
            assert time.perf_counter() < deadline, "not all executors have joined"
            await asyncio.sleep(_POLL_S)


async def run_rounds(arguments: argparse.Namespace) -> list[Round]:
    """Run every workload and seed on every way."""
    rounds = []
    async with running_ways(arguments) as ways:
        for workload in arguments.workloads.split(","):
            for way in ways:
                await one_round(workload, -1, way, arguments)
            for turn, seed in enumerate(arguments.seeds):
                first = turn % len(ways)
                for way in ways[first:] + ways[:first]:
                    rounds.append(await one_round(workload, seed, way, arguments))
                    print(f"  {_figures([rounds[-1]])}", file=sys.stderr)
    return rounds


def _figures(rounds: Sequence[Round]) -> dict[str, object]:
    ttft = percentiles([each for one in rounds for each in one.ttft_ms])
    gaps = percentiles([each for one in rounds for each in one.gaps_ms])
    return {
        "workload": rounds[0].workload,
        "way": rounds[0].way,
        "seeds": [one.seed for one in rounds],
        "requests": sum(len(one.ttft_ms) for one in rounds),
        **{f"ttft_ms_{name}": round(getattr(ttft, name), 1) for name in ("p50", "p90", "p99")},
        **{f"gap_ms_{name}": round(getattr(gaps, name), 1) for name in ("p50", "p99")},
        "hit_rate": round(sum(one.hit_rate for one in rounds) / len(rounds), 3),
    }


def compared(rounds: Sequence[Round]) -> list[dict[str, object]]:
    """Return a row for each workload and way, over all seeds."""
    rows = []
    by_way: dict[tuple[str, str], list[Round]] = {}
    for one in rounds:
        by_way.setdefault((one.workload, one.way), []).append(one)
    for (workload, _), its in by_way.items():
        best = by_way[workload, ONE_SCHEDULER]
        p99_ms = {one.seed: percentiles(one.ttft_ms).p99 or 0.0 for one in best}
        ours, row = float(str(_figures(best)["ttft_ms_p99"])), _figures(its)
        row["ttft_p99_ratio"] = round(float(str(row["ttft_ms_p99"])) / ours, 3)
        row["wins"] = sum((percentiles(one.ttft_ms).p99 or 0.0) > p99_ms[one.seed] for one in its)
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, object]]) -> str:
    """Return the rows as text."""
    widths = {name: max(len(name), *(len(str(row[name])) for row in rows)) for name in rows[0] if name != "seeds"}
    header = "  ".join(name.rjust(width) for name, width in widths.items())
    return "\n".join([header, *("  ".join(str(row[name]).rjust(widths[name]) for name in widths) for row in rows)])


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--executors", type=count, default=2, help="of each side (default: 2)")
    parser.add_argument("--policies", default="cache_aware,round_robin", help="of smg (default: %(default)s)")
    parser.add_argument("--workloads", default=",".join(RATES_PER_EXECUTOR), help="(default: %(default)s)")
    parser.add_argument("--seeds", type=counts, default=[1, 2, 3], help="of rounds (default: 1,2,3)")
    parser.add_argument("--requests", type=count, default=200, help="of each round (default: 200)")
    parser.add_argument("--rate-share", type=float, default=1.0, help="of the rates of this file (default: 1)")
    parser.add_argument("--tokens", type=count, default=32, help="of each answer (default: 32)")
    parser.add_argument("--short-tokens", type=count, default=96, help="mean of a prompt's own (default: 96)")
    parser.add_argument("--long-tokens", type=count, default=6000, help="of the longest prompts (default: 6000)")
    parser.add_argument("--long-share", type=float, default=0.05, help="of all requests (default: 0.05)")
    parser.add_argument("--families", type=count, default=16, help="of prompts (default: 16)")
    parser.add_argument("--shared-tokens", type=count, default=1500, help="that a family shares (default: 1500)")
    parser.add_argument(
        "--num-kv-blocks", type=count, default=1024, help="of 16 tokens of each executor (default: 1024)"
    )
    parser.add_argument("--step-ms", type=float, default=8.0, help="time of a step (default: 8)")
    parser.add_argument("--token-us", type=float, default=100.0, help="and for each of its tokens (default: 100)")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    arguments = _arguments(words)
    rounds = asyncio.run(run_rounds(arguments))
    rows = compared(rounds)
    print(table(rows))
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    each = [_figures([one]) for one in rounds]
    write_result(
        arguments.json,
        {
            **provenance(arguments.seeds[0]),
            "settings": settings,
            "rates_per_executor": RATES_PER_EXECUTOR,
            "rows": rows,
            "rounds": each,
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
