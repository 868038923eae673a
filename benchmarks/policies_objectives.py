"""Whether the policies keep their promises: the real scheduler in virtual time, on simulated devices.

Owns: the workloads, the runs, the tables and the result file. Must not know: how the scheduler decides.

- *slo*: with ``budget=slo`` and an objective of 50 ms, the 99th percentile of gaps between tokens, and the throughput
  relative to the best fixed budget that keeps the objective. Devices are always busy.
- *priority*: four classes at three times the rate that can be served, a tenth of it REALTIME. REALTIME's time to the
  first token against the same requests alone; and how many LOW requests end by the last arrival.
- *fair*: one tenant sends three times what can be served and one a tenth of it. The latter's time to the first token
  against the same requests alone.
- *backlog*: two tenants that always wait. The largest difference of their service over any part of that time (prompt
  tokens once, when a request starts, and output tokens twice, over their weights), against the bound of Sheng et al.
  (OSDI 2024, Theorem 4.4), ``2 max(longest prompt, 2 tokens that fit the pool)``, over the least weight.

Step times vary by 3%. A REALTIME or modest request always waits for the steps in flight when it comes (one and a half
on average) and shares its steps with decodes. So the ratio is near 1 for prompts of many steps, as here, and larger for
prompts of one.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headway_lab.percentiles import percentiles
from headway_lab.simulate.cases import Case
from headway_lab.simulate.collector import RunCollector
from headway_lab.simulate.device import Disturbance, VirtualDevice
from headway_lab.simulate.loop import Simulation
from headway_lab.simulate.options import SimulationOptions
from headway_lab.simulate.stations import InTurn, Station
from headway_lab.simulate.world import World, make_world, simulate
from headway_lab.workload.arrivals import Arrivals, ClosedArrivals, OpenArrivals, gamma_times
from headway_lab.workload.lengths import parse_lengths
from headway_lab.workload.requests import (
    ARRIVALS,
    SAMPLED_TOKENS,
    STEP_NOISE,
    PlannedRequest,
    PromptSource,
    Tenant,
    WorkloadShape,
    draw_requests,
    parse_tenants,
    rng_of,
)
from headway_proto.step import ExecutorOutput
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.events import StepEvents
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from program import parser_of, provenance, write_result

NOISE = 0.03
OBJECTIVE_MS = 50
UNBOUNDED_QUEUE = 1 << 20
PLENTY = 8192

DEVICES = {
    "a100 8b": {"hardware": "a100-80g", "model": "llama-3-8b"},
    "h100 8b": {"hardware": "h100", "model": "llama-3-8b"},
    "h200 8b": {"hardware": "h200", "model": "llama-3-8b"},
    "h100 70b x4": {"hardware": "h100", "model": "llama-3-70b", "tensor_parallel": 4},
    "h200 70b x4": {"hardware": "h200", "model": "llama-3-70b", "tensor_parallel": 4},
}

SLO_DEVICES = ("a100 8b", "h100 70b x4", "h200 8b")
FIXED_BUDGETS = (
    *range(128, 832, 64),
    *(896, 1024, 1152, 1280, 1408, 1536, 1664, 1792, 1920, 2048, 2304, 2560, 3072, 4096, 8192),
)
SLO_WORKLOADS: dict[str, dict[str, Any]] = {
    "chat": {
        "users": 128,
        "prompt_tokens": "lognormal:400,1.0,4000",
        "output_tokens": "lognormal:150,0.8,1000",
    },
    "long prompts": {"users": 64, "prompt_tokens": "uniform:1500,4000", "output_tokens": "uniform:20,150"},
    "bursts with prefixes": {
        "arrivals": "gamma",
        "rate": 40.0,
        "variation": 3.0,
        "prefixes": 8,
        "prefix_tokens": 1024,
        "prompt_tokens": "lognormal:300,1.0,4000",
        "output_tokens": "lognormal:100,0.8,800",
    },
}

CLASSES = {"realtime": "0.1:realtime", "high": "0.2:high", "normal": "0.4:normal", "low": "0.3:low"}
OVERLOAD = 3.0
MODEST_LOAD = 0.1
SATURATING_USERS = 128
TIMES_OF_FIRST, TIMES_OF_SECOND = 100, 101
"""Streams of random numbers beside those of the simulation."""


class Latency(NamedTuple):
    """Times to the first token, in milliseconds."""

    p50: float
    p99: float


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """A device, the lengths of its requests, and the scheduler's settings."""

    device: str
    prompts: str
    outputs: str
    limits: dict[str, Any]
    num_kv_blocks: int = 0

    def world(self, seed: int) -> World:
        """Return the device."""
        options = SimulationOptions(
            **DEVICES[self.device], num_kv_blocks=self.num_kv_blocks, num_requests=1, noise=NOISE, seed=seed
        )
        return make_world(options)

    def scheduler_limits(self, order: str) -> SchedulerLimits:
        """Return the limits with ``order``."""
        return SchedulerLimits(**{"order": order, "max_num_waiting": UNBOUNDED_QUEUE, **self.limits})

    def draw(self, world: World, tenants: Sequence[Tenant], num_requests: int, seed: int) -> list[PlannedRequest]:
        """Draw requests with these lengths."""
        shape = WorkloadShape(
            num_requests=num_requests,
            prompt=parse_lengths(self.prompts),
            output=parse_lengths(self.outputs),
            tenants=tenants,
        )
        return draw_requests(shape, world.capacity.max_request_tokens, seed)

    def described(self) -> dict[str, Any]:
        """Return it for the result file."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value or name == "limits"}


def documents(device: str, objective_ms: int, **limits: Any) -> Setup:
    """Long prompts and short answers, with a budget that keeps steps short."""
    return Setup(
        device=device,
        prompts="lognormal:4000,0.4,8000",
        outputs="lognormal:80,0.7,600",
        limits={
            "budget": "slo",
            "default_itl_slo_ms": objective_ms,
            "max_num_batched_tokens": PLENTY,
            **limits,
        },
    )


def questions(device: str, **limits: Any) -> Setup:
    """Prompts that take one step or two."""
    return Setup(device=device, prompts="lognormal:600,0.8,4000", outputs="lognormal:200,0.7,1000", limits=dict(limits))


LATENCY_SETUPS = (
    documents("h100 70b x4", 50),
    documents("h200 70b x4", 40),
    documents("h200 8b", 20),
    documents("h200 8b", 20, max_steps_in_flight=1),
    questions("h100 8b", budget="slo", default_itl_slo_ms=25, max_num_batched_tokens=PLENTY),
    questions("h100 8b", max_num_batched_tokens=512, max_num_seqs=64),
    questions("h100 8b"),
)
"""The first two are what is promised; the others tell what becomes of the ratio where prompts take few steps."""

BACKLOG_SETUPS = (
    documents("h100 8b", 20),
    Setup(
        device="h100 8b",
        prompts="lognormal:600,0.8,4000",
        outputs="lognormal:200,0.7,1000",
        limits={"max_num_seqs": 64},
        num_kv_blocks=2048,
    ),
)


def latency_of(latencies_s: Sequence[float]) -> Latency:
    values = percentiles([1e3 * latency for latency in latencies_s])
    return Latency(round(values.p50 or 0.0, 1), round(values.p99 or 0.0, 1))


# ------------------------------------------------------------------------------------------------------------- slo


def keep_objective(device: str, workload: str, budgets: Sequence[int], num_requests: int, seed: int) -> dict[str, Any]:
    """Return a row: ``budget=slo`` against the best of the fixed ``budgets``."""
    options = SimulationOptions(
        **DEVICES[device], **SLO_WORKLOADS[workload], num_requests=num_requests, noise=NOISE, seed=seed
    )
    world = make_world(options)

    def run(**limits: Any) -> tuple[float, float]:
        case = Case(label="", limits=SchedulerLimits(default_itl_slo_ms=OBJECTIVE_MS, **limits))
        totals = simulate(world, case).totals
        assert totals.itl_ms.p99 is not None
        return totals.itl_ms.p99, totals.output_tokens_per_s

    swept = {budget: run(max_num_batched_tokens=budget) for budget in budgets}
    kept = {budget: rate for budget, (p99_ms, rate) in swept.items() if p99_ms <= OBJECTIVE_MS}
    best = max(kept, key=kept.__getitem__)
    p99_ms, rate = run(budget="slo", max_num_batched_tokens=PLENTY)
    return {
        "device": device,
        "workload": workload,
        "itl_p99_ms": round(p99_ms, 1),
        "output_tokens_per_s": round(rate),
        "best_fixed_budget": best,
        "best_fixed_itl_p99_ms": round(swept[best][0], 1),
        "best_fixed_output_tokens_per_s": round(kept[best]),
        "throughput_ratio": round(rate / kept[best], 3),
        "default_budget_itl_p99_ms": round(swept[2048][0], 1) if 2048 in swept else None,
    }


# ------------------------------------------------------------------------------------------ runs of planned requests


class WatchedScheduler:
    """The core, with each tenant's service after each step."""

    def __init__(self, limits: SchedulerLimits, capacity: ExecutorCapacity) -> None:
        self._core = Scheduler(limits, capacity)
        self.tenants: list[str] = []
        self.history: list[tuple[list[float], list[bool]]] = []
        """After each step: the weighted service of each tenant, and whether it has a request that has not started."""
        self._news: dict[Origin, NewRequestEvent] = {}
        self._place: dict[int, int] = {}
        self._service: list[float] = []
        self._num_waiting: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def add_request(self, new: NewRequestEvent, now: float) -> None:
        """Record the request's tenant."""
        self._core.add_request(new, now)
        if new.tenant not in self.tenants:
            self.tenants.append(new.tenant)
            self._service.append(0.0)
            self._num_waiting.append(0)
        self._news[new.origin] = new
        self._place[new.origin.handle] = self.tenants.index(new.tenant)
        self._num_waiting[self._place[new.origin.handle]] += 1

    def update(self, output: ExecutorOutput, now: float) -> StepEvents:
        """Add up the service of each tenant."""
        events = self._core.update(output, now)
        for event in events.admitted:
            place = self._place[event.origin.handle]
            self._num_waiting[place] -= 1
            self._service[place] += self._news[event.origin].num_prompt_tokens / self._weight(place)
        for handle in events.handles.tolist():
            place = self._place[handle]
            self._service[place] += 2.0 / self._weight(place)
        self.history.append((self._service.copy(), [count > 0 for count in self._num_waiting]))
        return events

    def _weight(self, place: int) -> float:
        return self.limits.tenant_weights.get(self.tenants[place], 1.0)


