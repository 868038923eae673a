"""The value of the memory policies: preemption and reservations, with the real scheduler in virtual time.

Owns: workloads that run out of KV blocks, and figures that tell policies apart. Must not know: how decisions are made.

More users than the pool can hold send the next request at once. Figures are from the arrival of a fifth of the requests
to the last arrival. ``recomputed`` is in percent of the tokens that had to be computed, ``relative`` the throughput
beside the workload's first row (in the sweep: beside the better pure mode). Times in seconds, ITL in milliseconds.

- *preemption*: ``recompute``, ``swap`` and ``auto`` by context length and host bandwidth, under ``reserve=none``.
- *reservation*: each on heavy-tailed answers that stop long before their limit, on cut ones, and on light-tailed ones.
- *cost*: the scheduler's own time for a step, while the head of the queue does not fit.
"""

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headway_lab.simulate.cases import Case
from headway_lab.simulate.hardware import ACCELERATORS
from headway_lab.simulate.model_shapes import MODEL_SHAPES
from headway_lab.simulate.options import SimulationOptions
from headway_lab.simulate.report import CaseResult
from headway_lab.simulate.roofline import Roofline
from headway_lab.simulate.world import World, simulate
from headway_lab.workload.lengths import parse_lengths
from headway_lab.workload.load import Load
from headway_lab.workload.requests import WorkloadShape, draw_requests
from headway_proto.columns import encode_column
from headway_proto.sampling import SamplingParams
from headway_proto.step import ExecutorOutput
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from program import count, counts, parser_of, provenance, write_result

BLOCK_SIZE = 16
CONTEXT_LENGTH = 32_768
HOST_BLOCKS = 1 << 16
WARM_UP_SHARE = 0.2
MODES = ("recompute", "swap", "auto")
RESERVES = ("none", "prompt", "predicted", "full")


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Users and their requests, and a pool that is too small. ``max_tokens`` 0: an answer's length is its limit."""

    prompt: str
    output: str
    num_blocks: int
    num_users: int
    num_requests: int
    max_tokens: int = 0


CONTEXTS = {
    "0.5k": Workload(
        prompt="lognormal:256,0.6,1500", output="lognormal:256,0.6,1500", num_blocks=700, num_users=48, num_requests=400
    ),
    "2k": Workload(
        prompt="lognormal:1500,0.5,6000",
        output="lognormal:400,0.6,2000",
        num_blocks=2500,
        num_users=48,
        num_requests=250,
    ),
    "4k": Workload(
        prompt="lognormal:500,0.5,2000",
        output="lognormal:3000,0.5,8000",
        num_blocks=2500,
        num_users=32,
        num_requests=120,
    ),
    "8k": Workload(
        prompt="lognormal:4000,0.5,8000",
        output="lognormal:4000,0.5,8000",
        num_blocks=6000,
        num_users=32,
        num_requests=96,
    ),
    "16k": Workload(
        prompt="lognormal:12000,0.3,16000",
        output="lognormal:3000,0.5,8000",
        num_blocks=6000,
        num_users=24,
        num_requests=72,
    ),
}
RESERVATION_WORKLOADS = {
    "lognormal": Workload(
        prompt="lognormal:256,0.6,1500",
        output="lognormal:300,1.0,4000",
        num_blocks=4000,
        num_users=192,
        num_requests=1600,
        max_tokens=4096,
    ),
    "pareto": Workload(
        prompt="lognormal:256,0.6,1500",
        output="pareto:100,1.2,4000",
        num_blocks=4000,
        num_users=192,
        num_requests=1600,
        max_tokens=4096,
    ),
    "pareto, tight": Workload(
        prompt="lognormal:256,0.6,1500",
        output="pareto:100,1.2,8000",
        num_blocks=2500,
        num_users=128,
        num_requests=1600,
        max_tokens=8192,
    ),
    "lognormal, cut": Workload(
        prompt="lognormal:256,0.6,1500",
        output="lognormal:300,1.0,8000",
        num_blocks=2500,
        num_users=128,
        num_requests=1200,
        max_tokens=512,
    ),
    "pareto, cut": Workload(
        prompt="lognormal:256,0.6,1500",
        output="pareto:100,1.2,8000",
        num_blocks=2500,
        num_users=128,
        num_requests=1200,
        max_tokens=512,
    ),
    "long prompts": Workload(
        prompt="lognormal:1500,0.5,6000",
        output="lognormal:300,1.0,4000",
        num_blocks=6000,
        num_users=96,
        num_requests=600,
        max_tokens=4096,
    ),
    "long answers": Workload(
        prompt="lognormal:128,0.5,600",
        output="lognormal:1000,0.7,6000",
        num_blocks=6000,
        num_users=192,
        num_requests=700,
        max_tokens=8192,
    ),
    "uniform": Workload(
        prompt="lognormal:256,0.6,1500",
        output="uniform:1,1000",
        num_blocks=2500,
        num_users=128,
        num_requests=900,
        max_tokens=4096,
    ),
    "all alike": Workload(
        prompt="lognormal:256,0.6,1500",
        output="300",
        num_blocks=2500,
        num_users=128,
        num_requests=900,
        max_tokens=4096,
    ),
}


