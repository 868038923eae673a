"""Real processes to break: start, harm, watch and stop them, and check every token that comes through.

Owns: scheduler, executors and gateways as processes of the operating system; streams driven through them, each compared
with what an undisturbed run gives; and what must be left when all is over, which is nothing.
Must not know: which harm a test does, or what the table of promises says about it.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

import headway
from e2e.running_server import free_port
from headway.client import AsyncClient, HeadwayError, UnavailableError
from headway_executor.simulated.token_hash import TokenHash
from headway_proto.sampling import SamplingParams

DEMO_MODEL = Path(headway.__file__).with_name("demo_model")
EXECUTOR_WITH = Path(__file__).with_name("executor_with.py")
READY_LINES = {"scheduler": "scheduler ready", "executor": "executor ready", "gateway": "listening"}
ALL = ("scheduler", "executor", "gateway")
MIB = 1 << 20
_POLL_S = 0.005


def environment(**extra: str) -> dict[str, str]:
    """The environment of the tests without settings of whoever runs them."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    return {**kept, **extra}


class Process:
    """One process; its lines on stderr with the time at which each was read."""

    def __init__(
        self, words: Sequence[str], *, stderr: int | None = None, extra_environment: dict[str, str] | None = None
    ) -> None:
        self.lines: list[tuple[float, str]] = []
        self._popen = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE if stderr is None else stderr,
            text=True,
            env=environment(**(extra_environment or {})),
        )
        self.pid = self._popen.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        if stderr is None:
            self._reader.start()

    def _read(self) -> None:
        stream = self._popen.stderr
        assert stream is not None
        with stream:
            for line in stream:
                self.lines.append((time.monotonic(), line.rstrip("\n")))

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    def signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def kill(self) -> None:
        self._popen.kill()
        self.wait(10)

    def wait(self, timeout_s: float) -> int:
        code = self._popen.wait(timeout_s)
        if self._reader.ident is not None:
            self._reader.join(5)
        return code

    def said(self, text: str) -> float | None:
        """When a line with this text was read first."""
        return next((when for when, line in list(self.lines) if text in line), None)

    def figures(self, text: str) -> dict[str, int]:
        """The ``name=number`` pairs of the last line with this text."""
        lines = [line for _, line in self.lines if text in line]
        return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)\b", lines[-1])} if lines else {}

    def rss_mib(self) -> float:
        return psutil.Process(self.pid).memory_info().rss / MIB

    def num_files(self) -> int:
        """Open files, sockets among them."""
        return psutil.Process(self.pid).num_fds()


class Deployment:
    """Processes of one served model, by name: ``executor`` or ``executor-2`` is of the kind before the dash.

    ``flags`` are by kind. ``addresses`` are what each kind is given; a proxy goes between by giving them apart.
    """

    def __init__(self, directory: Path, flags: dict[str, Sequence[str]]) -> None:
        self.directory = directory
        step, ingress = f"ipc://{directory}/step", f"ipc://{directory}/ingress"
        self.addresses: dict[str, list[str]] = {
            "scheduler": ["--step-address", step, "--ingress-address", ingress],
            "executor": ["--step-address", step],
            "gateway": ["--ingress-address", ingress],
        }
        self.flags = {
            "scheduler": list(flags.get("scheduler", ())),
            "executor": ["--model", str(DEMO_MODEL), *flags.get("executor", ("--backend", "simulated"))],
            "gateway": ["--model", str(DEMO_MODEL), *flags.get("gateway", ())],
        }
        self.processes: dict[str, Process] = {}
        self.grpc_addresses: dict[str, str] = {}
        self.prefixes: dict[str, Sequence[str]] = {}
        self.faulty_backend: str | None = None

    def start(
        self, name: str, *, stderr: int | None = None, extra_environment: dict[str, str] | None = None
    ) -> Process:
        kind = name.partition("-")[0]
        words = [*self._command(kind), *self.addresses[kind], *self.flags[kind]]
        if kind == "gateway":
            address = self.grpc_addresses.setdefault(name, f"127.0.0.1:{free_port()}")
            words += ["--grpc-address", address]
        process = Process([*self.prefixes.get(kind, ()), *words], stderr=stderr, extra_environment=extra_environment)
        self.processes[name] = process
        return process

    def _command(self, kind: str) -> list[str]:
        if kind == "executor" and self.faulty_backend is not None:
            return [sys.executable, str(EXECUTOR_WITH), self.faulty_backend]
        return [sys.executable, "-m", "headway", kind]

    def kill(self, name: str) -> None:
        self.processes[name].kill()

    def signal(self, name: str, number: int) -> None:
        self.processes[name].signal(number)

    async def ready(self, name: str, timeout_s: float = 30.0) -> float:
        """When the process said that it is."""
        text = READY_LINES[name.partition("-")[0]]
        process = self.processes[name]
        await until(lambda: process.said(text) is not None or not process.is_running, timeout_s, f"{name} to be ready")
        said_at = process.said(text)
        assert said_at is not None, process.lines
        return said_at

    async def serve(self, start: Sequence[str] = ALL, **options) -> AsyncClient:
        """Start them and wait until they serve; a client of the first gateway."""
        for name in start:
            self.start(name, **options)
        client = self.client()
        serving = asyncio.create_task(client.wait_ready(60))
        await until(lambda: serving.done() or not all(self.processes[name].is_running for name in start), 60, "service")
        if not serving.done():
            serving.cancel()
            await client.close()
        assert serving.done(), "a process ended instead of serving"
        await serving
        return client

    def client(self, name: str = "gateway") -> AsyncClient:
        return AsyncClient(self.grpc_addresses[name])

    def stop(self) -> dict[str, int]:
        """End everything as an operator would; the exit codes of what had not been killed."""
        codes: dict[str, int] = {}
        for kind in ("gateway", "executor", "scheduler"):
            for name, process in self.processes.items():
                if name.partition("-")[0] == kind and process.is_running:
                    process.signal(signal.SIGCONT)
                    process.signal(signal.SIGTERM)
                    codes[name] = process.wait(20)
        return codes

    def kill_all(self) -> None:
        for process in self.processes.values():
            if process.is_running:
                process.kill()