class Seen(Exception):  # noqa: N818 - it names why a run is over
    """The measured part is over; the rest does not matter."""


def run_requests(
    world: World,
    scheduler: Scheduler,
    arrivals: Arrivals,
    num_requests: int,
    seed: int,
    *,
    is_over: Callable[[float], bool] | None = None,
) -> RunCollector:
    """Run ``scheduler`` on the world's device until all requests have ended or ``is_over``, checked after each step."""
    device = VirtualDevice(
        world.roofline,
        scheduler.capacity,
        rng_of(seed, SAMPLED_TOKENS),
        host_bandwidth=world.host_bandwidth,
        disturbance=Disturbance(NOISE, (), rng_of(seed, STEP_NOISE)),
    )
    measurement = RunCollector(num_requests)
    prompts = PromptSource(seed, scheduler.capacity.vocab_size)

    def after_step(_: RunCollector, now: float) -> None:
        if is_over is not None and is_over(now):
            raise Seen

    with suppress(Seen):
        Simulation(InTurn([Station(scheduler, device)]), arrivals, prompts, measurement, after_step).run()
    return measurement


def scheduler_for(world: World, limits: SchedulerLimits) -> Scheduler:
    return Scheduler(limits, capacity_for(world, limits))


def capacity_for(world: World, limits: SchedulerLimits) -> ExecutorCapacity:
    return msgspec.structs.replace(world.capacity, max_num_rows=limits.max_num_seqs)