def world_of(workload: Workload, *, model: str, share: float, seed: int, bandwidth_gb_s: float = 25.0) -> World:
    """Return a device with the workload's pool, and ``share`` of its requests, at least two for each user."""
    num_requests = max(round(share * workload.num_requests), 2 * workload.num_users)
    options = SimulationOptions(
        num_requests=num_requests, users=workload.num_users, host_bandwidth_gb_s=bandwidth_gb_s, seed=seed
    )
    shape = msgspec.structs.replace(MODEL_SHAPES[model], context_length=CONTEXT_LENGTH)
    roofline = Roofline(ACCELERATORS[options.hardware], shape, 1)
    capacity = ExecutorCapacity(
        num_blocks=workload.num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=CONTEXT_LENGTH,
        vocab_size=shape.vocab_size,
        max_num_rows=1 << 16,
        num_host_blocks=HOST_BLOCKS,
        swap_us_per_block=roofline.swap_time(1, BLOCK_SIZE, bandwidth_gb_s * 1e9) * 1e6,
    )
    drawn = draw_requests(
        WorkloadShape(
            num_requests=num_requests, prompt=parse_lengths(workload.prompt), output=parse_lengths(workload.output)
        ),
        capacity.max_request_tokens,
        seed,
    )
    most = workload.max_tokens
    requests = [
        msgspec.structs.replace(
            request, num_output_tokens=min(request.num_output_tokens, most or CONTEXT_LENGTH), max_tokens=most
        )
        for request in drawn
    ]
    load = Load(options=options, requests=requests, times_s=None, context_length=capacity.max_request_tokens)
    return World(options, roofline, capacity, load)


def figures(world: World, **limits: str) -> dict[str, float]:
    return figures_of(simulate(world, Case(label="", limits=SchedulerLimits(**limits))))


def figures_of(result: CaseResult) -> dict[str, float]:
    """Return the figures of a run's window, and the preemptions of the whole run."""
    requests = result.requests
    arrival_s = np.array([request.arrival_s for request in requests])
    start_s, end_s = float(np.sort(arrival_s)[int(WARM_UP_SHARE * len(requests))]), float(arrival_s.max())
    token_s = np.concatenate(
        [request.arrival_s + request.ttft_s + np.cumsum([0.0, *request.itl_ms]) / 1e3 for request in requests]
    )
    num_tokens = np.count_nonzero((token_s > start_s) & (token_s <= end_s))
    step_s = np.array(result.steps.start_s)
    in_window = (step_s >= start_s) & (step_s <= end_s)
    measured = [request for request in requests if request.arrival_s >= start_s]
    ttft_s = [request.ttft_s for request in measured]
    end_to_end_s = [request.end_to_end_s for request in measured]
    itl_ms = np.concatenate([request.itl_ms for request in measured])
    num_needed = sum(request.num_prompt_tokens + request.num_output_tokens - 1 for request in requests)
    # Behind each stop token runs one token more, which was sent before anybody knew.
    num_surplus = sum(request.reason == "stop" for request in requests)
    return {
        "throughput": round(num_tokens / max(end_s - start_s, 1e-9), 1),
        "preemptions": result.totals.num_preemptions,
        "preemptions_of_one": max(request.num_preemptions for request in requests),
        "recomputed": round(100 * (sum(result.steps.num_tokens) - num_surplus - num_needed) / num_needed, 2),
        "swapped_blocks": result.totals.num_swapped_blocks,
        "batch": round(float(np.mean(np.array(result.steps.num_rows)[in_window])), 1),
        "itl_p99": round(float(np.percentile(itl_ms, 99)), 1),
        "ttft_mean": round(float(np.mean(ttft_s)), 2),
        "ttft_p99": round(float(np.percentile(ttft_s, 99)), 2),
        "end_to_end_mean": round(float(np.mean(end_to_end_s)), 2),
        "end_to_end_p99": round(float(np.percentile(end_to_end_s, 99)), 2),
    }


