"""``headway replay``: run a recording again and compare every decision."""

import argparse
import importlib.metadata
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headway.flags.settings import ConfigurationError
from headway_lab.flight.named_log import add_log_flags, log_on_disk
from headway_lab.flight.policies import compared, comparison_text, policy_cases
from headway_lab.flight.recording import Recording
from headway_lab.flight.source import Flight
from headway_lab.simulate.cases import Case
from headway_lab.simulate.report import CaseResult, as_json
from headway_proto.wording import shown
from headway_scheduler.core.view import SchedulerView
from headway_scheduler.figures.fleet_view import sum_of
from headway_scheduler.flight.replay import Divergence

DIVERGED_EXIT_CODE = 1


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result; ``difference`` is empty for equal decisions."""

    num_records: int
    num_steps: int
    num_requests: int
    recorded_s: float
    replayed_in_s: float
    difference: str = ""

    @property
    def speed(self) -> float:
        """Recorded seconds per second of the replay."""
        return self.recorded_s / self.replayed_in_s if self.replayed_in_s else float("inf")

    @property
    def line(self) -> str:
        """The result in one line."""
        verdict = f"DIFFERENT: {self.difference}" if self.difference else "byte-identical"
        return (
            f"{self.num_records:,} events, {self.num_steps:,} steps, {self.num_requests:,} requests of "
            f"{self.recorded_s:.1f} s replayed in {self.replayed_in_s:.1f} s, {self.speed:.0f} x real time: {verdict}"
        )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    add_log_flags(parser)
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="FIELD=VALUE,...",
        help="simulate the same arrivals with these limits of the scheduler too, as order=fair,batching=orca; may be "
        "repeated",
    )
    parser.add_argument("--json", metavar="FILE", default="", help="write the result to this file as well")


def run(arguments: argparse.Namespace) -> int:
    """See ``Command``."""
    with log_on_disk(arguments) as path:
        return _run(Flight(path), arguments)


def _run(flight: Flight, arguments: argparse.Namespace) -> int:
    cases = policy_cases(flight.replay.limits, arguments.policy) if arguments.policy else ()
    recording = Recording() if cases else None
    result = replayed(flight, recording)
    flight.report_notice()
    sys.stdout.write(f"{result.line}\n")
    if result.difference:
        _tell_versions(flight)
        return DIVERGED_EXIT_CODE
    results = _compare(flight, recording, cases) if recording is not None else []
    if arguments.json:
        _write_json(arguments.json, flight, result, results)
    return 0


def _compare(flight: Flight, recording: Recording, cases: Sequence[Case]) -> list[CaseResult]:
    counters = sum_of(SchedulerView(core).counters for core in flight.replay.cores.values())
    results = compared(recording, counters, cases)
    sys.stdout.write(f"\n{comparison_text(recording, results)}")
    return results


def _write_json(path: str, flight: Flight, result: ReplayResult, results: Sequence[CaseResult]) -> None:
    described = {"replay": msgspec.structs.asdict(result), "limits": flight.replay.limits}
    try:
        Path(path).write_bytes(as_json(described, results, None, {}))
    except OSError as error:
        raise ConfigurationError(f"--json: cannot write {shown(path)}: {error.strerror}") from None


def replayed(flight: Flight, recording: Recording | None = None) -> ReplayResult:
    """Replay a flight to its first different decision."""
    started, difference = time.perf_counter(), ""
    try:
        for event in flight.events("replay"):
            if recording is not None:
                recording.record(event, flight.replay)
    except Divergence as found:
        difference = str(found)
    replay = flight.replay
    return ReplayResult(
        num_records=replay.num_records,
        num_steps=replay.num_steps,
        num_requests=replay.num_arrivals,
        recorded_s=flight.duration_s,
        replayed_in_s=time.perf_counter() - started,
        difference=difference,
    )


def _tell_versions(flight: Flight) -> None:
    recorded, here = flight.log.header.headway_version, importlib.metadata.version("headway")
    if recorded != here:
        sys.stderr.write(f"note: recorded by headway {recorded}, replayed by {here}, which may decide otherwise\n")
