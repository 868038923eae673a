"""The gateway's own OpenAI API beside gRPC: the same tokens over both, in one run.

Owns: the load over HTTP, the table and the result file. Must not know: how the gateway makes events.

The simulated backend has zero step time. Throughput: ``--streams`` at a time from one client, ``--tokens`` each; the
ways take turns, and the best of ``--rounds`` counts. Latency: one stream at a time with ``--gap-ms`` between steps;
medians. The client shares this machine's cores; its processor time per token is in the table too.
"""

import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter

import aiohttp
import grpc
import msgspec

from by_way import Way, run
from gateway import PROMPT, Chain, running_chain
from headway.client import AsyncClient
from headway_process.free_ports import free_ports
from headway_proto import generation_pb2 as api
from headway_proto import generation_pb2_grpc as api_grpc

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


def main(words: Sequence[str] | None = None) -> int:
    return run(words, __doc__, serving, beside="client")


if __name__ == "__main__":
    sys.exit(main())
