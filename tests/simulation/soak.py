"""Run new fault schedules until told to stop: ``python -m simulation.soak --minutes N``, or ``make soak``.

Owns: the loop over seeds, its progress, and what is told of a failure.
Must not know: what is in a schedule, or what an invariant means.
"""

import argparse
import gc
import os
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

import msgspec

from simulation.fault_schedule import Schedule, draw, from_json
from simulation.fault_shrink import shrink, told
from simulation.fault_world import run

KEPT_SEEDS = Path(__file__).with_name("kept_seeds.txt")
PROGRESS_EVERY_S = 10.0
SEED_BITS = 48


class Totals(msgspec.Struct):
    """What a soak has come to."""

    num_schedules: int = 0
    num_steps: int = 0
    num_faults: int = 0
    num_failures: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def line(self) -> str:
        """``per core`` counts the time that this process had, which on a shared machine is less than what went by."""
        per_minute = self.num_schedules / max(self.seconds, 1e-9) * 60
        per_core = self.num_schedules / max(self.cpu_seconds, 1e-9) * 60
        return (
            f"{self.seconds:8.0f} s  {self.num_schedules} schedules  {per_minute:.0f}/min ({per_core:.0f} per core)  "
            f"{self.num_steps} steps  {self.num_faults} faults  {self.num_failures} failures"
        )


def new_seeds(first: int | None = None) -> Iterator[int]:
    """Seeds that nobody has run, in order from ``first`` or from a place drawn from the system's entropy."""
    start = int.from_bytes(os.urandom(SEED_BITS // 8), "big") if first is None else first
    return count(start)


def kept_schedules() -> list[tuple[str, Schedule]]:
    """What ``kept_seeds.txt`` holds, each with the comment before it: a seed, or a whole schedule as JSON, per line."""
    kept, comment = [], ""
    for line in KEPT_SEEDS.read_text().splitlines():
        if line.startswith("#"):
            comment = line.lstrip("# ")
        elif line.strip():
            kept.append((comment, from_json(line) if line.startswith("{") else draw(int(line))))
    return kept


def report_of(schedule: Schedule, shrink_within_s: float = 20.0) -> str | None:
    """None if every invariant holds; else what failed, the least that makes it fail, and the line to keep."""
    violation = run(schedule).violation
    if violation is None:
        return None

    def fails(candidate: Schedule) -> bool:
        found = run(candidate).violation
        return found is not None and found.invariant == violation.invariant

    smallest = shrink(schedule, fails, shrink_within_s)
    return (
        f"seed {schedule.seed} fails: {violation}\nenough for it:\n{told(smallest)}\n"
        f"to keep it, add to {KEPT_SEEDS.name}:\n# {violation.invariant}: what was wrong\n{smallest.to_json()}\n"
    )


def soak(
    seeds: Iterable[int], seconds: float, say: bool = True, num_executors: int | None = None
) -> tuple[Totals, list[str]]:
    """Run ``seeds`` for so long; what was done, and a report of each failure. ``num_executors``: None if it is drawn."""
    totals, reports = Totals(), []
    gc.freeze()  # what is imported stays: looking through it again and again costs a schedule in thirty
    start, cpu_start = time.monotonic(), time.process_time()
    told_at = start
    for seed in seeds:
        world = run(draw(seed, num_executors))
        totals.num_schedules += 1
        totals.num_steps += world.num_steps
        totals.num_faults += world.num_faults
        if world.violation is not None:
            totals.num_failures += 1
            reports.append(
                report_of(draw(seed, num_executors)) or f"seed {seed} failed once and not again: {world.violation}\n"
            )
            _say(reports[-1], say)
        totals.seconds, totals.cpu_seconds = time.monotonic() - start, time.process_time() - cpu_start
        if time.monotonic() - told_at >= PROGRESS_EVERY_S:
            told_at = time.monotonic()
            _say(totals.line() + "\n", say)
        if totals.seconds >= seconds:
            break
    return totals, reports


def _say(text: str, say: bool) -> None:
    if say:
        sys.stdout.write(text)
        sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulation.soak", description="Run fault schedules until told to stop.")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="how long (default: until interrupted)")
    parser.add_argument("--seed", type=int, default=None, help="the first seed (default: drawn)")
    parser.add_argument("--once", action="store_true", help="run only this one seed")
    parser.add_argument("--executors", type=int, default=None, help="how many executors (default: drawn, mostly one)")
    options = parser.parse_args()
    seeds = new_seeds(options.seed)
    first = next(seeds)
    _say(f"seeds from {first}\n", say=True)
    if options.once:
        report = report_of(draw(first, options.executors))
        _say(report or "every invariant holds\n", say=True)
        return 1 if report else 0
    try:
        totals, reports = soak(_from(first, seeds), options.minutes * 60, num_executors=options.executors)
    except KeyboardInterrupt:
        return 130
    _say(totals.line() + "\n", say=True)
    return 1 if reports else 0


def _from(first: int, seeds: Iterator[int]) -> Iterator[int]:
    yield first
    yield from seeds


if __name__ == "__main__":
    sys.exit(main())
