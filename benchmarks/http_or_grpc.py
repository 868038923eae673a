"""The gateway's own OpenAI API beside gRPC: the same tokens over both, in one run.

Owns: the load over HTTP, the table and the result file. Must not know: how the gateway makes events.

The simulated backend has zero step time. Throughput: ``--streams`` at a time from one client, ``--tokens`` each; the
ways take turns, and the best of ``--rounds`` counts. Latency: one stream at a time with ``--gap-ms`` between steps;
medians. The client shares this machine's cores; its processor time per token is in the table too.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter

import aiohttp
import grpc
import msgspec

from gateway import PROMPT, Chain, running_chain
from headway.client import AsyncClient
from headway.replicas import free_ports
from headway_proto import generation_pb2 as api
from headway_proto import generation_pb2_grpc as api_grpc
from program import count, parser_of, provenance, write_result
from smg_overhead import Way, latencies, throughput

_START_S = 60.0
_USAGE = b'"completion_tokens":'


class Ways:
    """The ways to the same tokens."""

    def __init__(self, channel: grpc.aio.Channel, session: aiohttp.ClientSession) -> None:
        self._native = api_grpc.GenerationStub(channel)
        self._session = session

    def by_name(self) -> dict[str, Way]:
        """Return the ways; the first is the base."""
        return {"grpc": self.native, "completions": self.completions, "chat": self.chat}

    async def native(self, tokens: int, seed: int) -> list[float]:
        """``headway.v1.Generation``."""
        sampling = api.SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True)
        arrivals: list[float] = []
        async for event in self._native.Generate(api.GenerateRequest(text=PROMPT, sampling=sampling)):
            if event.HasField("delta"):
                arrivals += [perf_counter()] * len(event.delta.token_ids)
        return arrivals

    async def completions(self, tokens: int, seed: int) -> list[float]:
        """``POST /v1/completions``."""
        return await self._events("/v1/completions", {"prompt": PROMPT}, tokens, seed)

    async def chat(self, tokens: int, seed: int) -> list[float]:
        """``POST /v1/chat/completions``."""
        return await self._events(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}, tokens, seed
        )

    async def _events(self, path: str, prompt: dict[str, object], tokens: int, seed: int) -> list[float]:
        """Read events as a client does, but without its objects. Some tokens bring no text and no event."""
        body = prompt | {
            "max_tokens": tokens,
            "seed": seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        arrivals: list[float] = []
        last = b""
        async with self._session.post(path, data=msgspec.json.encode(body)) as answer:
            answer.raise_for_status()
            async for data in answer.content.iter_any():
                arrivals += [perf_counter()] * data.count(b'"finish_reason":null')
                last = (last + data)[-4096:]
        assert int(last.partition(_USAGE)[2].partition(b",")[0]) == tokens, "not all tokens came"
        return arrivals


@asynccontextmanager
async def serving(step_us: float, streams: int) -> AsyncIterator[tuple[Ways, Chain]]:
    address, http_address = (f"127.0.0.1:{port}" for port in free_ports("127.0.0.1", 2))
    with (
        tempfile.TemporaryDirectory(prefix="hw") as directory,
        running_chain(
            address, step_us, streams, Path(directory), gateway_flags=("--http-address", http_address)
        ) as chain,
    ):
        async with AsyncClient(address) as client:
            await client.wait_ready(_START_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            grpc.aio.insecure_channel(address) as channel,
            aiohttp.ClientSession(f"http://{http_address}", connector=connector) as session,
        ):
            yield Ways(channel, session), chain


async def measure(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
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


def table(rows: dict[str, dict[str, float]]) -> str:
    base = rows["grpc"]
    lines = [
        f"{'way':<14}{'tokens/s':>10}{'ratio':>7}{'TTFT ms':>9}{'added':>7}{'ITL ms':>8}{'gateway us':>12}{'client us':>11}"
    ]
    for name, row in rows.items():
        lines.append(
            f"{name:<14}{row['tokens_per_s']:>10.0f}{row['tokens_per_s'] / base['tokens_per_s']:>7.2f}"
            f"{row['ttft_ms']:>9.2f}{row['ttft_ms'] - base['ttft_ms']:>7.2f}{row['itl_ms']:>8.2f}"
            f"{row['gateway_cpu_us_per_token']:>12.1f}{row['client_cpu_us_per_token']:>11.1f}"
        )
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--streams", type=count, default=64, help="streams at a time (default: 64)")
    parser.add_argument("--tokens", type=count, default=128, help="tokens of each (default: 128)")
    parser.add_argument("--rounds", type=count, default=3, help="rounds after the first, which warms up (default: 3)")
    parser.add_argument("--requests", type=count, default=40, help="streams measured one at a time (default: 40)")
    parser.add_argument("--latency-tokens", type=count, default=32, help="tokens of each of those (default: 32)")
    parser.add_argument("--gap-ms", type=float, default=5.0, help="time of a step for those (default: 5)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "http_or_grpc.json")
    arguments = parser.parse_args(words)
    rows = asyncio.run(measure(arguments))
    print(table(rows))
    settings = {name: value for name, value in vars(arguments).items() if name != "output"}
    result = {**provenance(seed=0), "settings": settings, "load_average": os.getloadavg()[0], "rows": rows}
    write_result(arguments.output, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
