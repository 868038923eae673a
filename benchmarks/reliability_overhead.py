"""The cost of reliability: checksums, keys, heartbeats and bounds, each against the same work without.

Owns: the comparison, with parts of the product's code left out here. Must not know: any switch of the product that
weakens it, because there is none.

- ``step``: a scheduler step of N decodes in the whole engine: as it is, and without checksums, without health
  (heartbeats, silence, pulse, progress), without bounds (unread messages of a gateway, credits), and without all.
- ``link``: a step's frame and its answer between two processes over IPC, TCP, and TCP with CURVE.
- ``chain``: tokens per second of scheduler, executor, gateway and one client over TCP with CURVE, over TCP without all
  parts, and over IPC; with steps at zero time, and with steps of some milliseconds.

Times in microseconds, the best of ``--rounds``, which take turns. On a busy machine, the CPU time per token is the
better figure.
"""

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import grpc.aio

from gateway import Chain, running_chain, throughput
from headway.__main__ import main as headway_main
from headway.commands.keys import make_keys
from headway_executor.links.channel import SchedulerChannel
from headway_process.free_ports import free_ports
from headway_process.pulse import Pulse
from headway_proto import framing, generation_pb2_grpc, ingress, step
from headway_proto.columns import encode_column
from headway_proto.sampling import SamplingParams
from headway_scheduler.cells.brake import FailurePause
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.engine import SchedulerEngine
from headway_scheduler.flight.recorder import FlightRecorder
from headway_scheduler.links import ingress_link
from headway_scheduler.links.executor_link import ExecutorLink
from headway_scheduler.links.ingress_link import GatewayLink, IngressLinks
from headway_scheduler.links.transport import Transport
from program import count, parser_of, provenance, rest_collector, write_result

ECHO = "--echo"
"""The first argument of the process at the other end of a link."""
BARE = "--bare"
"""The first argument of a service from which all parts of reliability are left out."""
LINKS = ("ipc", "tcp", "tcp+curve")
GUARDED, BARE_TCP, IPC = "tcp_with_all", "tcp_without_any", "ipc_with_all"
PROMPT_TOKENS = 64
RUNS_PER_CHAIN = 8
"""Starting one takes longer than a run."""
START_S = 120.0
"""The most that the processes of a chain may take to serve, on a machine that does other things too."""
BEAT_S = 0.01


# --------------------------------------------------------------------------------------------------------------- step


def no_checksum(data: object, value: int = 0) -> int:
    """In place of ``crc32``: every checksum is 0, and right."""
    del data, value
    return 0


def no_events(*_: object) -> list[Any]:
    return []


def nothing(*_: object) -> None:
    """In place of bookkeeping."""


def hold_without_bounds(
    link: GatewayLink,
    columns: tuple[Any, Any, Any] | None = None,
    admitted: tuple[Any, ...] = (),
    logprobs: tuple[Any, ...] = (),
    finished: tuple[Any, ...] = (),
) -> None:
    if columns is not None and len(columns[0]):
        link._columns.append(columns)  # noqa: SLF001 (the method without a part of it)
    link._admitted += admitted  # noqa: SLF001
    link._logprobs += logprobs  # noqa: SLF001
    link._finished += finished  # noqa: SLF001


PARTS: dict[str, tuple[tuple[object, str, object], ...]] = {
    "checksums": ((framing, "crc32", no_checksum),),
    "health": (
        (ExecutorLink, "tick", no_events),
        (IngressLinks, "tick", no_events),
        (FailurePause, "count_answer", nothing),
        (Pulse, "beat", nothing),
    ),
    "bounds": (
        (GatewayLink, "hold", hold_without_bounds),
        (GatewayLink, "acknowledge", nothing),
        (ingress_link, "MAX_UNACKNOWLEDGED_FRAMES", 1 << 62),
        (Transport, "_start_guard", nothing),
    ),
}
"""What is left out for each part of reliability: of whom, the name, and what takes its place."""


@contextlib.contextmanager
def without(*parts: str) -> Iterator[None]:
    """Return the product's code without these parts."""
    with contextlib.ExitStack() as stack:
        for part in parts:
            for owner, name, substitute in PARTS[part]:
                stack.enter_context(mock.patch.object(owner, name, substitute))
        yield


