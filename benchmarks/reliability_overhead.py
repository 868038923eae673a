"""What reliability costs: checksums, keys, heartbeats and bounds, each against the same work without.

Owns: the comparison; what is compared is the product's own code, switched by what a deployment can choose (IPC or TCP with
keys) or, for the checksum and the link's bookkeeping, measured against the same calls with that part left out here.
Must not know: any switch of the product that weakens it, since there is none.

- ``step``: one scheduler step of N decodes as ``scheduler_step.py`` measures it, without the CRC32 of its two frames; with
  it; and within the whole engine: sequence numbers, epochs, silence, heartbeats, bounds, acknowledgements, and the
  gateway's message. The engine is compared with the core plus that message, since somebody has to write it.
- ``link``: a step's frame there and an answer of N tokens back between two processes through the product's own sockets:
  IPC, TCP, TCP with CURVE.
- ``chain``: tokens per second of scheduler, executor, gateway and one client, as processes, over IPC and over TCP with
  CURVE, by turns. One number with the simulated backend's steps at zero time, where every microsecond of any process
  counts, and one with steps of some milliseconds, where it counts if it is longer than what a step hides.

Times in microseconds. Every figure is the best of ``--rounds``, which take turns, because shared machines drift.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import grpc.aio

from gateway import Chain, running_chain, throughput
from headway.keys import make_keys
from headway_executor.channel import SchedulerChannel
from headway_proto import framing, generation_pb2_grpc, ingress, step
from headway_proto.columns import encode_column
from headway_proto.sampling import SamplingParams
from headway_scheduler.core.limits import SchedulerLimits
from headway_scheduler.engine import SchedulerEngine
from headway_scheduler.process import relax_collector
from headway_scheduler.transport import Transport
from provenance import provenance
from scheduler_step import Bench

ECHO = "--echo"
"""The first argument of the process at the other end of a link."""
LINKS = ("ipc", "tcp", "tcp+curve")
PROMPT_TOKENS = 64
BEAT_S = 0.01


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# --------------------------------------------------------------------------------------------------------------- step


class WithoutChecksum:
    """In place of ``zlib`` in the framing: every checksum is 0, and right."""

    @staticmethod
    def crc32(data: object, value: int = 0) -> int:
        """The checksum of anything."""
        del data, value
        return 0


@contextlib.contextmanager
def without_checksum() -> Iterator[None]:
    with mock.patch.object(framing, "zlib", WithoutChecksum):
        yield


def core_step(num_running: int, steps: int, seed: int) -> float:
    """Schedule, encode, decode the answer, update, and write the gateway's message: median."""
    bench = Bench(num_running, 2, seed)
    bench.settle()
    relax_collector()
    times = [bench.timed_step([]) for _ in range(steps)]
    return statistics.median(times) + statistics.median(bench.gateway_us)


class EngineBench:
    """The engine with one executor and one gateway, both played here."""

    def __init__(self, num_running: int, seed: int) -> None:
        limits = SchedulerLimits(max_num_batched_tokens=8192, max_num_seqs=num_running, max_num_waiting=1 << 14)
        self.engine = SchedulerEngine(limits, incarnation=seed + 1)
        self.now = 0.0
        self.num_running = num_running
        self.executor, self.reader = step.executor_frame_writer(), step.executor_frame_reader()
        self.gateway, self.gateway_reader = ingress.gateway_frame_writer(), ingress.gateway_frame_reader()
        self.num_heard = 0
        self._join()
        self._submit()

    def _join(self) -> None:
        info = step.BackendInfo(
            backend="played", device="none", dtype="none", model_name="none", model_fingerprint="none",
            num_blocks=self.num_running * 200, block_size=16, max_model_len=3000, vocab_size=32_000,
            eos_token_ids=(2,), max_num_rows=self.num_running,
        )  # fmt: skip
        self.engine.executor_frame(b"executor", self.executor.encode(step.ExecutorHello(1, info)), self.now)
        opened = self.reader.decode(self.engine.step_link.outgoing.pop()[1])
        self.engine.step_link.outgoing.clear()
        self.executor.begin_epoch(opened.epoch)
        hello = ingress.GatewayHello(incarnation=1, link=1)
        self.engine.gateway_frame(b"gateway", self.gateway.encode(hello), self.now)
        answered = self.gateway_reader.decode(self.engine.gateways.outgoing[0][1])
        self.engine.gateways.outgoing.clear()
        self.gateway.begin_epoch(answered.epoch)

    def _submit(self) -> None:
        for number in range(self.num_running):
            submit = ingress.Submit(
                handle=number + 1, request_id=str(number), index=0, num_prompt_tokens=PROMPT_TOKENS + number % 16,
                token_ids=encode_column([5 + number % 1000] * (PROMPT_TOKENS + number % 16)), max_tokens=2500,
                sampling=SamplingParams(temperature=0.0), ignore_eos=True,
            )  # fmt: skip
            self.engine.gateway_frame(b"gateway", self.gateway.encode(submit), self.now)
        self.engine.run(self.now)
        while self.engine.core is None or self.engine.core._prefilling or self.engine.core.num_waiting:  # noqa: SLF001
            self.beat()

    def _answer(self) -> bytes:
        """Untimed: what an executor would say to the oldest step in flight, and what a gateway acknowledges."""
        core = self.engine.core
        assert core is not None
        oldest = core._in_flight[0]  # noqa: SLF001 (the benchmark plays the executor)
        self.num_heard += len(self.engine.gateways.outgoing)
        self.engine.gateways.outgoing.clear()
        self.engine.step_link.outgoing.clear()
        heard = self.gateway.encode(ingress.GatewayHeartbeat(received=self.num_heard + 1))
        self.engine.gateway_frame(b"gateway", heard, self.now)
        output = step.ExecutorOutput(
            epoch=core.epoch, step=oldest.step, state_digest=oldest.digest,
            sampled_token_ids=encode_column(self.sampled_tokens(len(oldest.sampling_rows))),
        )  # fmt: skip
        return self.executor.encode(output)

    def sampled_tokens(self, count: int) -> Sequence[int]:
        """What the model draws."""
        return [7] * count

    def beat(self) -> float:
        """One answer in, the next step and the gateway's message out: microseconds."""
        frame = self._answer()
        self.now += BEAT_S
        started = time.perf_counter_ns()
        self.engine.executor_frame(b"executor", frame, self.now)
        self.engine.run(self.now)
        return (time.perf_counter_ns() - started) / 1e3


