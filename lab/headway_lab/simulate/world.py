"""One kind of device and one workload, and its runs under different limits."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from headway.flags.settings import ConfigurationError
from headway_lab.percentiles import ratio
from headway_lab.simulate.cases import Case
from headway_lab.simulate.collector import RunCollector
from headway_lab.simulate.device import Disturbance, VirtualDevice, parse_slowdowns
from headway_lab.simulate.device_file import read_device
from headway_lab.simulate.hardware import ACCELERATORS, Accelerator
from headway_lab.simulate.loop import Simulation
from headway_lab.simulate.model_shapes import MODEL_SHAPES, ModelShape
from headway_lab.simulate.options import MEASURED_MODEL, SimulationOptions
from headway_lab.simulate.report import CaseResult, ExecutorFigures, QueueColumns, StepColumns
from headway_lab.simulate.roofline import Roofline
from headway_lab.simulate.stations import InTurn, OneQueue, Router, Station
from headway_lab.simulate.transfers import TransferCosts, VirtualPool, VirtualTransfers
from headway_lab.workload.load import Load, make_load
from headway_lab.workload.requests import SAMPLED_TOKENS, STEP_NOISE, PlannedRequest, PromptSource, rng_of
from headway_proto.wording import shown
from headway_scheduler.core.choosing.policies import POLICIES, PlacementPolicy, PlacementSettings
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.view import SchedulerView
from headway_scheduler.figures.fleet_view import sum_of
from headway_scheduler.placement.placement import AGGREGATED

_ADDRESS = "virtual:"
_EPOCH = 1
"""Of each executor: no block was written in an earlier one."""


class World(NamedTuple):
    """The parts that all cases of a command share."""

    options: SimulationOptions
    roofline: Roofline
    capacity: ExecutorCapacity
    load: Load

    @property
    def host_bandwidth(self) -> float:
        """Bytes per second between each device and the host."""
        return _host_bandwidth(self.options, self.roofline.accelerator)


def make_world(options: SimulationOptions) -> World:
    """Return the options' device and workload.

    Raises:
        ConfigurationError: the model does not fit the device, or the workload not the model.
    """
    accelerator, shape = accelerator_and_model(options.model, options.hardware, options.hardware_file)
    if shape.num_layers % options.pipeline_parallel:
        raise ConfigurationError(
            f"--pipeline-parallel: {options.pipeline_parallel} is not allowed; "
            f"allowed: a divisor of {shape.num_layers}, the layers of {shape.name}"
        )
    roofline = Roofline(accelerator, shape, options.tensor_parallel, options.pipeline_parallel)
    if options.max_model_len == 1 or options.max_model_len > shape.context_length:
        raise ConfigurationError(
            f"--max-model-len: {options.max_model_len} is not allowed; allowed: 2 to {shape.context_length}, "
            f"the context of {shape.name}, or 0 for all of it"
        )
    num_blocks = options.num_kv_blocks or roofline.num_blocks(options.block_size)
    if num_blocks < 1:
        raise ConfigurationError(
            f"--tensor-parallel: {shape.name} does not fit into {roofline.num_devices} x {accelerator.name}; "
            "allowed: more devices"
        )
    if options.pipeline_parallel > 1 and options.num_speculative_tokens:
        raise ConfigurationError(
            f"--num-speculative-tokens: {options.num_speculative_tokens} is not allowed with --pipeline-parallel; "
            "allowed: 0, since every stage would wait for the answer"
        )
    capacity = ExecutorCapacity(
        num_blocks=num_blocks,
        block_size=options.block_size,
        max_model_len=options.max_model_len or shape.context_length,
        vocab_size=shape.vocab_size,
        max_num_rows=1 << 16,
        num_host_blocks=options.host_blocks,
        max_speculative_tokens=options.num_speculative_tokens,
        num_lanes=options.pipeline_parallel,
        swap_us_per_block=roofline.swap_time(1, options.block_size, _host_bandwidth(options, accelerator)) * 1e6,
    )
    load = make_load(options, capacity.max_request_tokens)
    if options.max_tokens and not options.trace:
        requests = [_with_limit(request, options.max_tokens) for request in load.requests]
        load = msgspec.structs.replace(load, requests=requests)
    return World(options, roofline, capacity, load)


def _with_limit(request: PlannedRequest, max_tokens: int) -> PlannedRequest:
    num_output_tokens = min(request.num_output_tokens, max_tokens)
    return msgspec.structs.replace(request, num_output_tokens=num_output_tokens, max_tokens=max_tokens)


def accelerator_and_model(model: str, hardware: str, hardware_file: str) -> tuple[Accelerator, ModelShape]:
    """Return what these flags name.

    Raises:
        ConfigurationError: the file is wrong, or holds no model.
    """
    if not hardware_file:
        return ACCELERATORS[hardware], MODEL_SHAPES[model]
    described = read_device(hardware_file)
    if model != MEASURED_MODEL:
        return described.accelerator, MODEL_SHAPES[model]
    if described.model is None:
        raise ConfigurationError(
            f"--model: {model} is not allowed, since {shown(hardware_file)} holds no model; allowed: another model"
        )
    return described.accelerator, described.model


def _host_bandwidth(options: SimulationOptions, accelerator: Accelerator) -> float:
    return options.host_bandwidth_gb_s * 1e9 or accelerator.host_bandwidth * accelerator.host_share


def simulate(
    world: World,
    case: Case,
    on_progress: Callable[[RunCollector, float], None] | None = None,
    *,
    as_replicas: bool = False,
) -> CaseResult:
    """Run one case. ``as_replicas``: the executors have a scheduler each, and requests go to them in turn.

    Raises:
        ConfigurationError: the scheduler refuses these limits.
        NoProgress: it leaves requests waiting for ever.
    """
    policy = _policy_of(world, case)
    # The device has a row for each request that may run, like an executor with the same settings.
    capacity = msgspec.structs.replace(world.capacity, max_num_rows=case.limits.max_num_seqs)
    if policy.has_roles and not capacity.num_host_blocks:
        capacity = msgspec.structs.replace(capacity, num_host_blocks=capacity.num_blocks)
    pools: dict[str, VirtualPool] = {}
    try:
        stations = [_station(world, case, capacity, number, pools) for number in range(world.options.executors)]
    except (KeyError, ValueError) as error:
        raise ConfigurationError(f"{case.label or 'the limits'}: the scheduler refuses {error}") from None
    measurement = RunCollector(len(world.load.requests), world.options.warmup_requests)
    started = time.perf_counter()
    prompts = PromptSource(world.options.seed, capacity.vocab_size)
    router = InTurn(stations) if as_replicas else router_of(stations, case.limits, policy)
    Simulation(router, world.load.arrivals(), prompts, measurement, on_progress).run()
    wall_s = time.perf_counter() - started
    counters = sum_of(SchedulerView(station.core).counters for station in stations)
    return CaseResult(
        case=case,
        totals=measurement.totals(counters, world.load.asked_requests_per_s, len(stations), router.num_moved),
        requests=measurement.requests(),
        steps=step_columns(measurement),
        queue=queue_columns(measurement),
        wall_s=wall_s,
        executors=executor_figures(stations, measurement) if len(stations) > 1 else [],
    )


def router_of(stations: Sequence[Station], limits: SchedulerLimits, policy: PlacementPolicy = AGGREGATED) -> Router:
    """Return what a scheduler does: with one executor, its core queues every request."""
    return InTurn(stations) if len(stations) == 1 else OneQueue(stations, limits, policy)


def _policy_of(world: World, case: Case) -> PlacementPolicy:
    roles, num_executors = world.options.executor_roles, world.options.executors
    if num_executors == 1:
        return AGGREGATED
    return POLICIES[PlacementSettings(case.placement, roles).name_for(case.limits, num_executors)]


def executor_figures(stations: Sequence[Station], measurement: RunCollector) -> list[ExecutorFigures]:
    """Return what each executor did in the whole run, warm-up included."""
    num_ended = sum(station.num_ended for station in stations)
    span_s = measurement.steps[-1].end_s if measurement.steps else 0.0
    counters = [SchedulerView(station.core).counters for station in stations]
    return [
        ExecutorFigures(
            share_of_requests=ratio(station.num_ended, num_ended),
            busy_share=ratio(station.busy_s, span_s),
            prefix_hit_rate=ratio(counted.num_prefix_hit_tokens, counted.num_prefix_query_tokens),
        )
        for station, counted in zip(stations, counters, strict=True)
    ]


def transfer_costs(world: World) -> TransferCosts:
    """Return what blocks between two executors cost."""
    options, roofline, block_size = world.options, world.roofline, world.options.block_size
    accelerator = roofline.accelerator
    bandwidth = options.transfer_bandwidth_gb_s * 1e9 or accelerator.link_bandwidth * accelerator.link_share
    host_block_s = 0.0 if options.transfer_direct else roofline.swap_time(1, block_size, world.host_bandwidth)
    return TransferCosts(host_block_s, roofline.swap_time(1, block_size, bandwidth), options.transfer_latency_us / 1e6)


def _station(
    world: World, case: Case, capacity: ExecutorCapacity, number: int, pools: dict[str, VirtualPool]
) -> Station:
    options = world.options
    own_stream = (number,) if number else ()
    transfers = None
    if options.executors > 1 and capacity.num_host_blocks:
        capacity = msgspec.structs.replace(capacity, host_pool=f"pool-{number}", block_addresses=(_ADDRESS,))
        transfers = VirtualTransfers(transfer_costs(world), pools, capacity.host_pool, capacity.num_host_blocks)
    device = VirtualDevice(
        world.roofline,
        capacity,
        rng_of(options.seed, SAMPLED_TOKENS, *own_stream),
        host_bandwidth=world.host_bandwidth,
        disturbance=_disturbance(options, own_stream),
        lengths={request.number: request.num_output_tokens for request in world.load.requests if request.is_stopped},
        acceptance=options.speculative_acceptance,
        transfers=transfers,
    )
    return Station(Scheduler(case.limits, capacity, _EPOCH), device, number, options.executor_roles[number])


def _disturbance(options: SimulationOptions, own_stream: tuple[int, ...]) -> Disturbance | None:
    if not options.noise and not options.slowdown:
        return None
    return Disturbance(options.noise, parse_slowdowns(options.slowdown), rng_of(options.seed, STEP_NOISE, *own_stream))


def step_columns(measurement: RunCollector) -> StepColumns:
    """Return the steps of a run."""
    steps = measurement.steps
    return StepColumns(
        start_s=[round(step.start_s, 9) for step in steps],
        step_ms=[round((step.end_s - step.start_s) * 1e3, 6) for step in steps],
        num_tokens=[step.num_tokens for step in steps],
        num_rows=[step.num_rows for step in steps],
        num_decodes=[step.num_decodes for step in steps],
        num_swapped_blocks=[step.num_swapped_blocks for step in steps],
    )


def queue_columns(measurement: RunCollector) -> QueueColumns:
    """Return the queue of a run."""
    return QueueColumns(
        time_s=[round(now, 9) for now, _, _ in measurement.queue],
        num_running=[running for _, running, _ in measurement.queue],
        num_waiting=[waiting for _, _, waiting in measurement.queue],
    )