@contextlib.asynccontextmanager
async def deployment(**flags: Sequence[str]) -> AsyncIterator[Deployment]:
    """A deployment of which nothing runs yet; nothing of it is left afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="hwchaos"))
    memory_before = shared_memory()
    made = Deployment(directory, flags)
    try:
        yield made
        made.stop()
        assert_nothing_left(made, memory_before)
    finally:
        made.kill_all()
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.asynccontextmanager
async def deployed(
    *,
    start: Sequence[str] = ALL,
    faulty_backend: str | None = None,
    extra_environment: dict[str, str] | None = None,
    stderr: int | None = None,
    addresses: dict[str, list[str]] | None = None,
    **flags: Sequence[str],
) -> AsyncIterator[tuple[Deployment, AsyncClient]]:
    """A deployment that serves. Afterwards every promise about what is left is checked."""
    async with deployment(**flags) as running:
        running.faulty_backend = faulty_backend
        running.addresses = addresses or running.addresses
        async with await running.serve(start, stderr=stderr, extra_environment=extra_environment) as client:
            yield running, client
            await until_quiet(client)
        assert set(running.stop().values()) <= {0}


async def until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        await asyncio.sleep(_POLL_S)


async def until_quiet(client: AsyncClient, timeout_s: float = 10.0) -> float:
    """Wait until nothing is left in the scheduler; the seconds that took."""
    started = time.monotonic()
    while True:
        with contextlib.suppress(HeadwayError):
            status = await client.status()
            left = (status.num_running, status.num_waiting, status.num_total_blocks - status.num_free_blocks)
            if status.num_total_blocks and left == (0, 0, 0):
                return time.monotonic() - started
        assert time.monotonic() - started < timeout_s, f"running, waiting, blocks taken: {left}"
        await asyncio.sleep(_POLL_S)


async def until_running(client: AsyncClient, most: int, timeout_s: float = 10.0) -> int:
    """Wait until at most so many run or wait; the step at which that was seen."""
    deadline = time.monotonic() + timeout_s
    while True:
        status = await client.status()
        if status.num_running + status.num_waiting <= most:
            return status.num_steps
        assert time.monotonic() < deadline, f"{status.num_running} run and {status.num_waiting} wait"
        await asyncio.sleep(_POLL_S)


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def assert_nothing_left(deployment: Deployment, memory_before: set[str]) -> None:
    """No process, no listening port, no socket file, no shared memory."""
    pids = {process.pid for process in deployment.processes.values()}
    alive = [name for name, process in deployment.processes.items() if process.is_running]
    orphans = [child for child in psutil.Process().children(recursive=True) if child.pid in pids]
    sockets = [path.name for path in deployment.directory.iterdir() if path.is_socket()]
    # Others on this machine make shared memory of their own meanwhile: only what carries one of these pids is ours.
    shared = [name for name in shared_memory() - memory_before if any(str(pid) in name for pid in pids)]
    assert (alive, orphans, sockets, shared) == ([], [], [], [])
    for address in deployment.grpc_addresses.values():
        host, _, port = address.rpartition(":")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if host == "127.0.0.1":
                probe.bind((host, int(port)))


class Oracle:
    """What the simulated backend says to a prompt if nothing goes wrong."""

    def __init__(self, seed: int = 0) -> None:
        config = json.loads((DEMO_MODEL / "config.json").read_text())
        eos = config["eos_token_id"]
        self._hash = TokenHash(
            vocab_size=config["vocab_size"],
            eos_token_ids=tuple(sorted(eos if isinstance(eos, list) else [eos])),
            eos_probability=0.0,
            model_seed=seed,
        )
        self.vocab_size = config["vocab_size"]

    def expected(self, prompt: list[int], num_tokens: int, seed: int) -> list[int]:
        return self._hash.continuation(prompt, num_tokens, SamplingParams(temperature=1.0, seed=seed))


@dataclass
class Stream:
    """One generation: what was asked, and what came when."""

    prompt: list[int]
    max_tokens: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    opened_at: float = field(default_factory=time.monotonic)
    finish_reason: str | None = None
    preemptions: int = 0

    async def follow(self, client: AsyncClient, **options) -> "Stream":
        """Read to the end; every token must be the next one."""
        self.opened_at = time.monotonic()
        stream = client.generate(
            self.prompt, max_tokens=self.max_tokens, seed=self.seed, temperature=1.0, ignore_eos=True, **options
        )
        async for delta in stream:
            assert delta.first_token_index == len(self.tokens), "a gap or a repetition"
            self.tokens += delta.token_ids
            self.times.append(time.monotonic())
        completion = (await stream.result()).completions[0]
        self.finish_reason = completion.finish_reason
        self.preemptions = completion.timings.preemptions if completion.timings else 0
        return self

    def first_after(self, moment: float) -> float | None:
        return next((when for when in self.times if when > moment), None)

    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def jobs(count: int, rng: random.Random, *, prompt=(8, 120), output=(40, 120), vocab_size: int = 400) -> list[Stream]:
    """Requests of mixed sizes."""
    return [
        Stream(
            prompt=[rng.randrange(3, vocab_size) for _ in range(rng.randint(*prompt))],
            max_tokens=rng.randint(*output),
            seed=rng.randrange(1 << 32),
        )
        for _ in range(count)
    ]


def assert_equal_to_undisturbed(streams: Iterable[Stream], oracle: Oracle) -> int:
    """Every token of each is what it would have been; the number of tokens."""
    total = 0
    for stream in streams:
        expected = oracle.expected(stream.prompt, stream.max_tokens, stream.seed)
        same = sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(stream.tokens, expected, strict=False))
        )
        assert stream.tokens == expected, f"{same} of {len(expected)} tokens are right, {stream}"
        assert stream.finish_reason == "length"
        total += len(stream.tokens)
    return total


class Traffic:
    """Keeps as many streams open as asked: one that ends is followed by another. For ``async with``."""

    def __init__(self, client: AsyncClient, num_streams: int, rng: random.Random, **sizes) -> None:
        self._client = client
        self._num_streams = num_streams
        self._rng = rng
        self._sizes = sizes
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self.live: dict[int, Stream] = {}
        self.ended: list[Stream] = []
        self.num_refused = 0

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._keep(number)) for number in range(self._num_streams)]
        await self.flowing()
        return self

    async def __aexit__(self, kind, error, trace) -> None:
        self._stopping = True
        if error is not None:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            return
        await asyncio.gather(*self._tasks)

    async def _keep(self, number: int) -> None:
        while not self._stopping:
            (stream,) = jobs(1, self._rng, **self._sizes)
            self.live[number] = stream
            try:
                await stream.follow(self._client)
            except UnavailableError:
                # Not accepted while a process was away for longer than a gateway waits: to be asked again.
                if stream.tokens:
                    raise
                self.num_refused += 1
                await asyncio.sleep(0.1)
                continue
            self.ended.append(stream)

    def _check(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def flowing(self, timeout_s: float = 30.0) -> None:
        """Wait until every stream has had a token."""
        await self.recovered(time.monotonic(), timeout_s)

    async def recovered(self, since: float, timeout_s: float = 30.0) -> float:
        """Wait until every stream that is open has had a token after ``since``; the longest delay in seconds."""
        watched = list(self.live.values()) or await self._first_streams()
        waiting = [stream for stream in watched if stream.finish_reason is None]
        worst = 0.0
        deadline = time.monotonic() + timeout_s
        while waiting:
            self._check()
            waiting = [one for one in waiting if one.times or any(one is live for live in self.live.values())]
            for stream in waiting:
                came = stream.first_after(since)
                if came is not None:
                    worst = max(worst, came - since)
            waiting = [one for one in waiting if one.first_after(since) is None and one.finish_reason is None]
            assert time.monotonic() < deadline, f"{len(waiting)} streams had no token for {timeout_s:g} s"
            await asyncio.sleep(_POLL_S)
        return worst

    async def _first_streams(self) -> list[Stream]:
        await until(lambda: len(self.live) == self._num_streams, 10, "streams to open")
        return list(self.live.values())

    def assert_exact(self, oracle: Oracle) -> str:
        """Compare all that ended; say how much that was."""
        num_tokens = assert_equal_to_undisturbed(self.ended, oracle)
        refused = f", {self.num_refused} new ones refused meanwhile (UNAVAILABLE)" if self.num_refused else ""
        return f"{len(self.ended)} streams, {num_tokens} tokens, 0 lost, 0 duplicated{refused}"


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


async def timed(work: Awaitable[object]) -> float:
    """Seconds that it takes."""
    started = time.monotonic()
    await work
    return time.monotonic() - started