def served_rate(world: World, limits: SchedulerLimits, requests: Sequence[PlannedRequest], seed: int) -> float:
    """Return requests per second with more users than can be served at once."""
    scheduler = scheduler_for(world, limits)
    users = max(SATURATING_USERS, limits.max_num_seqs // 2)
    measurement = run_requests(world, scheduler, ClosedArrivals(requests, users, 0.0), len(requests), seed)
    return measurement.totals(scheduler.counters, None).requests_per_s


Timed = list[tuple[float, PlannedRequest]]


def open_run(
    world: World, limits: SchedulerLimits, timed: Timed, seed: int, *, tenant: str
) -> tuple[RunCollector, Scheduler]:
    """Send requests at given times until the last has arrived and those of ``tenant`` have ended."""
    requests = [msgspec.structs.replace(request, number=number) for number, (_, request) in enumerate(timed)]
    scheduler = scheduler_for(world, limits)
    arrivals = OpenArrivals(requests, [time_s for time_s, _ in timed])

    def is_over(now: float) -> bool:
        return now > timed[-1][0] and all(live.new.tenant != tenant for live in scheduler.requests())

    return run_requests(world, scheduler, arrivals, len(requests), seed, is_over=is_over), scheduler


def first_tokens(measurement: RunCollector, *, tenant: str) -> Latency:
    return latency_of([request.ttft_s for request in measurement.requests() if request.tenant == tenant])


# -------------------------------------------------------------------------------------------------------- priority


def overload_by_class(setup: Setup, num_requests: int, seed: int, **limits: Any) -> dict[str, Any]:
    """Return a row: REALTIME among three times what can be served, and alone."""
    world = setup.world(seed)
    settings = msgspec.structs.replace(setup.scheduler_limits("priority"), **limits)
    requests = setup.draw(world, parse_tenants(CLASSES), num_requests, seed)
    served = served_rate(world, settings, requests[: min(num_requests, 400)], seed)
    times_s = gamma_times(rng_of(seed, ARRIVALS), num_requests, OVERLOAD * served, 1.0).tolist()
    timed = list(zip(times_s, requests, strict=True))
    alone, _ = open_run(
        world, settings, [entry for entry in timed if entry[1].tenant == "realtime"], seed, tenant="realtime"
    )
    loaded, scheduler = open_run(world, settings, timed, seed, tenant="realtime")
    before, among = first_tokens(alone, tenant="realtime"), first_tokens(loaded, tenant="realtime")
    in_time = [end for end in loaded.requests() if end.arrival_s + end.end_to_end_s <= times_s[-1]]
    return {
        "setup": setup.described(),
        "served_requests_per_s": round(served, 1),
        "overload_s": round(times_s[-1], 1),
        "num_realtime": sum(request.tenant == "realtime" for request in requests),
        "alone_ttft_ms": before._asdict(),
        "ttft_ms": among._asdict(),
        "ratio_p50": round(among.p50 / before.p50, 2),
        "ratio_p99": round(among.p99 / before.p99, 2),
        "ended_in_overload": {name: sum(end.tenant == name for end in in_time) for name in CLASSES},
        "num_preemptions": scheduler.counters.num_preemptions,
    }


# ------------------------------------------------------------------------------------------------------------ fair


def modest_beside_flood(setup: Setup, num_modest: int, seed: int, order: str = "fair") -> dict[str, Any]:
    """Return a row: a modest tenant beside one that floods, and alone."""
    world = setup.world(seed)
    limits = setup.scheduler_limits(order)
    flood, modest = (Tenant(name=name, share=1.0) for name in ("flood", "modest"))
    served = served_rate(world, limits, setup.draw(world, (flood,), 400, seed), seed)
    span_s = num_modest / (MODEST_LOAD * served)
    num_flood = int(span_s * OVERLOAD * served)
    own = _timed(setup.draw(world, (modest,), num_modest, seed + 1), MODEST_LOAD * served, seed, TIMES_OF_FIRST)
    others = _timed(setup.draw(world, (flood,), num_flood, seed), OVERLOAD * served, seed, TIMES_OF_SECOND)
    alone, _ = open_run(world, limits, own, seed, tenant="modest")
    both = sorted(own + others, key=lambda entry: entry[0])
    loaded, scheduler = open_run(world, limits, both, seed, tenant="modest")
    before, beside = first_tokens(alone, tenant="modest"), first_tokens(loaded, tenant="modest")
    return {
        "setup": setup.described(),
        "order": order,
        "served_requests_per_s": round(served, 1),
        "num_modest": num_modest,
        "alone_ttft_ms": before._asdict(),
        "ttft_ms": beside._asdict(),
        "ratio_p50": round(beside.p50 / before.p50, 2),
        "ratio_p99": round(beside.p99 / before.p99, 2),
        "num_preemptions": scheduler.counters.num_preemptions,
    }


def _timed(requests: Sequence[PlannedRequest], rate: float, seed: int, stream: int) -> Timed:
    times_s = gamma_times(rng_of(seed, stream), len(requests), rate, 1.0).tolist()
    return list(zip(times_s, requests, strict=True))


def both_backlogged(
    setup: Setup, weights: dict[str, float], num_requests: int, seed: int, order: str = "fair"
) -> dict[str, Any]:
    """Return a row: two tenants that always wait; the first sends four times as much."""
    world = setup.world(seed)
    limits = msgspec.structs.replace(setup.scheduler_limits(order), tenant_weights=weights)
    tenants = (Tenant(name="flood", share=4.0), Tenant(name="other", share=1.0))
    requests = setup.draw(world, tenants, num_requests, seed)
    # All at once, so that both wait until the other's last has started.
    scheduler = WatchedScheduler(limits, capacity_for(world, limits))

    def is_over(now: float) -> bool:
        return now > 0 and not all(scheduler.history[-1][1])

    arrivals = OpenArrivals(requests, [0.0] * num_requests)
    run_requests(world, scheduler, arrivals, num_requests, seed, is_over=is_over)
    longest = max(request.num_prompt_tokens for request in requests)
    pool_tokens = world.capacity.num_blocks * world.capacity.block_size
    bound = 2.0 * max(longest, 2 * pool_tokens) / min([*weights.values(), 1.0])
    difference, shares = _difference(scheduler)
    return {
        "setup": setup.described(),
        "order": order,
        "weights": weights,
        "largest_difference": round(difference),
        "bound": round(bound),
        "of_bound": round(difference / bound, 4),
        "service_while_both_wait": shares,
    }


def _difference(scheduler: WatchedScheduler) -> tuple[float, dict[str, float]]:
    """Return the largest difference over any interval in which both wait, and the service of both until one stops
    waiting.
    """
    least = most = 0.0
    shares = [0.0, 0.0]
    for service, waits in scheduler.history:
        if not all(waits):
            break
        ahead = service[0] - service[1]
        least, most = min(least, ahead), max(most, ahead)
        shares = service
    return most - least, dict(zip(scheduler.tenants, map(round, shares), strict=True))


# ------------------------------------------------------------------------------------------------------------ tables


def show(title: str, rows: list[dict[str, Any]], line: Callable[[dict[str, Any]], str]) -> None:
    print(title)
    for row in rows:
        print("   ", line(row))


def run_all(*, scale: float, seed: int) -> dict[str, Any]:
    def count(number: int) -> int:
        return max(int(number * scale), 40)

    small = scale < 1
    devices, budgets = SLO_DEVICES[:1] if small else SLO_DEVICES, (256, 512, 2048) if small else FIXED_BUDGETS
    setups = LATENCY_SETUPS[:1] if small else LATENCY_SETUPS
    slo = [
        keep_objective(device, workload, budgets, count(600), seed) for device in devices for workload in SLO_WORKLOADS
    ]
    show(
        f"slo: objective {OBJECTIVE_MS} ms",
        slo,
        lambda row: (
            f"{row['device']:12} {row['workload']:22} P99 {row['itl_p99_ms']:5} ms  {row['output_tokens_per_s']:5}/s  "
            f"best fixed {row['best_fixed_budget']:5} {row['best_fixed_output_tokens_per_s']:5}/s  "
            f"ratio {row['throughput_ratio']}  P99 with 2048: {row['default_budget_itl_p99_ms']} ms"
        ),
    )
    priority = [overload_by_class(setup, count(2000), seed) for setup in setups]
    show(
        "priority: REALTIME's first token at three times what can be served",
        priority,
        lambda row: _latency_line(row) + f"  ended in overload {row['ended_in_overload']}",
    )
    fair = [
        modest_beside_flood(setup, count(120), seed, order)
        for setup in setups
        for order in ("fair", "fcfs")[: 2 - small]
    ]
    show(
        "fair: a modest tenant's first token beside a flood", fair, lambda row: f"{row['order']:5} {_latency_line(row)}"
    )
    backlog = [
        both_backlogged(setup, weights, count(1200), seed, order)
        for setup in BACKLOG_SETUPS[-1 if small else 0 :]
        for weights, order in (({}, "fair"), ({"flood": 1.0, "other": 3.0}, "fair"), ({}, "fcfs"))
    ]
    show(
        "backlog: how far the service of two tenants differs while both wait",
        backlog,
        lambda row: (
            f"{row['setup']['device']:12} {row['order']:5} weights {row['weights'] or 'equal'}: "
            f"{row['largest_difference']} of {row['bound']} ({row['service_while_both_wait']})"
        ),
    )
    return {"slo": slo, "priority": priority, "fair": fair, "backlog": backlog}


def _latency_line(row: dict[str, Any]) -> str:
    limits = {name: value for name, value in row["setup"]["limits"].items() if name != "budget"}
    alone, loaded = row["alone_ttft_ms"], row["ttft_ms"]
    return (
        f"{row['setup']['device']:12} {row['setup']['prompts']:24} {limits}: alone {alone['p50']}/{alone['p99']} ms, "
        f"loaded {loaded['p50']}/{loaded['p99']} ms, ratio {row['ratio_p50']}/{row['ratio_p99']}"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: fewer requests, devices and settings")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    arguments = parser.parse_args()
    tables = run_all(scale=arguments.scale, seed=arguments.seed)
    record = {
        "benchmark": "policies_objectives",
        **provenance(arguments.seed),
        "scale": arguments.scale,
        "step_noise": NOISE,
        **tables,
    }
    write_result(arguments.output, record)


if __name__ == "__main__":
    main()
