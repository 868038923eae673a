"""``headway simulate``: from flags to runs to the report.

Owns: the command's flags, its order of work, and its exit codes (1: the scheduler has stopped for ever; 2: the command
line or a file is wrong; 130: Ctrl-C).
Must not know: what a step costs, what is measured, or how a result looks.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headway.configuration import add_flags, build, given_by_flags
from headway.settings import ConfigurationError, settings_of, shown
from headway.simulate.arrivals import Arrivals, ClosedArrivals, OpenArrivals, gamma_times
from headway.simulate.cases import Case, limit_settings, make_cases
from headway.simulate.device import VirtualDevice
from headway.simulate.hardware import ACCELERATORS
from headway.simulate.lengths import parse_lengths
from headway.simulate.loop import NoProgress, Simulation
from headway.simulate.measurement import Measurement
from headway.simulate.model_shapes import MODEL_SHAPES
from headway.simulate.options import SimulationOptions
from headway.simulate.progress import ProgressLine
from headway.simulate.report import CaseResult, QueueColumns, StepColumns, as_json, knee_of, table
from headway.simulate.roofline import Roofline
from headway.simulate.trace import read_trace
from headway.simulate.workload import (
    ARRIVALS,
    SAMPLED_TOKENS,
    PlannedRequest,
    PromptSource,
    WorkloadShape,
    draw_requests,
    parse_tenants,
    rng_of,
)
from headway_scheduler.core.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.scheduler import Scheduler

STOPPED_EXIT_CODE = 1
INTERRUPTED_EXIT_CODE = 130
_POISSON_VARIATION = 1.0


class World(NamedTuple):
    """What all cases of a run share. ``times_s`` is None where users wait for their answers."""

    options: SimulationOptions
    roofline: Roofline
    capacity: ExecutorCapacity
    requests: Sequence[PlannedRequest]
    times_s: Sequence[float] | None

    @property
    def asked_requests_per_s(self) -> float | None:
        """The rate that open arrivals were drawn for, or that a trace has."""
        if self.times_s is None:
            return None
        if not self.options.trace:
            return self.options.rate
        span_s = self.times_s[-1] - self.times_s[0]
        return (len(self.times_s) - 1) / span_s if span_s else None

    def arrivals(self) -> Arrivals:
        """A fresh source of the requests."""
        if self.times_s is None:
            return ClosedArrivals(self.requests, self.options.users, self.options.think_s)
        return OpenArrivals(self.requests, self.times_s)


def add_simulate_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``headway simulate``."""
    add_flags(parser, settings_of(SimulationOptions).values(), title="device, workload and output")
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="FIELD=VALUE,...",
        help="a case with these limits of the scheduler; may be repeated",
    )
    add_flags(parser, limit_settings().values(), title="the scheduler's limits")


def run(arguments: argparse.Namespace) -> int:
    """Simulate and report; return the exit code.

    Raises:
        ConfigurationError: a flag or a file cannot be used.
    """
    given = given_by_flags(arguments, settings_of(SimulationOptions))
    options = build(SimulationOptions, given, SimulationOptions.validate)
    limits = given_by_flags(arguments, limit_settings())
    cases = make_cases(limits, options.compare, options.sweep_budget, arguments.case)
    _check_outputs(options)
    world = make_world(options)
    try:
        results = _run_all(world, cases)
    except KeyboardInterrupt:
        sys.stderr.write("headway simulate: cancelled\n")
        return INTERRUPTED_EXIT_CODE
    except NoProgress as error:
        sys.stderr.write(f"headway simulate: the scheduler has stopped for ever: {error}\n")
        return STOPPED_EXIT_CODE
    knee = knee_of(results) if options.sweep_budget else None
    sys.stdout.write(f"{_title(world)}\n\n{table(results, knee)}")
    _write_outputs(world, results, knee)
    return 0


def make_world(options: SimulationOptions) -> World:
    """Return the device and the workload that the options describe.

    Raises:
        ConfigurationError: the model does not fit the device, or the workload not the model.
    """
    shape = MODEL_SHAPES[options.model]
    roofline = Roofline(ACCELERATORS[options.hardware], shape, options.tensor_parallel)
    num_blocks = options.num_kv_blocks or roofline.num_blocks(options.block_size)
    if num_blocks < 1:
        raise ConfigurationError(
            f"--tensor-parallel: {options.model} does not fit into {options.tensor_parallel} x {options.hardware}; "
            "allowed: more devices"
        )
    capacity = ExecutorCapacity(
        num_blocks=num_blocks,
        block_size=options.block_size,
        max_model_len=options.max_model_len or shape.context_length,
        vocab_size=shape.vocab_size,
        max_num_rows=1 << 16,
    )
    if options.trace:
        requests, times_s = read_trace(options.trace)
        if options.warmup_requests >= len(requests):
            raise ConfigurationError(
                f"--warmup-requests: {options.warmup_requests} is not allowed; "
                f"allowed: fewer than the trace has, {len(requests)}"
            )
        return World(options, roofline, capacity, requests, times_s)
    context_length = capacity.max_request_tokens
    if options.prefix_tokens > context_length - 2:
        raise ConfigurationError(
            f"--prefix-tokens: {options.prefix_tokens} is not allowed; allowed: at most {max(context_length - 2, 0)}, "
            "so that a prompt and an answer fit beside it"
        )
    workload = WorkloadShape(
        num_requests=options.num_requests,
        prompt=parse_lengths(options.prompt_tokens),
        output=parse_lengths(options.output_tokens),
        num_prefixes=options.prefixes,
        num_prefix_tokens=options.prefix_tokens,
        tenants=parse_tenants(options.tenants),
    )
    requests = draw_requests(workload, context_length, options.seed)
    return World(options, roofline, capacity, requests, _arrival_times(options))


