"""The cost of smg in front of a gateway: the same tokens by native gRPC, by the VllmEngine service, and as OpenAI
events.

Owns: starting smg, the load on each of the three ways, the table and the result file. Must not know: how smg works.

The simulated backend has zero step time. Throughput: ``--streams`` at a time from one client, ``--tokens`` each; the
ways take turns, and the best of ``--rounds`` counts. Latency: one stream at a time with ``--gap-ms`` between steps;
medians. The processor time of every process is per token, because all share this machine's cores.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import aiohttp
import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from by_way import Way, run
from gateway import DEMO_MODEL, PROMPT, Chain, running_chain
from headway.planning import openai_front
from headway_gateway.text.tokenization import load_text_model
from headway_process.free_ports import free_ports
from headway_proto import generation_pb2 as api
from headway_proto import generation_pb2_grpc as api_grpc

_START_S = 60.0


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


def main(words: Sequence[str] | None = None) -> int:
    return run(words, __doc__, serving, beside="smg")


if __name__ == "__main__":
    sys.exit(main())
