"""A client process, with messages on stdin and stdout."""

import asyncio
import sys
import time
from typing import BinaryIO

from headway.flags.settings import ConfigurationError
from headway_lab.bench.pipe_messages import (
    Begin,
    Done,
    FromClient,
    Job,
    Progress,
    Ready,
    Refused,
    frame,
    read_to_client,
)
from headway_lab.bench.records import RequestRecord
from headway_lab.bench.share import run_share
from headway_lab.bench.target import Target, TargetError
from headway_lab.bench.targets import make_target
from headway_lab.workload.load import Load, make_load

INTERRUPTED_EXIT_CODE = 130
_PROGRESS_S = 0.2


def main() -> int:
    """Do one job; return the exit code."""
    try:
        asyncio.run(_work(sys.stdin.buffer, sys.stdout.buffer))
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    except (EOFError, BrokenPipeError):  # the parent has ended
        return 1
    return 0


async def _work(inbox: BinaryIO, outbox: BinaryIO) -> None:
    job = read_to_client(inbox)
    assert isinstance(job, Job)
    options = job.options
    try:
        load = make_load(options, job.context_length).share(job.index, options.processes)
        target = make_target(options)
        await target.open()
    except (ConfigurationError, TargetError) as error:
        _tell(outbox, Refused(message=str(error)))
        return
    try:
        await _run(target, load, options.timeout_s, inbox, outbox)
    finally:
        await target.close()


async def _run(target: Target, load: Load, timeout_s: float, inbox: BinaryIO, outbox: BinaryIO) -> None:
    _tell(outbox, Ready())
    begin = await asyncio.to_thread(read_to_client, inbox)
    assert isinstance(begin, Begin)
    # The event loop's clock is the machine's monotonic one, the same in all processes.
    result = await run_share(
        target, load, start=begin.at_s, timeout_s=timeout_s, on_end=_ProgressReporter(outbox).request_ended
    )
    _tell(outbox, Done(result=result))


class _ProgressReporter:
    def __init__(self, outbox: BinaryIO) -> None:
        self._outbox = outbox
        self._num_ended = 0
        self._next_s = 0.0

    def request_ended(self, record: RequestRecord) -> None:
        del record
        self._num_ended += 1
        if (now := time.monotonic()) >= self._next_s:
            self._next_s = now + _PROGRESS_S
            _tell(self._outbox, Progress(num_ended=self._num_ended))


def _tell(outbox: BinaryIO, message: FromClient) -> None:
    outbox.write(frame(message))
    outbox.flush()


if __name__ == "__main__":
    sys.exit(main())