def _arrival_times(options: SimulationOptions) -> list[float] | None:
    if options.arrivals == "closed":
        return None
    variation = options.variation if options.arrivals == "gamma" else _POISSON_VARIATION
    times: list[float] = gamma_times(
        rng_of(options.seed, ARRIVALS), options.num_requests, options.rate, variation
    ).tolist()
    return times


def simulate(world: World, case: Case, progress: ProgressLine | None = None, title: str = "") -> CaseResult:
    """Run one case.

    Raises:
        ConfigurationError: the scheduler does not take these limits.
        NoProgress: it leaves requests waiting for ever.
    """
    # Rows that no request can get cost memory for nothing, and the digests of both ends compare like with like.
    capacity = msgspec.structs.replace(world.capacity, max_num_rows=_num_rows(case.limits))
    try:
        scheduler = Scheduler(case.limits, capacity)
    except (KeyError, ValueError) as error:
        raise ConfigurationError(f"{case.label or 'the limits'}: the scheduler refuses {error}") from None
    device = VirtualDevice(world.roofline, capacity, rng_of(world.options.seed, SAMPLED_TOKENS))
    measurement = Measurement(len(world.requests), world.options.warmup_requests)

    def on_progress(measurement: Measurement, now: float) -> None:
        if progress is not None:
            progress.show(title, measurement.num_ended, len(world.requests), now)

    started = time.perf_counter()
    prompts = PromptSource(world.options.seed, capacity.vocab_size)
    Simulation(scheduler, device, world.arrivals(), prompts, measurement, on_progress).run()
    wall_s = time.perf_counter() - started
    return CaseResult(
        case=case,
        totals=measurement.totals(scheduler.counters, world.asked_requests_per_s),
        requests=measurement.requests(),
        steps=_step_columns(measurement),
        queue=_queue_columns(measurement),
        wall_s=wall_s,
    )


def _num_rows(limits: SchedulerLimits) -> int:
    return min(limits.max_num_seqs, limits.max_num_batched_tokens)


def _run_all(world: World, cases: Sequence[Case]) -> list[CaseResult]:
    progress = ProgressLine(sys.stderr)
    results = []
    try:
        for number, case in enumerate(cases, start=1):
            title = f"case {number} of {len(cases)}: {case.label}" if len(cases) > 1 else ""
            results.append(simulate(world, case, progress, title))
    finally:
        progress.erase()
    return results


def _step_columns(measurement: Measurement) -> StepColumns:
    steps = measurement.steps
    return StepColumns(
        start_s=[round(step.start_s, 9) for step in steps],
        step_ms=[round((step.end_s - step.start_s) * 1e3, 6) for step in steps],
        num_tokens=[step.num_tokens for step in steps],
        num_rows=[step.num_rows for step in steps],
        num_decodes=[step.num_decodes for step in steps],
    )


def _queue_columns(measurement: Measurement) -> QueueColumns:
    return QueueColumns(
        time_s=[round(now, 9) for now, _, _ in measurement.queue],
        num_running=[running for _, running, _ in measurement.queue],
        num_waiting=[waiting for _, _, waiting in measurement.queue],
    )


def _title(world: World) -> str:
    options, capacity = world.options, world.capacity
    if options.trace:
        arrivals = f"trace {options.trace}"
    elif options.arrivals == "closed":
        arrivals = f"{options.users} users" + f" who think for {options.think_s:g} s" * (options.think_s > 0)
    else:
        arrivals = f"{options.arrivals} arrivals at {options.rate:g}/s"
    devices = f"{options.tensor_parallel} x {options.hardware}"
    return (
        f"{options.model} on {devices}, {capacity.num_blocks} KV blocks of {capacity.block_size}; "
        f"{len(world.requests)} requests, {arrivals}; seed {options.seed}"
    )


def _check_outputs(options: SimulationOptions) -> None:
    """Refuse before a long run what could not be written after it."""
    for flag, path in (("--json", options.json), ("--png", options.png)):
        if path and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
            raise ConfigurationError(
                f"{flag}: {shown(path)} is not allowed; allowed: a file in a directory that exists"
            )
    if options.png and importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("--png: this host lacks matplotlib; install it, or headway[dev], or leave --png out")


def _write_outputs(world: World, results: Sequence[CaseResult], knee: CaseResult | None) -> None:
    options = world.options
    if options.json:
        document = as_json(_described(world), results, knee)
        _write("--json", options.json, lambda path: path.write_bytes(document))
    if options.png:
        from headway.simulate.picture import draw

        _write("--png", options.png, lambda path: draw(path, _title(world), results, knee))


def _write(flag: str, path: str, write: Callable[[Path], object]) -> None:
    try:
        write(Path(path))
    except OSError as error:
        raise ConfigurationError(f"{flag}: cannot write {shown(path)}: {error.strerror}") from None


def _described(world: World) -> dict[str, Any]:
    """What was simulated. Where the result goes is no part of it."""
    asked = msgspec.structs.asdict(world.options)
    options = {name: value for name, value in asked.items() if name not in {"json", "png", "sweep_budget", "compare"}}
    return {
        "options": options,
        "accelerator": world.roofline.accelerator,
        "model": world.roofline.shape,
        "capacity": {"num_blocks": world.capacity.num_blocks, "max_model_len": world.capacity.max_model_len},
    }
