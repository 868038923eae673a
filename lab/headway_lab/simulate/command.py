"""``headway simulate``: from flags to the report. Must not know: costs, measuring or layout."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from headway.flags.configuration import add_setting_flags, build, given_by_flags, merged
from headway.flags.settings import ConfigurationError, metavar, settings_of
from headway.terminal.progress import ProgressLine
from headway_lab.output_files import check_output_files, check_pictures, write_output
from headway_lab.simulate.cases import Case, case_settings, make_cases
from headway_lab.simulate.collector import RunCollector
from headway_lab.simulate.comparison import (
    COMPARE_SOURCES,
    comparison_document,
    comparison_text,
    settings_layer,
    source_cases,
)
from headway_lab.simulate.loop import NoProgress
from headway_lab.simulate.options import SimulationOptions
from headway_lab.simulate.report import CaseResult, as_json, knee_of, table
from headway_lab.simulate.world import World, make_world, simulate
from headway_lab.workload.options import check_rate

REPLICAS = "replicas"
STOPPED_EXIT_CODE = 1


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    settings = settings_of(SimulationOptions)
    compare = settings.pop("compare")
    add_setting_flags(parser, settings.values(), title="device, workload and output")
    parser.add_argument(
        compare.flag,
        action="append",
        nargs="?",
        const=COMPARE_SOURCES,
        default=argparse.SUPPRESS,
        metavar=metavar(compare),
        help=compare.description,
    )
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="FIELD=VALUE,...",
        help="a case with these limits of the scheduler; may be repeated",
    )
    add_setting_flags(parser, case_settings().values(), title="the scheduler's limits and placement")


def run(arguments: argparse.Namespace) -> int:
    """See ``Command``."""
    compares_sources = _take_compare_sources(arguments)
    given = given_by_flags(arguments, settings_of(SimulationOptions))
    if compares_sources:
        given = merged((given, settings_layer(given)))
    options = build(SimulationOptions, given, SimulationOptions.validate)
    check_rate(given, options)
    settings = case_settings()
    given_limits = given_by_flags(arguments, settings)
    if compares_sources:
        cases = source_cases(given_limits, options.users)
    else:
        cases = make_cases(given_limits, options.compare, options.sweep_budget, arguments.case, settings=settings)
    _check_outputs(options)
    world = make_world(options)
    try:
        results = _run_all(world, cases)
    except NoProgress as error:
        sys.stderr.write(f"headway simulate: the scheduler has stopped for ever: {error}\n")
        return STOPPED_EXIT_CODE
    knee = knee_of(results) if options.sweep_budget else None
    sys.stdout.write(f"{_title(world)}\n\n{table(results, knee)}")
    if compares_sources:
        sys.stdout.write(f"\n{comparison_text(results)}")
    _write_outputs(world, results, knee, comparison_document(results) if compares_sources else None)
    return 0


def _take_compare_sources(arguments: argparse.Namespace) -> bool:
    """Remove ``--compare`` without a value."""
    texts: list[str] = getattr(arguments, "compare", [])
    if COMPARE_SOURCES not in texts:
        return False
    if len(texts) > 1 or arguments.case or hasattr(arguments, "sweep_budget") or hasattr(arguments, "trace"):
        raise ConfigurationError(
            "--compare without FIELD=VALUE is not allowed beside another --compare, --case, --sweep-budget or --trace; "
            "allowed: alone"
        )
    del arguments.compare
    return True


def _run_all(world: World, cases: Sequence[Case]) -> list[CaseResult]:
    progress = ProgressLine(sys.stderr)
    results = []
    try:
        for number, case in enumerate(cases, start=1):
            title = f"case {number} of {len(cases)}: {case.label}" if len(cases) > 1 else ""

            def show(measurement: RunCollector, now: float, title: str = title) -> None:
                progress.show(
                    measurement.num_ended, len(world.load.requests), f"requests, {now:.0f} s simulated  {title}"
                )

            results.append(simulate(world, case, show))
            if world.options.replicas:
                named = msgspec.structs.replace(case, label=f"{case.label}, replicas" if case.label else REPLICAS)
                results.append(simulate(world, named, show, as_replicas=True))
    finally:
        progress.erase()
    return results


def _title(world: World) -> str:
    options, capacity = world.options, world.capacity
    devices = f"{world.roofline.num_devices} x {world.roofline.accelerator.name}"
    if options.pipeline_parallel > 1:
        devices = f"{options.pipeline_parallel} stages of {options.tensor_parallel} x {world.roofline.accelerator.name}"
    if options.executors > 1:
        roles = f" ({options.roles})" if options.roles else ""
        devices = f"{options.executors} executors{roles} of {devices} each"
    return (
        f"{world.roofline.shape.name} on {devices}, {capacity.num_blocks} KV blocks of {capacity.block_size}; "
        f"{world.load.title}; seed {options.seed}"
    )


def _check_outputs(options: SimulationOptions) -> None:
    check_output_files({"--json": options.json, "--png": options.png})
    check_pictures("--png", options.png)


def _write_outputs(
    world: World, results: Sequence[CaseResult], knee: CaseResult | None, comparison: dict[str, Any] | None
) -> None:
    options = world.options
    if options.json:
        added = {} if comparison is None else {"comparison": comparison}
        document = as_json(_described(world), results, knee, added)
        write_output("--json", options.json, lambda path: path.write_bytes(document))
    if options.png:
        from headway_lab.simulate.picture import draw

        write_output("--png", options.png, lambda path: draw(path, _title(world), results, knee))


def _described(world: World) -> dict[str, Any]:
    asked = msgspec.structs.asdict(world.options)
    options = {name: value for name, value in asked.items() if name not in {"json", "png", "sweep_budget", "compare"}}
    return {
        "options": options,
        "accelerator": world.roofline.accelerator,
        "model": world.roofline.shape,
        "capacity": {
            "num_blocks": world.capacity.num_blocks,
            "max_model_len": world.capacity.max_model_len,
            "num_host_blocks": world.capacity.num_host_blocks,
        },
    }
