"""The gateway's throughput and added latency: the whole chain as processes, with a simulated backend at zero step time.

Owns: starting scheduler, executor and gateway, the client's load, the table and the result file. Must not know:
anything of the gateway that a client cannot see, except its ingress link.

Throughput: N greedy streams of ``--tokens`` at a time from this one client; output tokens over the wall time. Added
latency: one request of one token through gRPC, and then straight through ingress with the gateway's own link in this
process. gRPC's Python client takes a part of that for itself: the same call is made over a plain socket too, and the
client calls a bare server of grpcio that answers at once. A server of asyncio that sends back the request's bytes shows what
any server in Python's event loop costs. Then one stream with ``--gap-ms`` between steps: how much later tokens arrive, and the jitter of their gaps.
All processes share this machine's cores.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path

import grpc

import headway
from headway.client import AsyncClient
from headway_gateway.link.live_sequence import LiveSequence
from headway_gateway.link.scheduler_client import SchedulerClient
from headway_gateway.wakeup import Wakeup
from headway_lab.percentiles import percentiles
from headway_process.free_ports import free_ports
from headway_proto import generation_pb2 as api
from headway_proto import generation_pb2_grpc as api_grpc
from headway_proto.columns import encode_column
from headway_proto.ingress import Submit
from headway_proto.sampling import SamplingParams
from plain_call import METHOD, PlainCaller, echo, plain_socket
from program import count, parser_of, provenance, write_result

DEMO_MODEL = Path(headway.__file__).parent / "demo_model"
_WARM_UP = 20
PROMPT = "The list of things that a gateway does:"


class Chain:
    """The running processes, by name, and where they listen."""

    def __init__(self, directory: Path, processes: dict[str, subprocess.Popen[bytes]]) -> None:
        self.ingress = f"ipc://{directory}/ingress"
        self.processes = processes

    def cpu_seconds(self) -> dict[str, float]:
        """Return the processor time so far, by process; this process is the client."""
        ticks = os.sysconf("SC_CLK_TCK")
        pids = {name: process.pid for name, process in self.processes.items()} | {"client": os.getpid()}
        used = {}
        for name, pid in pids.items():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            used[name] = (int(fields[11]) + int(fields[12])) / ticks
        return used


@contextmanager
def running_chain(
    address: str,
    step_us: float,
    streams: int,
    directory: Path,
    *,
    links: tuple[str, str] | None = None,
    curve_keys: Path | None = None,
    gateway_flags: Sequence[str] = (),
    program: Sequence[str] = (sys.executable, "-m", "headway"),
) -> Iterator[Chain]:
    """Run the three services; ``links`` are the addresses of step and ingress, by default IPC."""
    step, ingress = links or (f"ipc://{directory}/step", f"ipc://{directory}/ingress")
    commands = {
        "scheduler": ["--ingress-address", ingress, "--step-address", step, "--max-num-seqs", str(max(streams, 16))],
        "executor": [
            *("--step-address", step, "--backend", "simulated", "--model", str(DEMO_MODEL)),
            *("--num-kv-blocks", "32768"),
            *("--backend-option", "verify_kv=false", "--backend-option", f"step_base_us={step_us}"),
        ],
        "gateway": [
            "--ingress-address",
            ingress,
            "--grpc-address",
            address,
            "--model",
            str(DEMO_MODEL),
            *gateway_flags,
        ],
    }
    processes = {
        name: subprocess.Popen(
            [
                *(*program, name, "--log-level", "warning", *flags),
                *(("--curve-keys", str(curve_keys / name)) if curve_keys else ()),
            ]
        )
        for name, flags in commands.items()
    }
    try:
        yield Chain(directory, processes)
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait(30)


@contextmanager
def bare_servers() -> Iterator[tuple[str, str]]:
    """Run a server of grpcio and one of asyncio that do nothing."""
    grpcio, asyncios = (f"127.0.0.1:{port}" for port in free_ports("127.0.0.1", 2))
    process = subprocess.Popen([sys.executable, str(Path(__file__).with_name("plain_call.py")), grpcio, asyncios])
    try:
        yield grpcio, asyncios
    finally:
        process.terminate()
        process.wait(30)


async def throughput(stub: api_grpc.GenerationStub, chain: Chain, streams: int, tokens: int) -> dict[str, float]:
    num_messages = 0

    async def one(seed: int) -> int:
        nonlocal num_messages
        request = api.GenerateRequest(
            text=PROMPT, sampling=api.SamplingParams(max_tokens=tokens, seed=seed, temperature=1.0, ignore_eos=True)
        )
        count = 0
        async for event in stub.Generate(request):
            if event.HasField("delta"):
                num_messages += 1
                assert event.delta.first_token_index == count
                count += len(event.delta.token_ids)
        return count

    cpu_before, started = chain.cpu_seconds(), time.perf_counter()
    counts = await asyncio.gather(*(one(seed) for seed in range(streams)))
    wall_s = time.perf_counter() - started
    assert counts == [tokens] * streams
    used = {f"{name}_cpu_s": value - cpu_before[name] for name, value in chain.cpu_seconds().items()}
    return {
        "tokens_per_s": sum(counts) / wall_s,
        "wall_s": wall_s,
        "messages_per_s": num_messages / wall_s,
        "tokens_per_message": sum(counts) / num_messages,
        **used,
    }


async def through_grpc(stub: api_grpc.GenerationStub, tokens: int) -> list[float]:
    """Return the arrival times of one request's tokens, in seconds from sending."""
    request = api.GenerateRequest(text=PROMPT, sampling=api.SamplingParams(max_tokens=tokens, seed=1, ignore_eos=True))
    started, arrivals = time.perf_counter(), []
    async for event in stub.Generate(request):
        if event.HasField("delta"):
            arrivals += [time.perf_counter() - started] * len(event.delta.token_ids)
    return arrivals


