"""The cost of one scheduler step: schedule, encode, decode the answer, update.

Owns: measuring the core with its real frames, without sockets or a model. Must not know: any executor or gateway.

All-decode: N greedy requests with 512-token contexts; block boundaries are spread over the steps, or with ``--aligned``
all in one of ``block_size``. Churn: 2% of the rows finish in every step and as many new 512-token requests start.
Encoding for one gateway is a figure of its own. "Default" are the default settings; "everything" is every policy at
once: order by priority, budgets from objectives, predicted reservation, preemption by cost, all classes, four tenants,
an objective of 50 ms. "Waiting" has 100,000 requests in the queue, under each order, and measures arrivals, cancels and
ends.

Each row is the quickest of ``--rounds``, because shared machines run at several speeds. Times in microseconds; "bytes"
is the smallest step message. ``--peer "COMMAND"`` runs a peer, which prints one JSON object with ``result ->
"prefix_off/nN" -> sched_us, update_us`` (medians), and adds the ratios.
"""

import argparse
import cProfile
import gc
import io
import json
import pstats
import shlex
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from headway_proto import ingress, step
from headway_proto.columns import encode_column, encode_columns
from headway_proto.ingress import Tokens
from headway_proto.sampling import SamplingParams
from headway_scheduler.compiled_core import runs_compiled
from headway_scheduler.core.admission.orders import ORDERS
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.events import StepEvents
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from program import count, count_or_none, counts, parser_of, provenance, rest_collector, write_result

PROMPT_TOKENS = 512
BLOCK_SIZE = 16
STEP_S = 0.01
NUM_WAITING = 100_000
NUM_SAMPLED = 2_000

POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "everything": {
        "order": "priority",
        "budget": "slo",
        "preemption": "auto",
        "reserve": "predicted",
        "default_itl_slo_ms": 50,
    },
}
CHURN_SHARE = 0.02
VOCAB_SIZE = 128_256


Profiling = AbstractContextManager[object]
UNPROFILED: Profiling = nullcontext()


class Bench:
    """A scheduler with N running requests, and the executor's and gateway's ends of its frames."""

    def __init__(
        self, num_running: int, depth: int, seed: int, *, aligned: bool = False, policies: dict[str, Any] | None = None
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.num_running = num_running
        self.aligned = aligned
        self.is_mixed = bool(policies)
        limits = SchedulerLimits(
            max_num_batched_tokens=max(8192, num_running + num_leaving(num_running) * (PROMPT_TOKENS + BLOCK_SIZE)),
            max_num_seqs=num_running,
            max_steps_in_flight=depth,
            max_num_waiting=1 << 20,
            max_waiting_tokens=0,
            **(policies or {}),
        )
        self.now = 0.0
        capacity = ExecutorCapacity(
            num_blocks=num_running * 160 + 4096,
            block_size=BLOCK_SIZE,
            max_model_len=2600,
            vocab_size=VOCAB_SIZE,
            max_num_rows=num_running,
            num_host_blocks=num_running * 160,
            swap_us_per_block=10.0,
        )
        self.core = Scheduler(limits, capacity, epoch=1 << 20)
        self.step_writer = step.scheduler_frame_writer()
        self.executor_writer = step.executor_frame_writer()
        self.reader = step.scheduler_frame_reader()
        self.gateway_writer = ingress.scheduler_frame_writer()
        self.in_flight: deque[bytes] = deque()
        self.num_arrived = 0
        self.message_bytes: list[int] = []
        self.gateway_us: list[float] = []
        for _ in range(num_running):
            self.core.add_request(self.new_request(max_tokens=2000), now=self.now)

    def new_request(self, max_tokens: int) -> NewRequestEvent:
        """Return a request as it comes off the wire."""
        number = self.num_arrived
        self.num_arrived += 1
        extra = 0 if self.aligned else number % BLOCK_SIZE
        return NewRequestEvent(
            origin=Origin(1, number),
            request_id=str(number),
            token_ids=self.rng.integers(3, 4000, size=PROMPT_TOKENS + extra).astype(np.int32),
            num_prompt_tokens=PROMPT_TOKENS + extra,
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=0.0),
            stop_token_ids=frozenset({2}),
            **({"priority": number % 4 + 1, "tenant": f"tenant {number % 4}"} if self.is_mixed else {}),
        )

    def schedule(self) -> bytes | None:
        """Send one step as a frame, and prepare the executor's answer, untimed."""
        output = self.core.schedule(self.now)
        return None if output is None else self.step_writer.encode(output)

    def answer(self) -> bytes:
        """The executor's frame for the newest step in flight."""
        newest = self.core._epoch.in_flight[-1]  # noqa: SLF001 - the benchmark plays the executor
        tokens = self.rng.integers(3, 4000, size=len(newest.sampling_rows))
        return self.executor_writer.encode(
            step.ExecutorOutput(
                epoch=self.core.epoch,
                step=newest.step,
                sampled_token_ids=encode_column(tokens),
                state_digest=newest.digest,
            )
        )

    def update(self, frame: bytes) -> StepEvents:
        """Process one answer."""
        body = self.reader.decode(frame).body
        assert isinstance(body, step.ExecutorOutput)
        self.now += STEP_S
        return self.core.update(body, self.now)

    def tell_gateway(self, events: StepEvents) -> None:
        """Encode the gateway's message."""
        self.gateway_writer.encode(Tokens(columns=encode_columns((events.handles, events.indices, events.token_ids))))

    def settle(self) -> None:
        """Run until every request decodes."""
        while self.core.num_waiting or self.core._epoch.prefilling:  # noqa: SLF001
            self.untimed_step()
        for _ in range(32):
            self.untimed_step()

    def untimed_step(self) -> None:
        """Run one step and the oldest answer, without a clock."""
        if self.schedule() is not None:
            self.in_flight.append(self.answer())
        if len(self.in_flight) == self.core.limits.steps_in_flight(num_lanes=1) or not self.core.num_running:
            self.update(self.in_flight.popleft())

    def timed_step(self, arrivals: list[NewRequestEvent]) -> float:
        """Return microseconds for one arrival batch, schedule, encode, decode, update."""
        clock = time.perf_counter_ns
        start = clock()
        for new in arrivals:
            self.core.add_request(new, now=self.now)
        frame = self.schedule()
        spent = clock() - start
        assert frame is not None
        self.message_bytes.append(len(frame))
        self.in_flight.append(self.answer())
        if len(self.in_flight) < self.core.limits.steps_in_flight(num_lanes=1):
            return spent / 1e3
        answer = self.in_flight.popleft()
        start = clock()
        events = self.update(answer)
        spent += clock() - start
        start = clock()
        self.tell_gateway(events)
        self.gateway_us.append((clock() - start) / 1e3)
        return spent / 1e3


