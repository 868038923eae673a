"""The scheduler's time per round of steps, with 1, 8 and 64 executors.

Owns: the frames of all executors and of one gateway, and the clock around the engine's calls. Must not know: how the
engine works.

Each executor has 256 rows, and all of them decode. In a round, every executor answers its oldest step and gets another,
and a share of the requests ends and as many arrive. A round lasts as long as a step of a device, 20 ms. *One by one*:
each answer comes alone and the engine runs after it, as when executors are not in step with each other. *Together*: all
answers of a round come at once, and the engine runs once. The time that counts is that of the engine alone, without
sockets and without executors, in microseconds.

Other processes stop this one for longer than a call takes. So each call counts with the lower quartile of its times. But
some work comes only with every 16th or 64th step: a block for each row, the digest of the state. So the quartile is that
of the rounds with the same place among 64, a round is the sum of its calls, and the figure is the mean of these 64.

    python benchmarks/fleet_cost.py --json benchmarks/results/fleet_cost.json
"""

import argparse
import cProfile
import gc
import pstats
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from headway_proto import ingress, step
from headway_proto.columns import encode_column
from headway_proto.sampling import SamplingParams
from headway_scheduler.cells.cell import Cell
from headway_scheduler.compiled_core import runs_compiled
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.engine import SchedulerEngine
from program import count, counts, parser_of, provenance, rest_collector, write_result

STEP_S = 0.02
PROMPT_TOKENS = 16
MAX_TOKENS = 3000
LIVES_OF_A_REQUEST = 500
"""In rounds: the share of the requests that ends in each is one over this."""
SETTLE_ROUNDS = 8
PERIOD = step.DIGEST_INTERVAL_STEPS
"""In rounds: the longest period of any work."""
GATEWAY = b"gateway"


class PlayedExecutor:
    """The executor's end of one link. It answers from what the core expects."""

    def __init__(self, number: int) -> None:
        self.name = b"executor-%d" % number
        self.writer = step.executor_frame_writer()

    def answer(self, core: Scheduler) -> bytes:
        """Return the answer to the oldest step in flight."""
        oldest = core._epoch.in_flight[0]  # noqa: SLF001 (the benchmark plays the executor)
        output = step.ExecutorOutput(
            epoch=core.epoch,
            step=oldest.step,
            state_digest=oldest.digest,
            sampled_token_ids=encode_column([7] * len(oldest.sampling_rows)),
        )
        return self.writer.encode(output)


class FleetBench:
    """The engine with N executors and one gateway, all played here."""

    def __init__(self, num_executors: int, num_rows: int, seed: int) -> None:
        limits = SchedulerLimits(
            max_num_batched_tokens=8192, max_num_seqs=num_rows, max_num_waiting=1 << 20, max_waiting_tokens=0
        )
        self.engine = SchedulerEngine(limits, incarnation=seed + 1, max_executors=num_executors)
        self.now = 0.0
        self.calls_us: list[float] = []
        """The engine's time for each batch of frames of this round."""
        self._num_rows = num_rows
        self._executors = [PlayedExecutor(number) for number in range(num_executors)]
        self._gateway, self._num_heard = ingress.gateway_frame_writer(), 0
        self._handles: deque[int] = deque()
        self._num_submitted = 0
        self._join()
        self._fill()

    @property
    def cells(self) -> list[Cell]:
        """All cells; the number of each is that of its executor."""
        return self.engine.fleet.cells

    def _join(self) -> None:
        reader = step.executor_frame_reader()
        for number, executor in enumerate(self._executors):
            info = step.BackendInfo(
                backend="played", device="none", dtype="none", model_name="none", model_fingerprint="none",
                num_blocks=self._num_rows * 200, block_size=16, max_model_len=MAX_TOKENS + 100, vocab_size=32_000,
                eos_token_ids=(2,), max_num_rows=self._num_rows,
            )  # fmt: skip
            hello = step.ExecutorHello(number + 1, info)
            self.engine.executor_frame(executor.name, executor.writer.encode(hello), self.now)
            opened = next(
                body for peer, frame in self.engine.fleet.links.outgoing if peer == executor.name
                if isinstance(body := reader.decode(frame).body, step.NewEpoch)
            )  # fmt: skip
            executor.writer.begin_epoch(opened.epoch)
            self.engine.fleet.links.outgoing.clear()
        hello_frame = self._gateway.encode(ingress.GatewayHello(incarnation=1, link=1))
        self.engine.gateway_frame(GATEWAY, hello_frame, self.now)
        answered = ingress.gateway_frame_reader().decode(self.engine.gateways.outgoing[0][1])
        self.engine.gateways.outgoing.clear()
        self._gateway.begin_epoch(answered.epoch)

    def _fill(self) -> None:
        """Give every row a request that decodes."""
        for _ in range(self._num_rows * len(self._executors)):
            self.engine.gateway_frame(GATEWAY, self._submission(), self.now)
        self.engine.run(self.now)
        while any(cell.core is None or cell.core.num_running < self._num_rows for cell in self.cells):
            self.round(together=True, num_leaving=0)

    def _submission(self) -> bytes:
        self._num_submitted += 1
        number = self._num_submitted
        num_tokens = PROMPT_TOKENS + number % 16
        self._handles.append(number)
        submit = ingress.Submit(
            handle=number, request_id=str(number), index=0, num_prompt_tokens=num_tokens,
            token_ids=encode_column([5 + number % 1000] * num_tokens), max_tokens=MAX_TOKENS,
            sampling=SamplingParams(temperature=0.0), ignore_eos=True,
        )  # fmt: skip
        return self._gateway.encode(submit)

    def round(self, *, together: bool, num_leaving: int) -> None:
        """Let every executor answer once."""
        self.calls_us.clear()
        self._hear()
        if num_leaving:
            leaving = np.array([self._handles.popleft() for _ in range(num_leaving)], dtype=np.int32)
            frames = [self._gateway.encode(ingress.Abort(handles=encode_column(leaving)))]
            frames += [self._submission() for _ in range(num_leaving)]
            self._run([(GATEWAY, frame) for frame in frames])
        executors = zip(self._executors, self.cells, strict=True)
        answers = [
            (executor.name, executor.answer(cell.core))
            for executor, cell in executors
            if cell.core is not None and cell.core.num_in_flight
        ]
        if together:
            self._run(answers)
        else:
            for answer in answers:
                self.now += STEP_S / len(answers)
                self._run([answer])
        self.now += STEP_S * together

    def _run(self, frames: list[tuple[bytes, bytes]]) -> None:
        engine = self.engine
        began = time.perf_counter()
        for peer, frame in frames:
            (engine.gateway_frame if peer == GATEWAY else engine.executor_frame)(peer, frame, self.now)
        engine.run(self.now)
        _ = engine.next_deadline  # the process asks for it before it sleeps
        self.calls_us.append((time.perf_counter() - began) * 1e6)
        engine.fleet.links.outgoing.clear()

    def _hear(self) -> None:
        """The gateway has taken all messages."""
        self._num_heard += len(self.engine.gateways.outgoing)
        self.engine.gateways.outgoing.clear()
        heartbeat = self._gateway.encode(ingress.GatewayHeartbeat(received=self._num_heard + 1))
        self.engine.gateway_frame(GATEWAY, heartbeat, self.now)