async def through_ingress(client: SchedulerClient, prompt_ids: list[int], tokens: int) -> list[float]:
    """Do the same without a gateway."""
    bell = Wakeup()
    submission = Submit(
        handle=client.next_handle(),
        request_id=f"direct-{client.next_handle()}",
        index=0,
        token_ids=encode_column(prompt_ids),
        num_prompt_tokens=len(prompt_ids),
        max_tokens=tokens,
        sampling=SamplingParams(seed=1),
        ignore_eos=True,
    )
    sequence = LiveSequence(submission, (), bell.ring)
    started, arrivals = time.perf_counter(), []
    client.submit([sequence])
    while sequence.end is None:
        await bell.wait()
        arrivals += [time.perf_counter() - started] * (len(sequence.tokens) - len(arrivals))
    return arrivals


@asynccontextmanager
async def connected(
    address: str, ingress: str
) -> AsyncIterator[tuple[api_grpc.GenerationStub, SchedulerClient, list[int]]]:
    """Return a gRPC stub, a link to the scheduler, and the prompt's tokens."""
    async with AsyncClient(address) as client:
        await client.wait_ready(60)
        prompt_ids = await client.tokenize(PROMPT)
    link = SchedulerClient(ingress, incarnation=int.from_bytes(os.urandom(6), "big"))
    link.start()
    await link.wait_until_serving(10)
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        yield api_grpc.GenerationStub(channel), link, prompt_ids
    await link.close()


def spread(seconds: list[float]) -> dict[str, float]:
    """Return p50 and p99 in milliseconds."""
    values = percentiles([one * 1e3 for one in seconds])
    return {"p50_ms": values.p50 or 0.0, "p99_ms": values.p99 or 0.0}