def all_decode(
    num_running: int,
    steps: int,
    depth: int,
    seed: int,
    *,
    aligned: bool,
    policies: dict[str, Any],
    profile: Profiling = UNPROFILED,
) -> dict[str, float]:
    bench = Bench(num_running, depth, seed, aligned=aligned, policies=policies)
    bench.settle()
    rest_collector()
    with profile:
        times = [bench.timed_step([]) for _ in range(steps)]
    gc.unfreeze()
    return {
        **figures(times),
        "gateway_message_us": round(statistics.median(bench.gateway_us), 1),
        "message_bytes_min": min(bench.message_bytes),
    }


def churn(
    num_running: int, steps: int, depth: int, seed: int, policies: dict[str, Any], profile: Profiling = UNPROFILED
) -> dict[str, float]:
    bench = Bench(num_running, depth, seed, policies=policies)
    bench.settle()
    share = num_leaving(num_running)
    origins = deque(request.new.origin for request in bench.core.requests())
    rest_collector()
    times = []
    with profile:
        for _ in range(steps):
            # The oldest rows end in this step, as if a stop token had been sampled, and as many requests arrive.
            leaving = [origins.popleft() for _ in range(share)]
            origins.extend(Origin(1, bench.num_arrived + place) for place in range(share))
            arrivals = [bench.new_request(max_tokens=2000) for _ in range(share)]
            start = time.perf_counter_ns()
            for origin in leaving:
                bench.core.abort(origin)
            ending = (time.perf_counter_ns() - start) / 1e3
            times.append(ending + bench.timed_step(arrivals))
    gc.unfreeze()
    assert bench.core.num_running == num_running, "arrivals were left waiting: these steps cost less than was meant"
    return figures(times)


def waiting(
    order: str, num_running: int, num_waiting: int, depth: int, seed: int
) -> dict[str, dict[str, float] | None]:
    """Return the cost of single events with ``num_waiting`` requests in the queue; None without a request to cancel."""
    bench = Bench(num_running, depth, seed, policies={**POLICIES["everything"], "order": order})
    bench.settle()
    running = [request.new.origin for request in bench.core.requests()]
    arrivals = [bench.new_request(max_tokens=2000) for _ in range(num_waiting + NUM_SAMPLED)]
    for new in arrivals[:num_waiting]:
        bench.core.add_request(new, now=bench.now)
    rest_collector()
    arriving = [timed(lambda new=new: bench.core.add_request(new, now=bench.now)) for new in arrivals[num_waiting:]]
    chosen = bench.rng.choice(num_waiting, size=min(NUM_SAMPLED, num_waiting), replace=False)
    cancelling = [timed(lambda place=place: bench.core.abort(arrivals[place].origin)) for place in chosen.tolist()]
    ending = [timed(lambda origin=origin: bench.core.abort(origin)) for origin in running]
    gc.unfreeze()
    return {
        "arrival": figures(arriving),
        "cancelled": figures(cancelling) if cancelling else None,
        "end": figures(ending),
    }