def measure(num_executors: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure rounds of both kinds, without and with requests that come and go."""
    bench = FleetBench(num_executors, arguments.rows, arguments.seed)
    num_leaving = max(1, num_executors * arguments.rows // LIVES_OF_A_REQUEST)
    found: dict[str, Any] = {"executors": num_executors, "rows": arguments.rows, "leaving_per_round": num_leaving}
    rest_collector()
    for together in (False, True):
        for leaving in (0, num_leaving):
            kind = ("together" if together else "one_by_one") + ("_churn" if leaving else "")
            profile = cProfile.Profile() if arguments.profile else None
            for _ in range(SETTLE_ROUNDS):
                bench.round(together=together, num_leaving=leaving)
            calls: list[list[float]] = []
            if profile is not None:
                profile.enable()
            for _ in range(arguments.rounds):
                bench.round(together=together, num_leaving=leaving)
                calls.append(list(bench.calls_us))
            if profile is not None:
                profile.disable()
                print(f"{num_executors} executors, {kind}")
                pstats.Stats(profile, stream=sys.stdout).strip_dirs().sort_stats("tottime").print_stats(25)
            found[f"{kind}_us"] = round(round_us(calls), 1)
    gc.unfreeze()
    found["share_of_step"] = round(found["one_by_one_churn_us"] / (STEP_S * 1e6), 4)
    return found


def round_us(calls: list[list[float]]) -> float:
    """Return the mean time of a round. ``calls``: the times of the same calls in each round, in order."""
    alike = [calls[place::PERIOD] for place in range(min(PERIOD, len(calls)))]
    return statistics.mean(sum(map(lower_quartile, zip(*rounds, strict=True))) for rounds in alike)


def lower_quartile(times: Sequence[float]) -> float:
    """Return what a call takes while no other process wants the processor."""
    return statistics.quantiles(times, n=4)[0] if len(times) > 1 else times[0]


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    return (
        f"{row['executors']:>3} executors of {row['rows']} rows: one by one {row['one_by_one_us']} us, with churn "
        f"{row['one_by_one_churn_us']} us; together {row['together_us']} us, with churn {row['together_churn_us']} us; "
        f"{100 * row['share_of_step']:.1f}% of a step of {STEP_S * 1e3:.0f} ms"
    )


def main() -> None:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--executors", type=counts, default=[1, 8, 64], help="numbers of executors (default: 1,8,64)")
    parser.add_argument("--rows", type=count, default=256, help="of each executor (default: 256)")
    parser.add_argument("--rounds", type=count, default=640, help="measured of each kind (default: 640)")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    arguments = parser.parse_args()
    rows = []
    for num_executors in arguments.executors:
        rows.append(measure(num_executors, arguments))
        print(line(rows[-1]), flush=True)
    record = {
        **provenance(arguments.seed),
        "is_core_compiled": runs_compiled(),
        "rounds": arguments.rounds,
        "step_ms": STEP_S * 1e3,
        "results": rows,
    }
    write_result(arguments.json, record)


if __name__ == "__main__":
    main()
