"""The cost of metrics per scheduler step: to record figures, and to answer readers.

Owns: the same steps without the statistics, with them, and while they are read, by turns in one run. Must not know: how
figures are made or sent.

N requests decode; a step is the core's with the real frames (see ``scheduler_step.py``), followed by the engine's calls
of ``ServingStatistics`` or by nothing. In a second part, with pauses as for an executor, another process reads the
metrics ``SCRAPES_PER_S`` times a second in every other turn, fifty times as often as Prometheus. In ``churn`` rows 2%
of the requests end in every step and as many arrive. Medians are those of the quickest turn, p99 is over all. The calls
are also timed alone, in blocks of a thousand, because a step varies by more than they cost. ``gateway`` is one written
delta. Times in microseconds.
"""

import argparse
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from headway_gateway.figures.statistics import GatewayStatistics
from headway_process.metrics_endpoint import MetricsEndpoint
from headway_process.snapshots import Snapshots
from headway_scheduler.cells.core_calls import CoreCalls
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.events import StepEvents
from headway_scheduler.core.view import SchedulerView
from headway_scheduler.engine import SchedulerEngine
from headway_scheduler.figures.serving_statistics import ServingStatistics
from headway_scheduler.metrics import SchedulerSnapshot, families_of, take_snapshot
from program import count, counts, parser_of, provenance, rest_collector, write_result
from scheduler_step import STEP_S, Bench, num_leaving

CALLS_PER_BLOCK = 1000
NUM_BLOCKS = 20
SCRAPES_PER_S = 10
READ_FOR_EVER = f"""
import sys, time, urllib.request
while True:
    try:
        urllib.request.urlopen(sys.argv[1], timeout=10).read()
    except OSError:
        pass
    time.sleep({1 / SCRAPES_PER_S})
"""


class CountingBench(Bench):
    """A bench whose steps are recorded while ``counted`` is there, and whose metrics can be read."""

    def __init__(self, num_running: int, seed: int) -> None:
        super().__init__(num_running, 2, seed)
        self.counted: ServingStatistics | None = None
        self.engine = SchedulerEngine(self.core.limits, incarnation=1)
        self.engine.fleet.cells[0].calls = CoreCalls(self.core, self.engine.recorder, lambda: None)
        self.snapshots: Snapshots[SchedulerSnapshot] = Snapshots()

    def update(self, frame: bytes) -> StepEvents:
        """Process one answer, and record it."""
        events = super().update(frame)
        if self.counted is not None:
            count_step(self.counted, self, events, self.now)
            if self.snapshots.wanted:
                self.snapshots.give(take_snapshot(self.engine, self.now))
        return events