def mean_of(runs: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each figure over seeds; for one request's preemptions, the largest."""
    means = {name: round(sum(run[name] for run in runs) / len(runs), 2) for name in runs[0]}
    return {**means, "preemptions_of_one": max(run["preemptions_of_one"] for run in runs)}


def preemption_rows(
    models: list[str], contexts: list[str], bandwidths: list[float], share: float, seeds: list[int]
) -> Iterator[dict[str, Any]]:
    """Return a row per model, context length, bandwidth and mode."""
    for model in models:
        for context in contexts:
            # It moves nothing, so that the bandwidth does not matter to it.
            recompute = _over_seeds(CONTEXTS[context], model, share, seeds, 1.0, "recompute")
            for bandwidth in bandwidths:
                runs = {"recompute": recompute}
                for mode in MODES[1:]:
                    runs[mode] = _over_seeds(CONTEXTS[context], model, share, seeds, bandwidth, mode)
                best = max(runs["recompute"]["throughput"], runs["swap"]["throughput"])
                for mode in MODES:
                    relative = round(runs[mode]["throughput"] / best, 4) if best else None
                    key = {"model": model, "context": context, "bandwidth_gb_s": bandwidth, "policy": mode}
                    yield {**key, **runs[mode], "relative": relative}


def _over_seeds(
    workload: Workload, model: str, share: float, seeds: list[int], bandwidth_gb_s: float, mode: str
) -> dict[str, float]:
    worlds = [world_of(workload, model=model, share=share, seed=seed, bandwidth_gb_s=bandwidth_gb_s) for seed in seeds]
    return mean_of([figures(world, preemption=mode, reserve="none") for world in worlds])


def reservation_rows(workloads: list[str], share: float, seeds: list[int]) -> Iterator[dict[str, Any]]:
    """Return a row per workload and reservation."""
    for name in workloads:
        worlds = [world_of(RESERVATION_WORKLOADS[name], model="llama-3-8b", share=share, seed=seed) for seed in seeds]
        base = 0.0
        for reserve in RESERVES:
            row = mean_of([figures(world, preemption="recompute", reserve=reserve) for world in worlds])
            base = base or row["throughput"]
            yield {"workload": name, "policy": reserve, **row, "relative": round(row["throughput"] / base, 4)}


class CostBench:
    """A scheduler with about ``num_running`` rows in a pool that they fill, and a queue that does not fit.

    Answers stop with one chance in ``MEAN_LENGTH`` a token, except during the timed ``BLOCKED_STEPS`` of each
    ``PERIOD``.
    """

    MEAN_LENGTH = 300
    PERIOD = 64
    BLOCKED_STEPS = 12
    WARM_UP_STEPS = 900

    def __init__(self, num_running: int, seed: int, limits: dict[str, Any]) -> None:
        self._rng = np.random.default_rng(seed)
        mean_blocks = (288 + self.MEAN_LENGTH) / BLOCK_SIZE + 1
        capacity = ExecutorCapacity(
            num_blocks=round(num_running * mean_blocks),
            block_size=BLOCK_SIZE,
            max_model_len=8192,
            vocab_size=1000,
            max_num_rows=2 * num_running,
            num_host_blocks=1000,
            swap_us_per_block=30.0,
        )
        shared = {"max_num_batched_tokens": 2 * num_running + 8192, "max_num_seqs": 2 * num_running}
        self._core = Scheduler(SchedulerLimits(**shared, **limits, max_num_waiting=1 << 20), capacity)
        self._in_flight: deque[ExecutorOutput] = deque()
        self._num_arrived = 0
        self._now = 0.0

    def run(self, num_periods: int) -> dict[str, float]:
        """Return microseconds of schedule and update in the timed steps, and the numbers of running and waiting
        requests.
        """
        timed: list[tuple[float, int, int]] = []
        for step in range(self.WARM_UP_STEPS + num_periods * self.PERIOD):
            is_blocked = step >= self.WARM_UP_STEPS and step % self.PERIOD >= self.PERIOD - self.BLOCKED_STEPS
            while not is_blocked and self._core.num_waiting < max(16, self._core.num_running // 8):
                self._arrive()
            spent_us = self._step(0.0 if is_blocked else 1 / self.MEAN_LENGTH)
            if is_blocked and step % self.PERIOD > self.PERIOD - self.BLOCKED_STEPS:
                timed.append((spent_us, self._core.num_running, self._core.num_waiting))
        spent, running, waiting = np.array(timed).T
        return {
            "running": round(float(running.mean())),
            "waiting": round(float(waiting.mean())),
            "median_us": round(float(np.median(spent)), 1),
            "mean_us": round(float(spent.mean()), 1),
            "p99_us": round(float(np.percentile(spent, 99)), 1),
        }

    def _arrive(self) -> None:
        token_ids = self._rng.integers(3, 999, size=int(self._rng.integers(64, 512))).astype(np.int32)
        self._core.add_request(
            NewRequestEvent(
                origin=Origin(0, self._num_arrived),
                request_id=str(self._num_arrived),
                token_ids=token_ids,
                num_prompt_tokens=len(token_ids),
                max_tokens=4096,
                sampling=SamplingParams(),
                stop_token_ids=frozenset({2}),
                tenant=str(self._num_arrived % 5),
            ),
            now=self._now,
        )
        self._num_arrived += 1

    def _step(self, stop_share: float) -> float:
        # The thread's own time: what others do on the machine is not in it.
        start = time.thread_time_ns()
        output = self._core.schedule(self._now)
        spent = time.thread_time_ns() - start
        if output is not None:
            newest = self._core._epoch.in_flight[-1]  # noqa: SLF001 - the benchmark plays the executor
            token_ids = self._rng.integers(3, 999, size=len(newest.sampling_rows))
            token_ids[self._rng.random(len(token_ids)) < stop_share] = 2
            self._in_flight.append(
                ExecutorOutput(
                    epoch=0,
                    step=output.step,
                    sampled_token_ids=encode_column(token_ids),
                    state_digest=newest.digest,
                )
            )
        if len(self._in_flight) == self._core.limits.steps_in_flight(num_lanes=1):
            self._now += 0.02
            answer = self._in_flight.popleft()
            start = time.thread_time_ns()
            self._core.update(answer, self._now)
            spent += time.thread_time_ns() - start
        return spent / 1e3


COST_LIMITS: dict[str, dict[str, Any]] = {
    "prompt": {"reserve": "prompt"},
    "predicted": {"reserve": "predicted"},
    "predicted, all on": {
        "reserve": "predicted",
        "order": "fair",
        "budget": "slo",
        "default_itl_slo_ms": 500,
        "prefix_aware": True,
    },
}


def cost_rows(sizes: list[int], num_periods: int, seed: int) -> Iterator[dict[str, Any]]:
    """Return a row per number of running requests and set of limits."""
    for size in sizes:
        for name, limits in COST_LIMITS.items():
            yield {"policy": name, "asked_running": size, **CostBench(size, seed, limits).run(num_periods)}


def shown(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print rows as they come, and return them."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        if not kept:
            print(" ".join(f"{name:>14}" for name in row))
        print(" ".join(f"{value!s:>14}" for value in row.values()), flush=True)
        kept.append(row)
    return kept


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", default="llama-3-8b,llama-2-7b", help="of the sweep of preemption")
    parser.add_argument("--contexts", default=";".join(CONTEXTS), help="of the sweep of preemption, by semicolons")
    parser.add_argument("--bandwidths", default="1,2,5,10,25,50,100", help="to the host, GB/s")
    parser.add_argument("--workloads", default=";".join(RESERVATION_WORKLOADS), help="of reservations, by semicolons")
    parser.add_argument(
        "--running", type=counts, default="256,4096", help="numbers of running requests whose step is timed"
    )
    parser.add_argument("--periods", type=count, default=20, help=f"of {CostBench.PERIOD} steps, for the timing")
    parser.add_argument("--share", type=float, default=1.0, help="of each workload's requests")
    parser.add_argument("--seed", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--seeds", type=count, default=2, help="how many")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    given = parser.parse_args()
    seeds = list(range(given.seed, given.seed + given.seeds))
    bandwidths = [float(bandwidth) for bandwidth in given.bandwidths.split(",")]
    record = {
        "benchmark": "policies_memory",
        **provenance(given.seed),
        "num_seeds": given.seeds,
        "share": given.share,
        "reservation": shown(reservation_rows(given.workloads.split(";"), given.share, seeds)),
        "preemption": shown(
            preemption_rows(given.models.split(","), given.contexts.split(";"), bandwidths, given.share, seeds)
        ),
        "cost": shown(cost_rows(given.running, given.periods, given.seed)),
    }
    write_result(given.output, record)


if __name__ == "__main__":
    main()