def engine_step(num_running: int, steps: int, seed: int) -> float:
    bench = EngineBench(num_running, seed)
    for _ in range(32):
        bench.beat()
    relax_collector()
    return statistics.median(bench.beat() for _ in range(steps))


def measure_steps(num_running: int, steps: int, rounds: int, seed: int) -> dict[str, float]:
    ways: dict[str, Callable[[], float]] = {
        "core": lambda: core_step(num_running, steps, seed),
        "engine": lambda: engine_step(num_running, steps, seed),
    }
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            with without_checksum():
                found.setdefault(f"{name}_without_checksum_us", []).append(way())
            found.setdefault(f"{name}_us", []).append(way())
    return {name: round(min(times), 1) for name, times in found.items()}


# --------------------------------------------------------------------------------------------------------------- link


def link_addresses(kind: str, directory: Path) -> tuple[str, str]:
    """For the step link and the ingress link."""
    if kind == "ipc":
        return f"ipc://{directory}/step", f"ipc://{directory}/ingress"
    return f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"


def echo(address: str, keys: str, answer_bytes: int) -> None:
    """An executor that answers every frame with as many bytes as its tokens would take; ends with an empty frame."""
    channel = SchedulerChannel(address, keys)
    answer = bytes(answer_bytes)
    for _ in range(200):  # sends are dropped while there is no peer
        channel.send(b"hello")
        channel.wait(0.02)
        if (frame := channel.receive()) is not None:
            break
    while frame != b"end":
        if frame is not None:
            channel.send(answer)
        channel.wait(1.0)
        frame = channel.receive()
    channel.close()