def profiled(num_running: int, steps: int, depth: int, seed: int) -> str:
    """Profile all-decode steps, then churn, with every policy. The profiler's own cost is in the figures."""
    text = io.StringIO()
    for title in ("all-decode", "churn"):
        profile = cProfile.Profile()
        if title == "churn":
            churn(num_running, steps, depth, seed, POLICIES["everything"], profile)
        else:
            all_decode(num_running, steps, depth, seed, aligned=False, policies=POLICIES["everything"], profile=profile)
        text.write(f"{title}, {num_running} running, {steps} steps\n")
        pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(25)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip()) + "\n"


def quickest(rounds: Iterable[dict[str, float]]) -> dict[str, float]:
    return min(rounds, key=lambda figures_of_round: figures_of_round["median_us"])


def timed(work: Callable[[], object]) -> float:
    """Return microseconds for a call."""
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / 1e3


def num_leaving(num_running: int) -> int:
    return max(1, round(num_running * CHURN_SHARE))


def figures(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "median_us": round(statistics.median(ordered), 1),
        "mean_us": round(statistics.fmean(ordered), 1),
        "p99_us": round(ordered[int(len(ordered) * 0.99)], 1),
    }


def run_peer(command: str) -> dict[str, dict[str, float]]:
    done = subprocess.run(shlex.split(command), check=True, capture_output=True, text=True)
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{"))
    result: dict[str, dict[str, float]] = json.loads(line)["result"]
    return result


def measured(
    name: str, policies: dict[str, Any], size: int, peer: dict[str, dict[str, float]], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Print and return one row of the table."""
    steps, depth, seed = arguments.steps, arguments.depth, arguments.seed
    decode = quickest(
        all_decode(size, steps, depth, seed, aligned=arguments.aligned, policies=policies)
        for _ in range(arguments.rounds)
    )
    turnover = quickest(churn(size, steps, depth, seed, policies) for _ in range(arguments.rounds))
    entry = peer.get(f"prefix_off/n{size}")
    peer_us = round(entry["sched_us"] + entry["update_us"], 1) if entry else None
    ratio = round(peer_us / decode["median_us"], 1) if peer_us else None
    print(
        f"{name:<10} {size:>8} {decode['median_us']:>14} {decode['mean_us']:>8} {decode['p99_us']:>8} "
        f"{decode['gateway_message_us']:>8} {decode['message_bytes_min']:>6} {turnover['median_us']:>13} "
        f"{turnover['mean_us']:>8} {peer_us or '-':>12} {f'{ratio:.0f}x' if ratio else '-':>7}"
    )
    return {
        "policies": name,
        "running": size,
        "decode": decode,
        "churn": turnover,
        "peer_median_us": peer_us,
        "ratio": ratio,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--running", type=counts, default="32,128,256,1024,4096", help="numbers of running requests")
    parser.add_argument("--steps", type=count, default=400)
    parser.add_argument("--rounds", type=count, default=3, help="how often each row is measured; the quickest counts")
    parser.add_argument("--depth", type=count, default=2, help="steps in flight")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--aligned", action="store_true", help="all block boundaries in the same step")
    parser.add_argument(
        "--waiting", type=count_or_none, default=NUM_WAITING, help="requests in the queue while events are timed"
    )
    parser.add_argument("--peer", default="", help="command that measures a peer's scheduler")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    parser.add_argument("--profile", type=Path, help="write where the time of steps with every policy goes, as text")
    arguments = parser.parse_args()
    sizes = arguments.running
    measured_here = provenance(arguments.seed)
    core = "compiled" if runs_compiled() else "as written"
    print(f"core: {core}")
    peer = run_peer(arguments.peer) if arguments.peer else {}
    rows = []
    print(
        f"{'policies':<10} {'running':>8} {'decode median':>14} {'mean':>8} {'p99':>8} {'gateway':>8} {'bytes':>6} "
        f"{'churn median':>13} {'mean':>8} {'peer median':>12} {'ratio':>7}"
    )
    for name, policies in POLICIES.items():
        rows += [measured(name, policies, size, peer, arguments) for size in sizes]
    queues = {}
    print(
        f"\n{arguments.waiting} waiting: {'arrival':>14} {'p99':>8} {'cancelled':>10} {'p99':>8} {'end':>8} {'p99':>8}"
    )
    for order in ORDERS:
        queues[order] = waiting(order, min(256, max(sizes)), arguments.waiting, arguments.depth, arguments.seed)
        cells = "".join(
            f" {part['median_us']:>9} {part['p99_us']:>8}" if part else f" {'-':>9} {'-':>8}"
            for part in queues[order].values()
        )
        print(f"{order:<20}{cells}")
    if arguments.profile:
        arguments.profile.write_text(profiled(min(256, max(sizes)), arguments.steps, arguments.depth, arguments.seed))
    record = {
        "benchmark": "scheduler_step",
        **measured_here,
        "core": core,
        "steps": arguments.steps,
        "rounds": arguments.rounds,
        "depth": arguments.depth,
        "aligned": arguments.aligned,
        "rows": rows,
        "waiting": {"num_waiting": arguments.waiting, "orders": queues},
        "peer": peer,
    }
    write_result(arguments.output, record)


if __name__ == "__main__":
    main()
