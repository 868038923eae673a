"""A recording's arrivals under other policies: the real cores, in virtual time, with learned step times.

The table begins with the recording and its simulation; their difference is the simulation's error.
"""

import time
from collections.abc import Sequence

import msgspec

from headway.flags.configuration import Given
from headway.flags.settings import ConfigurationError
from headway_lab.flight.recording import FittedCosts, Recording
from headway_lab.simulate.cases import Case, case_of, make_cases
from headway_lab.simulate.collector import RunCollector
from headway_lab.simulate.device import VirtualDevice
from headway_lab.simulate.loop import Simulation
from headway_lab.simulate.report import CaseResult, table
from headway_lab.simulate.stations import Station
from headway_lab.simulate.world import queue_columns, router_of, step_columns
from headway_lab.workload.arrivals import OpenArrivals
from headway_lab.workload.requests import SAMPLED_TOKENS, rng_of
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.counters import SchedulerCounters
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.core.view import SchedulerView
from headway_scheduler.figures.fleet_view import sum_of

_SEED = 0
AS_RECORDED = "simulated as recorded"
RECORDED = "recorded"


def policy_cases(limits: SchedulerLimits, policies: Sequence[str]) -> tuple[Case, ...]:
    """Return the recorded limits, and those with each of ``policies``.

    Raises:
        ConfigurationError: a field or a value is wrong.
    """
    recorded = {name: Given(value, "the log") for name, value in msgspec.structs.asdict(limits).items()}
    return (case_of(AS_RECORDED, recorded), *make_cases(recorded, {}, (), policies, origin="--policy"))


def compared(recording: Recording, counters: SchedulerCounters, cases: Sequence[Case]) -> list[CaseResult]:
    """Return the results of the recording and of all cases.

    Raises:
        ConfigurationError: no request ran.
        NoProgress: requests wait for ever.
    """
    if not recording.steps or recording.capacity is None:
        raise ConfigurationError("--policy: no step of this log was answered; allowed: a log in which something ran")
    costs = FittedCosts(recording.steps, recording.capacity.swap_us_per_block)
    measured = recording.measurement()
    limits = cases[0].limits
    results = [
        _result(
            Case(label=RECORDED, limits=limits), measured, counters, measured.steps[-1].end_s, recording.num_executors
        )
    ]
    return results + [_simulated(recording, costs, case) for case in cases]


def comparison_text(recording: Recording, results: Sequence[CaseResult]) -> str:
    """Return the table and its notes."""
    assert recording.capacity is not None
    costs = FittedCosts(recording.steps, recording.capacity.swap_us_per_block)
    left_out = recording.num_without_tokens
    notes = [
        f"step times learned from {len(recording.steps):,} steps: half of them within {100 * costs.median_error:.1f}%"
    ]
    if left_out:
        notes.append(f"{left_out} requests that got no token are not simulated")
    return "\n".join((table(results, None).rstrip(), *notes, ""))


def _simulated(recording: Recording, costs: FittedCosts, case: Case) -> CaseResult:
    assert recording.capacity is not None
    num_rows = max(recording.capacity.max_num_rows, case.limits.max_num_seqs)
    # What a request computed stays where it was computed: the recording does not tell how long blocks travel.
    capacity = msgspec.structs.replace(recording.capacity, max_num_rows=num_rows, host_pool="", block_addresses=())
    requests, times_s = recording.requests()
    lengths = {request.number: request.num_output_tokens for request in requests if request.is_stopped}
    stations = [
        Station(
            Scheduler(case.limits, capacity),
            VirtualDevice(
                costs,
                capacity,
                rng_of(_SEED, SAMPLED_TOKENS, *((number,) if number else ())),
                host_bandwidth=1.0,
                lengths=lengths,
                acceptance=recording.acceptance,
            ),
            number,
        )
        for number in range(recording.num_executors)
    ]
    measurement = RunCollector(len(requests))
    started = time.perf_counter()
    router = router_of(stations, case.limits)
    Simulation(router, OpenArrivals(requests, times_s), recording.prompts(), measurement).run()
    counters = sum_of(SchedulerView(station.core).counters for station in stations)
    return _result(case, measurement, counters, time.perf_counter() - started, len(stations))


def _result(
    case: Case, measurement: RunCollector, counters: SchedulerCounters, wall_s: float, num_executors: int
) -> CaseResult:
    return CaseResult(
        case=case,
        totals=measurement.totals(counters, None, num_executors),
        requests=measurement.requests(),
        steps=step_columns(measurement),
        queue=queue_columns(measurement),
        wall_s=wall_s,
    )