class EngineBench:
    """The engine with one executor and one gateway, both played here."""

    def __init__(self, num_running: int, seed: int) -> None:
        limits = SchedulerLimits(max_num_batched_tokens=8192, max_num_seqs=num_running, max_num_waiting=1 << 14)
        self.engine = SchedulerEngine(limits, incarnation=seed + 1, recorder=self.make_recorder(limits))
        self.now = 0.0
        self.num_running = num_running
        self.executor, self.reader = step.executor_frame_writer(), step.executor_frame_reader()
        self.gateway, self.gateway_reader = ingress.gateway_frame_writer(), ingress.gateway_frame_reader()
        self.num_heard = 0
        self._join()
        self._submit()

    def make_recorder(self, limits: SchedulerLimits) -> FlightRecorder | None:
        """The flight recorder of the engine; none here."""
        del limits
        return None

    def _join(self) -> None:
        info = step.BackendInfo(
            backend="played", device="none", dtype="none", model_name="none", model_fingerprint="none",
            num_blocks=self.num_running * 200, block_size=16, max_model_len=3000, vocab_size=32_000,
            eos_token_ids=(2,), max_num_rows=self.num_running,
        )  # fmt: skip
        self.engine.executor_frame(b"executor", self.executor.encode(step.ExecutorHello(1, info)), self.now)
        opened = self.reader.decode(self.engine.fleet.links.outgoing.pop()[1])
        self.engine.fleet.links.outgoing.clear()
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
        while (
            self.engine.fleet.cells[0].core is None
            or self.engine.fleet.cells[0].core.prefilling
            or self.engine.fleet.cells[0].core.num_waiting
        ):
            self.beat()

    def _answer(self) -> bytes:
        """Answer the oldest step in flight, and acknowledge as a gateway; untimed."""
        core = self.engine.fleet.cells[0].core
        assert core is not None
        oldest = core._epoch.in_flight[0]  # noqa: SLF001 (the benchmark plays the executor)
        self.num_heard += len(self.engine.gateways.outgoing)
        self.engine.gateways.outgoing.clear()
        self.engine.fleet.links.outgoing.clear()
        heard = self.gateway.encode(ingress.GatewayHeartbeat(received=self.num_heard + 1))
        self.engine.gateway_frame(b"gateway", heard, self.now)
        output = step.ExecutorOutput(
            epoch=core.epoch, step=oldest.step, state_digest=oldest.digest,
            sampled_token_ids=encode_column(self.sampled_tokens(len(oldest.sampling_rows))),
        )  # fmt: skip
        return self.executor.encode(output)

    def sampled_tokens(self, count: int) -> Sequence[int]:
        """Return the model's tokens."""
        return [7] * count

    def beat(self) -> float:
        """Return microseconds for one answer in, and the next step and the gateway's message out."""
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
    rest_collector()
    return statistics.median(bench.beat() for _ in range(steps))


def measure_steps(num_running: int, steps: int, rounds: int, seed: int) -> dict[str, float]:
    left_out: dict[str, tuple[str, ...]] = {"with_all_us": (), **{f"without_{part}_us": (part,) for part in PARTS}}
    left_out["without_any_us"] = tuple(PARTS)
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, parts in left_out.items():
            with without(*parts):
                found.setdefault(name, []).append(engine_step(num_running, steps, seed))
    return {name: round(min(times), 1) for name, times in found.items()}


# --------------------------------------------------------------------------------------------------------------- link


def link_addresses(kind: str, directory: Path) -> tuple[str, str]:
    if kind == "ipc":
        return f"ipc://{directory}/step", f"ipc://{directory}/ingress"
    step, ingress = free_ports("127.0.0.1", 2)
    return f"tcp://127.0.0.1:{step}", f"tcp://127.0.0.1:{ingress}"


def echo(address: str, keys: str, answer_bytes: int) -> None:
    """Answer every frame with as many bytes as its tokens would take; an empty frame ends it."""
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
    """Return the median of ``count`` steps there and answers back."""
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


class ChainSpeed(NamedTuple):
    """One run by the wall clock and by the processors, the latter without the client."""

    tokens_per_s: float
    cpu_us_per_token: float


async def serves(stub: generation_pb2_grpc.GenerationStub, chain: Chain) -> bool:
    try:
        await throughput(stub, chain, 1, 2)
    except grpc.aio.AioRpcError:
        return False
    return True


