"""One load against one server, from options to figures."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from headway.terminal.progress import ProgressLine
from headway_lab.bench.cooperation import run_load
from headway_lab.bench.figures import BenchedRequest, BenchFigures, BenchTotals
from headway_lab.bench.options import BenchOptions
from headway_lab.bench.target import Target, TargetInfo
from headway_lab.bench.targets import make_target
from headway_lab.workload.load import Load, make_load


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a load."""

    info: TargetInfo
    load: Load
    totals: BenchTotals
    requests: list[BenchedRequest]


@asynccontextmanager
async def opened(options: BenchOptions) -> AsyncIterator[tuple[Target, TargetInfo]]:
    """Connect to the server.

    Raises:
        TargetError: it does not answer.
        ConfigurationError: a file is unusable.
    """
    target = make_target(options)
    info = await target.open()
    try:
        yield target, info
    finally:
        await target.close()


async def send_load(options: BenchOptions, target: Target, info: TargetInfo, what: str = "requests") -> BenchResult:
    """Send the load to an open server.

    Raises:
        TargetError: a client process failed.
        ConfigurationError: the load does not fit the model.
    """
    load = make_load(options, info.context_length)
    progress = ProgressLine(sys.stderr)
    try:
        result = await run_load(
            options,
            load,
            target,
            info.context_length,
            lambda num_ended: progress.show(num_ended, len(load.requests), what),
        )
    finally:
        progress.erase()
    figures = BenchFigures(load, result, options.processes)
    return BenchResult(info=info, load=load, totals=figures.totals(), requests=figures.requests())


async def bench(options: BenchOptions, what: str = "requests") -> BenchResult:
    """Connect, send and measure."""
    async with opened(options) as (target, info):
        return await send_load(options, target, info, what)
