"""The same tokens by several ways, in one run: the load, the flags, the table and the result file.

Owns: how a way is measured. Must not know: what a way is, or which processes are between.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from gateway import Chain
from program import count, parser_of, provenance, write_result

Way = Callable[[int, int], Awaitable[list[float]]]
"""Streams so many tokens with a seed; answers when each token came, in seconds of the clock."""


class Ways(Protocol):
    """The ways of a benchmark."""

    def by_name(self) -> Mapping[str, Way]:
        """Return them; the first is the base of ratios."""
        ...


Serving = Callable[[float, int], AbstractAsyncContextManager[tuple[Ways, Chain]]]
"""Runs all processes, with a step time in microseconds and room for so many streams."""


async def throughput(way: Way, chain: Chain, streams: int, tokens: int) -> dict[str, float]:
    """Return a round of ``streams`` at once. Processor time is in microseconds per token."""
    before, started = chain.cpu_seconds(), time.perf_counter()
    await asyncio.gather(*(way(tokens, seed) for seed in range(streams)))
    wall_s = time.perf_counter() - started
    num_tokens = streams * tokens
    used = {name: (now - before[name]) / num_tokens * 1e6 for name, now in chain.cpu_seconds().items()}
    return {"tokens_per_s": num_tokens / wall_s, **{f"{name}_cpu_us_per_token": us for name, us in used.items()}}


async def latencies(way: Way, requests: int, tokens: int) -> dict[str, float]:
    """Return medians over requests, one stream at a time."""
    firsts, gaps = [], []
    for seed in range(requests):
        started = time.perf_counter()
        arrivals = await way(tokens, seed)
        firsts.append(arrivals[0] - started)
        gaps += [after - before for before, after in pairwise(arrivals) if after > before]
    return {"ttft_ms": statistics.median(firsts) * 1e3, "itl_ms": statistics.median(gaps) * 1e3}


async def measure(arguments: argparse.Namespace, serving: Serving) -> dict[str, dict[str, float]]:
    """Measure every way; the first round only warms up."""
    rows: dict[str, dict[str, float]] = {}
    async with serving(0.0, arguments.streams) as (ways, chain):
        for round_number in range(arguments.rounds + 1):
            for name, way in ways.by_name().items():
                row = await throughput(way, chain, arguments.streams, arguments.tokens)
                if round_number and row["tokens_per_s"] > rows.get(name, {}).get("tokens_per_s", 0.0):
                    rows[name] = row
    async with serving(arguments.gap_ms * 1e3, 1) as (ways, _):
        for name, way in ways.by_name().items():
            await way(4, 0)
            rows[name] |= await latencies(way, arguments.requests, arguments.latency_tokens)
    return rows


def table(rows: Mapping[str, Mapping[str, float]], beside: str) -> str:
    """Return a line per way, with the processor time of the gateway and of the process ``beside`` it."""
    base = next(iter(rows.values()))
    lines = [
        f"{'way':<20}{'tokens/s':>10}{'ratio':>7}{'TTFT ms':>9}{'added':>7}{'ITL ms':>8}{'gateway us':>12}{beside + ' us':>11}"
    ]
    for name, row in rows.items():
        lines.append(
            f"{name:<20}{row['tokens_per_s']:>10.0f}{row['tokens_per_s'] / base['tokens_per_s']:>7.2f}"
            f"{row['ttft_ms']:>9.2f}{row['ttft_ms'] - base['ttft_ms']:>7.2f}{row['itl_ms']:>8.2f}"
            f"{row['gateway_cpu_us_per_token']:>12.1f}{row[f'{beside}_cpu_us_per_token']:>11.1f}"
        )
    return "\n".join(lines)


def run(words: Sequence[str] | None, doc: str | None, serving: Serving, *, beside: str) -> int:
    """Be the benchmark whose program this is; ``doc`` is its docstring, ``beside`` as of ``table``."""
    parser = parser_of(doc)
    parser.add_argument("--streams", type=count, default=64, help="streams at a time (default: 64)")
    parser.add_argument("--tokens", type=count, default=128, help="tokens of each (default: 128)")
    parser.add_argument("--rounds", type=count, default=3, help="rounds after the first, which warms up (default: 3)")
    parser.add_argument("--requests", type=count, default=40, help="streams measured one at a time (default: 40)")
    parser.add_argument("--latency-tokens", type=count, default=32, help="tokens of each of those (default: 32)")
    parser.add_argument("--gap-ms", type=float, default=5.0, help="time of a step for those (default: 5)")
    result_file = Path(__file__).parent / "results" / f"{Path(sys.argv[0]).stem}.json"
    parser.add_argument("--output", type=Path, default=result_file)
    arguments = parser.parse_args(words)
    rows = asyncio.run(measure(arguments, serving))
    print(table(rows, beside))
    settings = {name: value for name, value in vars(arguments).items() if name != "output"}
    result = {**provenance(seed=0), "settings": settings, "load_average": os.getloadavg()[0], "rows": rows}
    write_result(arguments.output, result)
    return 0
