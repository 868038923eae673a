"""What it costs the scheduler's step to keep the figures that operators are told.

Owns: the measurement, by turns in one run, of the same steps with and without the statistics.
Must not know: how the figures are made or told.

N requests decode; each round measures the core's step and update with the real frames (as ``scheduler_step.py`` does)
followed by what the engine tells ``ServingStatistics`` of a step, or by nothing. ``--churn`` lets 2% of the rows end in every
step and as many arrive, which is when there is more to note. Turns alternate, so that both see the same machine; the
quickest turn of each counts. The notes are timed by themselves as well, in blocks of a thousand calls, since a step's own
scatter is larger than what they cost. Times in microseconds per step.
"""

import argparse
import json
import statistics
import time
from collections import deque
from pathlib import Path

from headway_scheduler.core.events import StepEvents
from headway_scheduler.core.request import Origin
from headway_scheduler.process import relax_collector
from headway_scheduler.serving_statistics import ServingStatistics
from provenance import provenance
from scheduler_step import STEP_S, Bench, num_leaving

CALLS_PER_BLOCK = 1000
NUM_BLOCKS = 20


class NotedBench(Bench):
    """A bench whose steps are noted while ``noted`` is there."""

    noted: ServingStatistics | None = None

    def update(self, frame: bytes) -> StepEvents:
        """Take one answer in, and note it."""
        events = super().update(frame)
        if self.noted is not None:
            note(self.noted, self, events, self.now)
        return events


def note(kept: ServingStatistics, bench: Bench, events: StepEvents, now: float) -> None:
    """What the engine does for the figures in each step."""
    kept.step_tokens.observe(bench.num_running)
    kept.note_answer(events, 0, now)
    if now >= kept.next_mark_at:
        kept.keep_time(now, bench.core)


def measured(num_running: int, steps: int, turns: int, seed: int, *, has_churn: bool) -> dict[str, float]:
    """Both kinds of turn by turns."""
    bench = NotedBench(num_running, 2, seed)
    bench.settle()
    relax_collector()
    kept = ServingStatistics()
    kept.note_epoch(bench.now)
    origins = deque(request.new.origin for request in bench.core.requests())
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * turns):
        is_noted = bool(turn % 2)
        bench.noted = kept if is_noted else None
        times[is_noted].append(statistics.median(_step(bench, origins, has_churn=has_churn) for _ in range(steps)))
    without, noted = min(times[False]), min(times[True])
    return {
        "step_us": round(without, 2),
        "noted_step_us": round(noted, 2),
        "ratio": round(noted / without, 4),
        "note_us": round(note_us(num_running), 3),
    }


def _step(bench: NotedBench, origins: deque[Origin], *, has_churn: bool) -> float:
    """Microseconds for a step; with churn the oldest rows end before it and as many requests arrive."""
    if not has_churn:
        return bench.timed_step([])
    share = num_leaving(bench.num_running)
    ending = [bench.core.abort(origins.popleft()) for _ in range(share)]
    origins.extend(Origin(1, bench.num_arrived + place) for place in range(share))
    arrivals = [bench.new_request(max_tokens=2000) for _ in range(share)]
    start = time.perf_counter_ns()
    if bench.noted is not None:
        for end in ending:
            assert end is not None
            bench.noted.note_end(end, bench.now)
    return (time.perf_counter_ns() - start) / 1e3 + bench.timed_step(arrivals)


def note_us(num_running: int) -> float:
    """Microseconds for what is noted of one step in which N rows decode: the quickest block of calls."""
    bench = Bench(num_running, 2, 0)
    bench.settle()
    frame = bench.schedule()
    assert frame is not None
    bench.in_flight.append(bench.answer())
    events = bench.update(bench.in_flight.popleft())
    kept, now = ServingStatistics(), bench.now
    blocks = []
    for _ in range(NUM_BLOCKS):
        start = time.perf_counter_ns()
        for _ in range(CALLS_PER_BLOCK):
            now += STEP_S
            note(kept, bench, events, now)
        blocks.append((time.perf_counter_ns() - start) / 1e3 / CALLS_PER_BLOCK)
    return min(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", default="32,256,1024", help="numbers of running requests")
    parser.add_argument("--steps", type=int, default=100, help="steps per turn; all turns together at most 1900")
    parser.add_argument("--turns", type=int, default=8, help="turns of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    print(f"{'load':<8} {'running':>8} {'step us':>9} {'noted us':>9} {'ratio':>7} {'notes us':>9}")
    rows = []
    for has_churn in (False, True):
        for size in map(int, arguments.running.split(",")):
            row = measured(size, arguments.steps, arguments.turns, arguments.seed, has_churn=has_churn)
            load = "churn" if has_churn else "decode"
            rows.append({"load": load, "running": size, **row})
            print(
                f"{load:<8} {size:>8} {row['step_us']:>9} {row['noted_step_us']:>9} {row['ratio']:>7} {row['note_us']:>9}"
            )
    if arguments.output:
        record = {**provenance(arguments.seed), "steps": arguments.steps, "turns": arguments.turns, "rows": rows}
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