def round_trips(kind: str, directory: Path, num_running: int, count: int) -> float:
    """The median of ``count`` steps there and answers back."""
    step_address, ingress_address = link_addresses(kind, directory)
    keys = directory / "keys" if kind == "tcp+curve" else None
    transport = Transport(step_address, ingress_address, str(keys / "scheduler") if keys else "")
    frame = step.scheduler_frame_writer().encode(step.SchedulerHeartbeat(1)).ljust(64, b"\0")
    answer_bytes = len(step.executor_frame_writer().encode(
        step.ExecutorOutput(epoch=1, step=1, sampled_token_ids=encode_column([7] * num_running))
    ))  # fmt: skip
    arguments = (step_address, str(keys / "executor") if keys else "", str(answer_bytes))
    process = subprocess.Popen([sys.executable, __file__, ECHO, *arguments])
    try:
        peer, _ = transport.executor.recv_multipart()
        times = []
        for number in range(count + count // 10):
            started = time.perf_counter_ns()
            transport.executor.send_multipart((peer, frame))
            while transport.executor.recv_multipart()[1] == b"hello":
                pass
            if number >= count // 10:
                times.append((time.perf_counter_ns() - started) / 1e3)
        transport.executor.send_multipart((peer, b"end"))
        process.wait(10)
    finally:
        process.kill()
        transport.close()
    return statistics.median(times)


def measure_links(directory: Path, num_running: int, count: int, rounds: int) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for kind in LINKS:
            found.setdefault(f"{kind}_us", []).append(round_trips(kind, directory, num_running, count))
    return {name: round(min(times), 1) for name, times in found.items()}


# -------------------------------------------------------------------------------------------------------------- chain


async def chain_rate(chain: Chain, address: str, streams: int, tokens: int) -> float:
    async with grpc.aio.insecure_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)
        stub = generation_pb2_grpc.GenerationStub(channel)
        for _ in range(200):
            try:
                await throughput(stub, chain, 1, 2)
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)
        await throughput(stub, chain, streams, tokens // 4 + 1)
        return (await throughput(stub, chain, streams, tokens))["tokens_per_s"]


def measure_chain(directory: Path, streams: int, tokens: int, step_us: float, rounds: int) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for place in range(rounds):
        for kind in ("ipc", "tcp+curve"):
            folder = directory / f"{kind}{step_us:g}{place}"
            folder.mkdir(mode=0o700)
            address = f"127.0.0.1:{free_port()}"
            step_address, ingress_address = link_addresses(kind, folder)
            keys = directory / "keys" if kind == "tcp+curve" else None
            with running_chain(
                address, step_us, streams, folder, links=(step_address, ingress_address), curve_keys=keys
            ) as chain:
                rate = asyncio.run(chain_rate(chain, address, streams, tokens))
            found.setdefault(kind, []).append(rate)
    return {f"{kind}_tokens_per_s": round(max(rates)) for kind, rates in found.items()}


# ------------------------------------------------------------------------------------------------------------- report


def percent(with_it: float, without: float) -> float:
    return round((with_it / without - 1) * 100, 1)


def report(record: dict[str, Any]) -> str:
    steps, links, chains = record["step"], record["link"], record["chain"]
    core = f"core and message {steps['core_without_checksum_us']} us without checksum, {steps['core_us']} us with"
    checksums = f"of it the checksums {steps['engine_checksum_percent']:+} %"
    over_core = f"{steps['engine_over_core_percent']:+} % over the core without checksum; {checksums}"
    trips = ", ".join(f"{kind} {links[f'{kind}_us']} us" for kind in LINKS)
    lines = [
        f"scheduler step, {record['running']} decodes, {core} ({steps['core_checksum_percent']:+} %)",
        f"the same within the engine: {steps['engine_us']} us ({over_core})",
        f"step there and answer back: {trips} (TCP with CURVE adds {links['added_us']} us)",
    ]
    lines += [
        f"chain, {record['streams']} streams, steps of {step_us} us: IPC {chain['ipc_tokens_per_s']}, TCP with CURVE "
        f"{chain['tcp+curve_tokens_per_s']} tokens/s ({chain['change_percent']:+} %)"
        for step_us, chain in chains.items()
    ]
    return "\n".join(lines)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="hwover") as name:
        directory = Path(name)
        make_keys(directory / "keys")
        steps = measure_steps(arguments.running, arguments.steps, arguments.rounds, arguments.seed)
        links = measure_links(directory, arguments.running, arguments.round_trips, arguments.rounds)
        chains = {
            f"{step_us:g}": measure_chain(directory, arguments.streams, arguments.tokens, step_us, arguments.rounds)
            for step_us in (0.0, 5000.0)
        }
    steps["core_checksum_percent"] = percent(steps["core_us"], steps["core_without_checksum_us"])
    steps["engine_checksum_percent"] = percent(steps["engine_us"], steps["engine_without_checksum_us"])
    steps["engine_over_core_percent"] = percent(steps["engine_us"], steps["core_without_checksum_us"])
    links["added_us"] = round(links["tcp+curve_us"] - links["ipc_us"], 1)
    for chain in chains.values():
        chain["change_percent"] = percent(chain["tcp+curve_tokens_per_s"], chain["ipc_tokens_per_s"])
    return {
        **provenance(arguments.seed), "running": arguments.running, "streams": arguments.streams,
        "step": steps, "link": links, "chain": chains,
    }  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == [ECHO]:
        _, _, address, keys, answer_bytes = sys.argv
        echo(address, keys, int(answer_bytes))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256, help="requests that decode")
    parser.add_argument("--steps", type=int, default=1000, help="steps per round")
    parser.add_argument("--round-trips", type=int, default=3000, help="steps over a link per round")
    parser.add_argument("--streams", type=int, default=64, help="streams through the chain")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the record here")
    arguments = parser.parse_args()
    record = measure(arguments)
    print(report(record))
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
