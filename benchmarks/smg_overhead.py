"""The cost of smg in front of a gateway: the same tokens by native gRPC, by the VllmEngine service, and as OpenAI
events.

Owns: starting smg, the load on each of the three ways, the table and the result file. Must not know: how smg works.

The simulated backend has zero step time. Throughput: ``--streams`` at a time from one client, ``--tokens`` each; the
ways take turns, and the best of ``--rounds`` counts. Latency: one stream at a time with ``--gap-ms`` between steps;
medians. The processor time of every process is per token, because all share this machine's cores.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import aiohttp
import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from gateway import DEMO_MODEL, PROMPT, Chain, running_chain
from headway import openai_front
from headway.replicas import free_ports
from headway_gateway.tokenization import load_text_model
from headway_proto import generation_pb2 as api
from headway_proto import generation_pb2_grpc as api_grpc
from program import count, parser_of, provenance, write_result

_START_S = 60.0

Way = Callable[[int, int], Awaitable[list[float]]]
"""Streams so many tokens with a seed; answers when each token came, in seconds of the clock."""


class Ways:
    """Three ways to the same tokens."""

    def __init__(self, channel: grpc.aio.Channel, session: aiohttp.ClientSession, url: str) -> None:
        self._native = api_grpc.GenerationStub(channel)
        self._engine = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        self._session = session
        self._url = url
        self._prompt_ids = load_text_model(DEMO_MODEL).encode(PROMPT)

    def by_name(self) -> dict[str, Way]:
        """Return the ways in the order of what they add."""
        return {"native": self.native, "vllm_engine": self.vllm_engine, "openai_through_smg": self.openai_through_smg}

    async def native(self, tokens: int, seed: int) -> list[float]:
        """``headway.v1.Generation``, text in and text out."""
        sampling = api.SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True)
        arrivals: list[float] = []
        async for event in self._native.Generate(api.GenerateRequest(text=PROMPT, sampling=sampling)):
            if event.HasField("delta"):
                arrivals += [time.perf_counter()] * len(event.delta.token_ids)
        return arrivals

    async def vllm_engine(self, tokens: int, seed: int) -> list[float]:
        """``vllm.grpc.engine.VllmEngine``, as smg calls it: token ids in and out."""
        request = vllm.GenerateRequest(
            tokenized=vllm.TokenizedInput(input_ids=self._prompt_ids),
            sampling_params=vllm.SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True),
            stream=True,
        )
        arrivals: list[float] = []
        async for answer in self._engine.Generate(request):
            arrivals += [time.perf_counter()] * len(answer.chunk.token_ids)
        return arrivals

    async def openai_through_smg(self, tokens: int, seed: int) -> list[float]:
        """``/v1/completions`` of smg, read line by line. Some tokens bring no text and no event."""
        body = {
            "model": DEMO_MODEL.name,
            "prompt": PROMPT,
            "max_tokens": tokens,
            "seed": seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        arrivals: list[float] = []
        num_tokens = 0
        async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    arrivals += [time.perf_counter()] * bool(event["choices"])
                    num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
        assert num_tokens == tokens, f"{num_tokens} of {tokens} tokens came"
        return arrivals


@contextlib.contextmanager
def running_smg(
    gateway_addresses: Sequence[str], flags: Sequence[str] = ()
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Run smg in front of the gateways; yield its URL and its process once it serves all of them."""
    port, metrics_port = free_ports("127.0.0.1", 2)
    address = f"127.0.0.1:{port}"
    command = openai_front.command(
        openai_address=address,
        gateway_addresses=gateway_addresses,
        metrics_port=metrics_port,
        grace_s=1.0,
        flags=flags,
    )
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START_S
        while not openai_front.is_serving(address, len(gateway_addresses)):
            if time.monotonic() > deadline or process.poll() is not None:
                raise SystemExit(f"smg has no model within {_START_S:g} s")
            time.sleep(0.1)
        yield f"http://{address}", process
    finally:
        process.kill()
        process.wait()


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


@contextlib.asynccontextmanager
async def connected(address: str, url: str) -> AsyncIterator[Ways]:
    connector = aiohttp.TCPConnector(limit=0)
    async with grpc.aio.insecure_channel(address) as channel, aiohttp.ClientSession(connector=connector) as session:
        yield Ways(channel, session, url)


@contextlib.asynccontextmanager
async def serving(step_us: float, streams: int) -> AsyncIterator[tuple[Ways, Chain]]:
    address = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
    with (
        tempfile.TemporaryDirectory(prefix="hw") as directory,
        running_chain(address, step_us, streams, Path(directory)) as chain,
        running_smg([address]) as (url, process),
    ):
        chain.processes["smg"] = process
        async with connected(address, url) as ways:
            yield ways, chain
        del chain.processes["smg"]


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
    base = rows["native"]
    lines = [
        f"{'way':<20}{'tokens/s':>10}{'ratio':>7}{'TTFT ms':>9}{'added':>7}{'ITL ms':>8}{'gateway us':>12}{'smg us':>8}"
    ]
    for name, row in rows.items():
        lines.append(
            f"{name:<20}{row['tokens_per_s']:>10.0f}{row['tokens_per_s'] / base['tokens_per_s']:>7.2f}"
            f"{row['ttft_ms']:>9.2f}{row['ttft_ms'] - base['ttft_ms']:>7.2f}{row['itl_ms']:>8.2f}"
            f"{row['gateway_cpu_us_per_token']:>12.1f}{row['smg_cpu_us_per_token']:>8.1f}"
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
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "smg_overhead.json")
    arguments = parser.parse_args(words)
    rows = asyncio.run(measure(arguments))
    print(table(rows))
    settings = {name: value for name, value in vars(arguments).items() if name != "output"}
    result = {**provenance(seed=0), "settings": settings, "load_average": os.getloadavg()[0], "rows": rows}
    write_result(arguments.output, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
