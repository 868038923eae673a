"""One client process's share of a load."""

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator

import msgspec

from headway_lab.bench.lag import LagMeter
from headway_lab.bench.records import RequestRecord
from headway_lab.bench.runner import Runner
from headway_lab.bench.target import Target
from headway_lab.workload.load import Load

# Collecting garbage stops the process for a time that grows with its objects, and answers in flight are many.
_GC_THRESHOLD = 200_000


class ShareResult(msgspec.Struct, frozen=True, kw_only=True):
    """A share's records, the event loop's ``lags_s``, and the busiest process's time.

    ``is_whole`` is False after Ctrl-C: then requests that had not ended are missing.
    """

    records: list[RequestRecord]
    lags_s: list[float]
    cpu_s: float
    wall_s: float
    is_whole: bool = True


async def run_share(
    target: Target, load: Load, *, start: float, timeout_s: float, on_end: Callable[[RequestRecord], None]
) -> ShareResult:
    """Run from ``start`` (event loop's clock). A cancellation ends the share, and what was measured is returned."""
    is_whole = True
    records: list[RequestRecord] = []

    def take(record: RequestRecord) -> None:
        records.append(record)
        on_end(record)

    meter = LagMeter()
    clock = asyncio.get_running_loop().time
    with _little_garbage_collection():
        started, cpu_before = clock(), time.process_time()
        watching = asyncio.create_task(meter.watch())
        try:
            await Runner(target, load.arrivals(), timeout_s=timeout_s, on_end=take).run(start)
        except asyncio.CancelledError:
            go_on_after_cancellation()
            is_whole = False
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        return ShareResult(
            records=records,
            lags_s=meter.lags_s,
            cpu_s=time.process_time() - cpu_before,
            wall_s=clock() - started,
            is_whole=is_whole,
        )


def go_on_after_cancellation() -> None:
    """Let this task await again, as if it had not been cancelled."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


@contextlib.contextmanager
def _little_garbage_collection() -> Iterator[None]:
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