class Reader:
    """Another process that reads the metrics repeatedly, unless it is held."""

    def __init__(self, port: int) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", READ_FOR_EVER, f"http://127.0.0.1:{port}/metrics"])
        self.hold()

    def hold(self) -> None:
        """Stop reading."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Read again."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def count_step(kept: ServingStatistics, bench: Bench, events: StepEvents, now: float) -> None:
    """Record a step as the engine does."""
    kept.step_tokens.observe(bench.num_running)
    kept.count_answer(events, 0, now)
    if now >= kept.next_mark_at:
        kept.keep_time(now, SchedulerView(bench.core))


def measured(num_running: int, arguments: argparse.Namespace, *, has_churn: bool) -> dict[str, Any]:
    """Measure steps without and with records by turns, then recorded steps with pauses, read and not."""
    bench = CountingBench(num_running, arguments.seed)
    bench.settle()
    rest_collector()
    bench.engine.statistics.count_epoch(bench.now)
    load = Load(bench, arguments.steps, has_churn=has_churn)
    counting = by_turns(load, None, ("without", "counted"), arguments.turns, 0.0)
    endpoint = MetricsEndpoint("127.0.0.1:0", "", lambda: families_of(bench.snapshots.ask()))
    reader = Reader(endpoint.port)
    try:
        reading = by_turns(load, reader, ("unread", "read"), arguments.turns, arguments.pace_ms)
    finally:
        reader.close()
        endpoint.close()
    return {
        **counting,
        **reading,
        "ratio": round(counting["counted"]["median_us"] / counting["without"]["median_us"], 4),
        "count_us": round(count_us(num_running), 3),
    }


def by_turns(
    load: "Load", reader: Reader | None, kinds: tuple[str, str], turns: int, pace_ms: float
) -> dict[str, dict[str, float]]:
    """Return the figures of both kinds of turn."""
    times: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for turn in range(len(kinds) * turns):
        kind = kinds[turn % len(kinds)]
        if reader is not None and kind == "read":
            reader.go_on()
        times[kind].append(load.turn(is_counted=kind != "without", pace_ms=pace_ms))
        if reader is not None:
            reader.hold()
    return {kind: _figures(times[kind]) for kind in kinds}


class Load:
    """Turns of ``steps`` steps; with churn the oldest rows end before each and as many requests arrive."""

    def __init__(self, bench: CountingBench, steps: int, *, has_churn: bool) -> None:
        self._bench = bench
        self._steps = steps
        self._num_leaving = num_leaving(bench.num_running) if has_churn else 0
        self._origins = deque(request.new.origin for request in bench.core.requests())

    def turn(self, *, is_counted: bool, pace_ms: float) -> list[float]:
        """Return microseconds for each step, with a pause before it."""
        self._bench.counted = self._bench.engine.statistics if is_counted else None
        times = []
        for _ in range(self._steps):
            if pace_ms:
                time.sleep(pace_ms / 1e3)
            times.append(self._step())
        return times

    def _step(self) -> float:
        bench = self._bench
        ending = [bench.core.abort(self._origins.popleft()) for _ in range(self._num_leaving)]
        self._origins.extend(Origin(1, bench.num_arrived + place) for place in range(self._num_leaving))
        arrivals = [bench.new_request(max_tokens=2000) for _ in range(self._num_leaving)]
        start = time.perf_counter_ns()
        if bench.counted is not None:
            for end in ending:
                assert end is not None
                bench.counted.count_end(end, bench.now)
        return (time.perf_counter_ns() - start) / 1e3 + bench.timed_step(arrivals)


def _figures(turns: list[list[float]]) -> dict[str, float]:
    everything = sorted(time_us for turn in turns for time_us in turn)
    return {
        "median_us": round(min(statistics.median(turn) for turn in turns), 2),
        "mean_us": round(statistics.fmean(everything), 2),
        "p99_us": round(everything[int(len(everything) * 0.99)], 2),
    }


def count_us(num_running: int) -> float:
    """Return microseconds to record one step of N decodes: the quickest block of calls."""
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
            count_step(kept, bench, events, now)
        blocks.append((time.perf_counter_ns() - start) / 1e3 / CALLS_PER_BLOCK)
    return min(blocks)


def gateway_count_us() -> float:
    """Return a gateway's microseconds to record one delta: the quickest block of calls."""
    kept = GatewayStatistics()
    blocks = []
    for _ in range(NUM_BLOCKS):
        start = time.perf_counter_ns()
        for _ in range(CALLS_PER_BLOCK):
            kept.count_delta(1, 0.01, 1.0)
        blocks.append((time.perf_counter_ns() - start) / 1e3 / CALLS_PER_BLOCK)
    return min(blocks)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--running", type=counts, default="32,256,1024", help="numbers of running requests")
    parser.add_argument("--steps", type=count, default=50, help="steps per turn; all turns together at most 1900")
    parser.add_argument("--turns", type=count, default=8, help="turns of each kind")
    parser.add_argument("--pace-ms", type=float, default=3.0, help="pause before each step, as for an executor")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    print(
        f"{'load':<8}{'running':>8}{'step us':>9}{'counted':>9}{'ratio':>8}{'counts':>8}{'unread p99':>12}{'read p99':>10}"
    )
    rows = []
    for has_churn in (False, True):
        for size in arguments.running:
            row = measured(size, arguments, has_churn=has_churn)
            load = "churn" if has_churn else "decode"
            rows.append({"load": load, "running": size, **row})
            print(
                f"{load:<8}{size:>8}{row['without']['median_us']:>9}{row['counted']['median_us']:>9}{row['ratio']:>8}"
                f"{row['count_us']:>8}{row['unread']['p99_us']:>12}{row['read']['p99_us']:>10}"
            )
    gateway_us = round(gateway_count_us(), 3)
    print(f"gateway: {gateway_us} us a delta")
    record = {
        **provenance(arguments.seed),
        "steps": arguments.steps,
        "turns": arguments.turns,
        "rows": rows,
        "gateway_count_us": gateway_us,
    }
    write_result(arguments.output, record)


if __name__ == "__main__":
    main()
