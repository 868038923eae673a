"""One load from several client processes, and their merged results."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Sequence

import msgspec

from headway_lab.bench.options import BenchOptions
from headway_lab.bench.pipe_messages import (
    LENGTH_BYTES,
    Begin,
    Done,
    FromClient,
    Job,
    Progress,
    Ready,
    Refused,
    body_bytes,
    frame,
    from_client,
)
from headway_lab.bench.records import RequestRecord
from headway_lab.bench.share import ShareResult, go_on_after_cancellation, run_share
from headway_lab.bench.target import Target, TargetError
from headway_lab.workload.load import Load

_HEAD_START_S = 0.2

OnProgress = Callable[[int], None]
"""A callback for the number of ended requests."""


async def run_load(
    options: BenchOptions, load: Load, target: Target, context_length: int, on_progress: OnProgress
) -> ShareResult:
    """Send the load; return records by number. A cancellation ends the load, and what was measured is returned.

    Raises:
        TargetError: a client process failed.
    """
    if options.processes > 1:
        results = await _run_processes(options, context_length, on_progress)
    else:
        results = [await _run_here(options, load, target, on_progress)]
    return ShareResult(
        records=sorted((record for result in results for record in result.records), key=lambda record: record.number),
        lags_s=[lag for result in results for lag in result.lags_s],
        cpu_s=max(result.cpu_s for result in results),
        wall_s=max(result.wall_s for result in results),
        is_whole=all(result.is_whole for result in results),
    )


async def _run_here(options: BenchOptions, load: Load, target: Target, on_progress: OnProgress) -> ShareResult:
    num_ended = 0

    def request_ended(record: RequestRecord) -> None:
        nonlocal num_ended
        del record
        num_ended += 1
        on_progress(num_ended)

    start = asyncio.get_running_loop().time() + _HEAD_START_S
    return await run_share(target, load, start=start, timeout_s=options.timeout_s, on_end=request_ended)


async def _run_processes(options: BenchOptions, context_length: int, on_progress: OnProgress) -> Sequence[ShareResult]:
    counts = [0] * options.processes

    def ended(index: int, num_ended: int) -> None:
        counts[index] = num_ended
        on_progress(sum(counts))

    clients = [await _ClientProcess.start(index) for index in range(options.processes)]
    try:
        for index, client in enumerate(clients):
            client.send(Job(options=options, context_length=context_length, index=index))
        await asyncio.gather(*(client.until_ready() for client in clients))
        at_s = asyncio.get_running_loop().time() + _HEAD_START_S
        for client in clients:
            client.send(Begin(at_s=at_s))
        results = asyncio.gather(*(client.result(ended) for client in clients))
        try:
            return await asyncio.shield(results)
        except asyncio.CancelledError:
            go_on_after_cancellation()
            for client in clients:
                client.interrupt()
            return await results
    finally:
        await asyncio.gather(*(client.end() for client in clients))


class _ClientProcess:
    """A client process."""

    def __init__(self, index: int, process: asyncio.subprocess.Process) -> None:
        self._index = index
        self._process = process

    @classmethod
    async def start(cls, index: int) -> "_ClientProcess":
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "headway_lab.bench.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the parent: it asks for what was measured
        )
        return cls(index, process)

    def send(self, message: Job | Begin) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(frame(message))

    async def until_ready(self) -> None:
        message = await self._next()
        if isinstance(message, Refused):
            raise TargetError(message.message)
        assert isinstance(message, Ready)

    async def result(self, ended: Callable[[int, int], None]) -> ShareResult:
        while True:
            match await self._next():
                case Progress(num_ended=num_ended):
                    ended(self._index, num_ended)
                case Done(result=result):
                    return result

    def interrupt(self) -> None:
        """End the share early."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def _next(self) -> FromClient:
        assert self._process.stdout is not None
        try:
            length = await self._process.stdout.readexactly(LENGTH_BYTES)
            return from_client(await self._process.stdout.readexactly(body_bytes(length)))
        except (asyncio.IncompleteReadError, msgspec.DecodeError):
            raise TargetError(f"client process {self._index + 1} of the bench ended before its share") from None
