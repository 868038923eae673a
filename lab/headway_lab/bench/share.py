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
    """A share's records, the event loop's ``lags_s``, and the busiest process's time."""

    records: list[RequestRecord]
    lags_s: list[float]
    cpu_s: float
    wall_s: float


async def run_share(
    target: Target, load: Load, *, start: float, timeout_s: float, on_end: Callable[[RequestRecord], None]
) -> ShareResult:
    """Run from ``start`` (event loop's clock)."""
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
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        return ShareResult(
            records=records,
            lags_s=meter.lags_s,
            cpu_s=time.process_time() - cpu_before,
            wall_s=clock() - started,
        )


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
