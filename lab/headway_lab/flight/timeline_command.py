"""``headway timeline``: a picture of the rows in each step, and a trace."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from headway.flags.settings import ConfigurationError
from headway_lab.flight.cells import StepCollector, StepRange, TimelineStep
from headway_lab.flight.named_log import add_log_flags, log_on_disk
from headway_lab.flight.perfetto import chrome_trace
from headway_lab.flight.source import Flight
from headway_lab.output_files import check_output_files, check_pictures, write_output
from headway_proto.wording import shown
from headway_scheduler.flight.replay import Divergence

NOTHING_EXIT_CODE = 1
DEFAULT_STEPS = 80
_ALL_STEPS = StepRange(0, 1 << 62)
_MARGIN_STEPS = 4


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    add_log_flags(parser)
    parser.add_argument("--png", metavar="FILE", default="", help="draw rows against steps; needs the extra bench")
    parser.add_argument("--perfetto", metavar="FILE", default="", help="write a Chrome trace, for ui.perfetto.dev")
    parser.add_argument(
        "--steps",
        metavar="FIRST:END",
        default="",
        help=f"these steps, counted from 0 over the recording (default: the first {DEFAULT_STEPS} in a picture, all in a trace)",
    )
    parser.add_argument("--request", metavar="REQUEST", default="", help="the steps of this request's life")


def run(arguments: argparse.Namespace) -> int:
    """See ``Command``."""
    _check(arguments)
    try:
        with log_on_disk(arguments) as path:
            return _run(arguments, path)
    except Divergence as found:
        sys.stderr.write(f"headway timeline: the replay differs from the recording: {found}\n")
        return NOTHING_EXIT_CODE


def _check(arguments: argparse.Namespace) -> None:
    if not arguments.png and not arguments.perfetto:
        raise ConfigurationError("--png or --perfetto is required; allowed: a file each")
    check_pictures("--png", arguments.png)
    check_output_files({"--png": arguments.png, "--perfetto": arguments.perfetto})


def _run(arguments: argparse.Namespace, path: str) -> int:
    wanted = StepRange.parse(arguments.steps) if arguments.steps else _ALL_STEPS
    if arguments.request:
        wanted = _steps_of(path, arguments.request)
    flight = Flight(path)
    collector = StepCollector(wanted)
    for event in flight.events("timeline"):
        collector.record(event, flight.replay)
    flight.report_notice()
    steps = collector.steps
    if not steps:
        sys.stderr.write(f"headway timeline: no such steps; the recording has {collector.num_steps}\n")
        return NOTHING_EXIT_CODE
    if arguments.perfetto:
        trace = chrome_trace(steps, flight.first_s, max(core.max_in_flight for core in flight.replay.cores.values()))
        _write("--perfetto", arguments.perfetto, lambda path: path.write_bytes(trace), len(steps))
    if arguments.png:
        from headway_lab.flight.picture import draw

        drawn = steps if wanted is not _ALL_STEPS else steps[:DEFAULT_STEPS]
        title = _title(flight, drawn, collector.num_steps)
        _write("--png", arguments.png, lambda path: draw(path, title, drawn), len(drawn))
    return 0


def _steps_of(path: str, request_id: str) -> StepRange:
    flight = Flight(path)
    collector = StepCollector(_ALL_STEPS)
    for event in flight.events(request_id):
        collector.record(event, flight.replay)
    numbers = [step.number for step in collector.steps if any(cell.request_id == request_id for cell in step.cells)]
    if not numbers:
        raise ConfigurationError(f"--request: {shown(request_id)} is not allowed; allowed: a request that ran")
    return StepRange(max(0, numbers[0] - _MARGIN_STEPS), numbers[-1] + _MARGIN_STEPS + 1)


def _title(flight: Flight, steps: list[TimelineStep], num_steps: int) -> str:
    limits = flight.replay.limits
    last = steps[-1].number
    return (
        f"steps {steps[0].number} to {last} of {num_steps}: {limits.order}, {limits.batching}, "
        f"{limits.max_num_batched_tokens} tokens and {limits.max_num_seqs} requests at most"
    )


def _write(flag: str, path: str, write: Callable[[Path], object], num_steps: int) -> None:
    write_output(flag, path, write)
    sys.stdout.write(f"{path}: {num_steps} steps\n")