async def chain_speeds(chain: Chain, address: str, streams: int, tokens: int) -> list[ChainSpeed]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        async with asyncio.timeout(START_S):
            await channel.channel_ready()
            while not await serves(stub, chain):  # noqa: ASYNC110 (nobody says when)
                await asyncio.sleep(0.1)
        await throughput(stub, chain, streams, tokens // 4 + 1)
        speeds = []
        for _ in range(RUNS_PER_CHAIN):
            run = await throughput(stub, chain, streams, tokens)
            cpu_s = sum(value for name, value in run.items() if name.endswith("_cpu_s"))
            speeds.append(ChainSpeed(run["tokens_per_s"], cpu_s / (streams * tokens) * 1e6))
        return speeds


def measure_chain(directory: Path, streams: int, tokens: int, step_us: float, rounds: int) -> dict[str, float]:
    found: dict[str, list[ChainSpeed]] = {}
    for place in range(rounds):
        for way in (BARE_TCP, GUARDED, IPC):
            folder = directory / f"{way}{step_us:g}{place}"
            folder.mkdir(mode=0o700)
            address = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
            links = link_addresses("ipc" if way == IPC else "tcp", folder)
            keys = directory / "keys" if way == GUARDED else None
            program = (sys.executable, __file__, BARE) if way == BARE_TCP else (sys.executable, "-m", "headway")
            with running_chain(
                address, step_us, streams, folder, links=links, curve_keys=keys, program=program
            ) as chain:
                speeds = asyncio.run(chain_speeds(chain, address, streams, tokens))
            found.setdefault(way, []).extend(speeds)
    measured: dict[str, float] = {}
    for way, speeds in found.items():
        measured[f"{way}_tokens_per_s"] = round(max(speed.tokens_per_s for speed in speeds))
        measured[f"{way}_cpu_us_per_token"] = round(min(speed.cpu_us_per_token for speed in speeds), 2)
    return measured


# ------------------------------------------------------------------------------------------------------------- report


def percent(with_it: float, without: float) -> float:
    """Return the difference in percent; 0 if the processors' clock was too coarse."""
    return round((with_it / without - 1) * 100, 1) if without else 0.0


def report(record: dict[str, Any]) -> str:
    steps, links, chains = record["step"], record["link"], record["chain"]
    parts = ", ".join(f"{part} {steps[f'{part}_percent']:+} %" for part in PARTS)
    trips = ", ".join(f"{kind} {links[f'{kind}_us']} us" for kind in LINKS)
    without_any = f"{steps['without_any_us']} us without checksums, health and bounds"
    percents = f"{steps['all_percent']:+} %; one by one: {parts}"
    lines = [
        f"scheduler step, {record['running']} decodes: {steps['with_all_us']} us, {without_any} ({percents})",
        f"step there and answer back: {trips} (CURVE adds {links['curve_us']} us to TCP)",
    ]
    for step_us, chain in chains.items():
        figures = ", ".join(
            f"{name} {chain[f'{way}_tokens_per_s']} tokens/s at {chain[f'{way}_cpu_us_per_token']} us of CPU each"
            for way, name in ((GUARDED, "TCP with all"), (BARE_TCP, "TCP without any"), (IPC, "IPC with all"))
        )
        changes = f"{chain['change_percent']:+} % tokens/s, {chain['cpu_percent']:+} % CPU"
        lines.append(
            f"chain, {record['streams']} streams, steps of {step_us} us: {figures} ({changes} over TCP without)"
        )
    return "\n".join(lines)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="hwover") as name:
        directory = Path(name)
        make_keys(directory / "keys")
        steps = measure_steps(arguments.running, arguments.steps, arguments.rounds, arguments.seed)
        links = measure_links(directory, arguments.running, arguments.round_trips, arguments.rounds)
        chains = {
            f"{step_us:g}": measure_chain(directory, arguments.streams, arguments.tokens, step_us, arguments.rounds)
            for step_us in arguments.step_us
        }
    for part in PARTS:
        steps[f"{part}_percent"] = percent(steps["with_all_us"], steps[f"without_{part}_us"])
    steps["all_percent"] = percent(steps["with_all_us"], steps["without_any_us"])
    links["curve_us"] = round(links["tcp+curve_us"] - links["tcp_us"], 1)
    for chain in chains.values():
        for name, figure in (("change_percent", "tokens_per_s"), ("cpu_percent", "cpu_us_per_token")):
            chain[name] = percent(chain[f"{GUARDED}_{figure}"], chain[f"{BARE_TCP}_{figure}"])
    return {
        **provenance(arguments.seed), "running": arguments.running, "streams": arguments.streams,
        "step": steps, "link": links, "chain": chains,
    }  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == [ECHO]:
        _, _, address, keys, answer_bytes = sys.argv
        echo(address, keys, int(answer_bytes))
        return
    if sys.argv[1:2] == [BARE]:
        with without(*PARTS):
            sys.exit(headway_main(sys.argv[2:]))
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--running", type=count, default=256, help="requests that decode")
    parser.add_argument("--steps", type=count, default=1000, help="steps per round")
    parser.add_argument("--round-trips", type=count, default=3000, help="steps over a link per round")
    parser.add_argument("--streams", type=count, default=64, help="streams through the chain")
    parser.add_argument("--tokens", type=count, default=400, help="tokens of each")
    parser.add_argument("--step-us", type=float, nargs="*", default=[0.0, 5000.0], help="step times for the chain")
    parser.add_argument("--rounds", type=count, default=3)
    arguments = parser.parse_args()
    record = measure(arguments)
    print(report(record))
    write_result(arguments.json, record)


if __name__ == "__main__":
    main()
