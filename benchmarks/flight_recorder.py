"""The cost of the flight recorder per scheduler step and on disk, and the speed of a replay.

Owns: the comparison. Must not know: how anything is recorded.

Two engines of N decodes each, one with a recorder, take turns step by step in one process, so both see the machine's
changes of speed. "Step" is what an executor waits for: an answer in, the next step out, the gateway's message. The
recorder's later work (encoding before the scheduler sleeps; compressing and writing on its thread) is measured apart,
in microseconds of processor time per step. The lower quartile of a round's steps counts. "Stall" is the time of the
fork for a checkpoint, once per segment.

    python benchmarks/flight_recorder.py --json benchmarks/results/flight_recorder.json
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.flight.checkpoint import ForkingCheckpointer
from headway_scheduler.flight.log import FlightLog, FlightLogWriter
from headway_scheduler.flight.recorder import FlightRecorder
from headway_scheduler.flight.replay import Replay
from program import count, parser_of, provenance, rest_collector, write_result
from reliability_overhead import EngineBench

LOG_BYTES = 1 << 30
VOCAB_SIZE = 32_000
WRITING_S = 0.002
STEP_OF_A_DEVICE_MS = 15.0
"""What a step takes on a device, for scale: decodes of a model of eight billion parameters."""


class DrawingBench(EngineBench):
    """The engine with tokens that are all different, because equal ones would take no room in a log."""

    def __init__(self, num_running: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        super().__init__(num_running, seed)

    def sampled_tokens(self, count: int) -> Sequence[int]:
        """Any tokens but the one that ends a request."""
        tokens: list[int] = self._rng.integers(3, VOCAB_SIZE, size=count).tolist()
        return tokens


class RecordedBench(DrawingBench):
    """The same, with a recorder from its first frame on."""

    def __init__(self, num_running: int, seed: int, directory: Path) -> None:
        self.log = FlightLogWriter(directory, LOG_BYTES)
        self.recorder: FlightRecorder | None = None
        self.flush_us = 0.0
        super().__init__(num_running, seed)

    def make_recorder(self, limits: SchedulerLimits) -> FlightRecorder:
        """A recorder into the log."""
        self.recorder = FlightRecorder(self.log, limits, "benchmark")
        return self.recorder

    def beat(self) -> float:
        """Return a step's microseconds; the work after it counts in ``flush_us``."""
        step_us = super().beat()
        started = time.thread_time_ns()
        assert self.recorder is not None
        self.recorder.flush(self.now, self.engine.fleet)
        self.flush_us += (time.thread_time_ns() - started) / 1e3
        self._let_device_work()
        return step_us

    def _let_device_work(self) -> None:
        """Give the log's thread the time that a device would take."""
        while self.log.is_busy:
            time.sleep(WRITING_S)


def lower_quartile(times: list[float]) -> float:
    """Return a step's time while no other process wants the processor."""
    return statistics.quantiles(times, n=4)[0] if len(times) > 1 else times[0]


def by_turns(num_running: int, steps: int, seed: int, directory: Path) -> dict[str, float]:
    """Run both engines, a step each, by turns."""
    plain, recorded = DrawingBench(num_running, seed), RecordedBench(num_running, seed, directory)
    for _ in range(64):
        plain.beat()
        recorded.beat()
    rest_collector()
    recorded.flush_us = 0.0
    before = sum(path.stat().st_size for path in directory.iterdir())
    cpu_before, main_before = time.process_time(), time.thread_time()
    without: list[float] = []
    with_it: list[float] = []
    for number in range(steps):
        for bench, times in ((plain, without), (recorded, with_it))[:: 1 if number % 2 else -1]:
            times.append(bench.beat())
    assert recorded.recorder is not None
    recorded.recorder.close(recorded.now, recorded.engine.fleet)
    thread_us = ((time.process_time() - cpu_before) - (time.thread_time() - main_before)) * 1e6
    written = sum(path.stat().st_size for path in directory.iterdir()) - before
    return {
        "without_us": lower_quartile(without),
        "with_us": lower_quartile(with_it),
        "flush_us_per_step": recorded.flush_us / steps,
        "thread_us_per_step": thread_us / steps,
        "bytes_per_step": written / steps,
    }


def stall_ms(num_running: int, seed: int, directory: Path) -> float:
    """Return how long a scheduler stops while a checkpoint's process is forked."""
    bench = RecordedBench(num_running, seed, directory)
    checkpointer = ForkingCheckpointer(bench.log)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        checkpointer(bench.engine.fleet.state)
        times.append((time.perf_counter() - started) * 1e3)
        while checkpointer._is_child_alive():  # noqa: SLF001 (a second one would not be made beside it)
            time.sleep(0.01)
    bench.log.close()
    return statistics.median(times)


def replay_speed(directory: Path) -> dict[str, float]:
    """Return replayed steps per second, and the seconds of a device that they stand for."""
    log = FlightLog(directory)
    replay = Replay(log.header.limits)
    started = time.perf_counter()
    for _ in replay.run(log.records()):
        pass
    seconds = time.perf_counter() - started
    per_s = replay.num_steps / seconds
    return {"replayed_steps_per_s": per_s, "x_real_time": per_s * STEP_OF_A_DEVICE_MS / 1e3}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="flight") as name:
        for number in range(arguments.rounds):
            directory = Path(name) / str(number)
            rounds.append(by_turns(arguments.running, arguments.steps, arguments.seed, directory))
        replayed = replay_speed(directory)
        stall = stall_ms(arguments.running, arguments.seed, Path(name) / "stall")
    found = {key: round(statistics.median(one[key] for one in rounds), 2) for key in rounds[0]}
    ratios = [one["with_us"] / one["without_us"] for one in rounds]
    return {
        **provenance(arguments.seed),
        "running": arguments.running,
        "steps": arguments.steps,
        **found,
        "step_ratio": round(statistics.median(ratios), 4),
        "step_ratios": [round(ratio, 4) for ratio in ratios],
        "checkpoint_stall_ms": round(stall, 2),
        **{key: round(value, 1) for key, value in replayed.items()},
    }


def report(record: dict[str, Any]) -> str:
    without, with_it = record["without_us"], record["with_us"]
    change = 100 * (record["step_ratio"] - 1)
    flush, thread = record["flush_us_per_step"], record["thread_us_per_step"]
    lines = [
        f"engine step, {record['running']} decodes: {without} us without a recorder, {with_it} us with: {change:+.1f} %",
        f"beside steps: {flush} us per step when about to sleep, {thread} us on the log's thread",
        f"on disk: {record['bytes_per_step']} bytes per step; a checkpoint's fork takes {record['checkpoint_stall_ms']} ms",
        f"replay: {record['replayed_steps_per_s']} steps/s, {record['x_real_time']} x real time if a step takes 15 ms",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--running", type=count, default=256)
    parser.add_argument("--steps", type=count, default=2000)
    parser.add_argument("--rounds", type=count, default=7)
    arguments = parser.parse_args()
    record = measure(arguments)
    print(report(record))
    write_result(arguments.json, record)


if __name__ == "__main__":
    main()