async def latency(
    address: str, ingress: str, bare_addresses: tuple[str, str], requests: int
) -> dict[str, dict[str, float]]:
    """Measure requests of one token, alternating between all ways."""
    sampling = api.SamplingParams(max_tokens=1, seed=1, ignore_eos=True)
    request = api.GenerateRequest(text=PROMPT, sampling=sampling).SerializeToString()
    times: dict[str, list[float]] = {"grpc": [], "plain": [], "ingress": [], "bare": [], "echo": []}
    bare_address, echo_address = bare_addresses
    async with connected(address, ingress) as (stub, link, prompt_ids), grpc.aio.insecure_channel(bare_address) as bare:
        await bare.channel_ready()
        call_bare = bare.unary_stream(METHOD)
        caller, echoing = PlainCaller(address), plain_socket(echo_address)
        for _ in range(requests + _WARM_UP):
            times["grpc"].append((await through_grpc(stub, 1))[0])
            began = time.perf_counter()
            times["plain"].append(caller.call(request)[1].at - began)  # behind `accepted`
            times["ingress"].append((await through_ingress(link, prompt_ids, 1))[0])
            began = time.perf_counter()
            arrivals = [time.perf_counter() - began async for _ in call_bare(request)]
            times["bare"].append(arrivals[1])
            times["echo"].append(echo(echoing, request))
        caller.close()
        echoing.close()
    ways = {way: spread(seconds[_WARM_UP:]) for way, seconds in times.items()}
    direct = ways["ingress"]
    return {
        "first token over gRPC": ways["grpc"],
        "first token over a plain socket": ways["plain"],
        "first token over ingress": direct,
        "second message of a bare grpcio server": ways["bare"],
        "echo of a bare asyncio server": ways["echo"],
        "added to the first token": {key: ways["grpc"][key] - direct[key] for key in direct},
        "added, over a plain socket": {key: ways["plain"][key] - direct[key] for key in direct},
    }


async def gaps(address: str, ingress: str, tokens: int) -> dict[str, dict[str, float]]:
    """Measure the gaps between the tokens of one stream, over both ways."""
    async with connected(address, ingress) as (stub, link, prompt_ids):
        result = {}
        for name, arrivals in (
            ("gap between tokens over gRPC", await through_grpc(stub, tokens)),
            ("gap between tokens over ingress", await through_ingress(link, prompt_ids, tokens)),
        ):
            result[name] = spread([later - earlier for earlier, later in pairwise(arrivals)])
    return result


async def rounds_of_throughput(address: str, chain: Chain, options: argparse.Namespace) -> list[dict[str, float]]:
    async with connected(address, chain.ingress) as (stub, _, _):
        await throughput(stub, chain, options.streams, 64)  # connections, caches, first imports
        return [await throughput(stub, chain, options.streams, options.tokens) for _ in range(options.rounds)]


def print_tables(result: dict[str, object]) -> None:
    rounds: list[dict[str, float]] = result["throughput"]  # type: ignore[assignment]
    print(f"\n{'round':>6}" + "".join(f"{name:>20}" for name in rounds[0]))
    for place, row in enumerate(rounds):
        print(f"{place:>6}" + "".join(f"{value:>20,.1f}" for value in row.values()))
    print(f"\n{'':40}{'p50 ms':>10}{'p99 ms':>10}")
    rows: dict[str, dict[str, float]] = result["latency"]  # type: ignore[assignment]
    for name, row in rows.items():
        print(f"{name:40}{row['p50_ms']:>10.3f}{row['p99_ms']:>10.3f}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--streams", type=count, default=256)
    parser.add_argument("--tokens", type=count, default=900)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--requests", type=count, default=300, help="requests for the latency table")
    parser.add_argument("--gap-ms", type=float, default=10.0)
    parser.add_argument("--grpc-address", default="127.0.0.1:50971")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "gateway.json")
    options = parser.parse_args()
    address = options.grpc_address
    sys.setswitchinterval(0.0005)  # This client's own threads are not what is measured.
    with tempfile.TemporaryDirectory(prefix="hwbench") as name:
        directory = Path(name)
        with running_chain(address, 0.0, options.streams, directory) as chain:
            rounds = asyncio.run(rounds_of_throughput(address, chain, options))
            with bare_servers() as bare_addresses:
                rows = asyncio.run(latency(address, chain.ingress, bare_addresses, options.requests))
        with running_chain(address, options.gap_ms * 1e3, options.streams, directory) as chain:
            rows |= asyncio.run(gaps(address, chain.ingress, 200))
    result: dict[str, object] = {
        "what": "gateway, whole chain, simulated backend at zero step time",
        "streams": options.streams,
        "tokens_per_stream": options.tokens,
        "gap_ms": options.gap_ms,
        "throughput": rounds,
        "latency": rows,
        "grpc": grpc.__version__,
        **provenance(seed=0),
    }
    print_tables(result)
    write_result(options.output, result)


if __name__ == "__main__":
    main()
