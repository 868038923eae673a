"""``headway bench`` and ``headway bench capacity``: from flags to the report. Must not know: sending, measuring or
layout.
"""

import argparse
import asyncio
import itertools
import sys
from pathlib import Path

import msgspec

from headway.flags.configuration import Given, Layer, add_setting_flags, build, given_by_flags
from headway.flags.settings import ConfigurationError, settings_of
from headway_lab.bench.capacity import Look, Search, Trial, find_capacity
from headway_lab.bench.figures import num_failed
from headway_lab.bench.options import BenchOptions
from headway_lab.bench.report import (
    as_csv,
    as_json,
    capacity_json,
    capacity_text,
    is_trustworthy,
    text,
    title,
    trial_text,
)
from headway_lab.bench.session import bench, opened
from headway_lab.bench.target import TargetError, TargetInfo
from headway_lab.output_files import check_output_files, check_pictures, write_output
from headway_lab.workload.options import check_rate
from headway_proto.wording import shown

FAILED_EXIT_CODE = 1
INTERRUPTED_EXIT_CODE = 130
LOAD, CAPACITY = "load", "capacity"
_WARM_UP_SHARE = 10
_TIMES_AS_LONG = (1, 2, 4, 8)
"""A run that was too short to tell is repeated, longer."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument(
        "what",
        nargs="?",
        default=LOAD,
        metavar=f"{{{LOAD},{CAPACITY}}}",
        help="load: send one and report (default); capacity: search the highest rate at which --attainment of "
        "the requests keep --ttft-slo-ms and --itl-slo-ms",
    )
    add_setting_flags(parser, settings_of(BenchOptions).values(), title="server, load and output")


def run(arguments: argparse.Namespace) -> int:
    """See ``Command``."""
    given = given_by_flags(arguments, settings_of(BenchOptions))
    session = _load_session
    if arguments.what not in {LOAD, CAPACITY}:
        raise ConfigurationError(f"{shown(arguments.what)} is not allowed; allowed: {LOAD}, {CAPACITY}")
    if arguments.what == CAPACITY:
        given, session = _for_capacity(given), _capacity_session
    options = build(BenchOptions, given, BenchOptions.validate)
    check_rate(given, options)
    check_output_files({"--json": options.json, "--csv": options.csv, "--png": options.png})
    check_pictures("--png", options.png)
    try:
        return asyncio.run(session(options))
    except TargetError as error:
        sys.stderr.write(f"headway bench: {error}\n")
        return FAILED_EXIT_CODE


def _for_capacity(given: Layer) -> Layer:
    """A slow server must not get fewer requests."""
    if "trace" in given or ("arrivals" in given and given["arrivals"].value == "closed"):
        origin = (given.get("trace") or given["arrivals"]).origin
        raise ConfigurationError(f"{origin}: is not allowed for capacity; allowed: --arrivals poisson or gamma")
    if not any(name in given for name in ("ttft_slo_ms", "itl_slo_ms", "tenants")):
        raise ConfigurationError(
            "capacity wants an objective; allowed: --ttft-slo-ms, --itl-slo-ms, or --tenant with one"
        )
    return {"arrivals": Given("poisson", "capacity"), **given}


async def _load_session(options: BenchOptions) -> int:
    result = await bench(options)
    info, totals, requests = result.info, result.totals, result.requests
    if totals.num_unmeasured and not requests:
        raise KeyboardInterrupt
    heading = title(info, result.load)
    sys.stdout.write(f"{heading}\n\n{text(info, totals, options.max_late_ms)}")
    sys.stdout.flush()
    write_output(
        "--json",
        options.json,
        lambda path: path.write_bytes(as_json(options, info, totals, requests, options.max_late_ms)),
    )
    write_output("--csv", options.csv, lambda path: path.write_text(as_csv(requests)))
    if options.png:
        from headway_lab.bench.picture import draw

        write_output("--png", options.png, lambda path: draw(path, heading, requests))
    if totals.num_unmeasured:
        return INTERRUPTED_EXIT_CODE
    if not totals.num_ok or num_failed(totals):
        return FAILED_EXIT_CODE
    if options.require_rate and not (totals.steady is not None and totals.steady.reaches(options.require_rate)):
        return FAILED_EXIT_CODE
    return 0


async def _capacity_session(options: BenchOptions) -> int:
    search = Search(options.rate, options.most_rate, options.tolerance)
    numbers = itertools.count()
    async with opened(options) as (_, info):  # Report a missing server before anything else.
        sys.stdout.write(f"{info.model} at {info.address} ({info.runs_on}); {options.arrivals} arrivals\n\n")

    async def look(rate: float) -> Look:
        for times in _TIMES_AS_LONG:
            load = at_rate(options, rate, next(numbers), times)
            totals = (await bench(load, f"requests at {rate:.2f}/s")).totals
            if totals.num_unmeasured:
                raise KeyboardInterrupt
            if totals.keeps_up is not None:
                break
        return Look(
            num_requests=totals.num_requests,
            num_meeting=round((totals.attainment or 0.0) * totals.num_requests),
            keeps_up=totals.keeps_up,
            trustworthy=is_trustworthy(totals, options.max_late_ms),
        )

    def report(trial: Trial) -> None:
        sys.stdout.write(f"{trial_text(trial)}\n")
        sys.stdout.flush()

    trials = await find_capacity(search, options.attainment, look, report)
    sys.stdout.write(f"\n{capacity_text(search, options.attainment)}")
    _write_capacity(options, info, search, trials)
    return 0 if search.met is not None else FAILED_EXIT_CODE


def at_rate(options: BenchOptions, rate: float, look: int, times: int = 1) -> BenchOptions:
    """Return a load for one run of the search.

    It has new prompts, because the server caches those of the run before.
    """
    num_measured = times * max(options.probe_requests, round(rate * options.probe_s))
    num_warm_up = max(options.warmup_requests, num_measured // _WARM_UP_SHARE)
    return msgspec.structs.replace(
        options,
        rate=rate,
        num_requests=num_measured + num_warm_up,
        warmup_requests=num_warm_up,
        seed=options.seed + look,
    )


def _write_capacity(options: BenchOptions, info: TargetInfo, search: Search, trials: list[Trial]) -> None:
    write_output("--json", options.json, lambda path: path.write_bytes(capacity_json(options, info, search, trials)))
    if options.csv:
        lines = ["rate,meets,share,low,high,num_requests"]
        lines += [
            f"{trial.rate:g},{trial.meets},{trial.share:g},{trial.low:g},{trial.high:g},{trial.num_requests}"
            for trial in trials
        ]
        write_output("--csv", options.csv, lambda path: path.write_text("\n".join((*lines, ""))))
    if options.png:
        from headway_lab.bench.picture import draw_capacity

        def draw(path: Path) -> None:
            draw_capacity(path, capacity_text(search, options.attainment).strip(), trials, options.attainment)

        write_output("--png", options.png, draw)
