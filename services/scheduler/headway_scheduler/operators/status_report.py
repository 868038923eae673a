"""The status for operators and metrics.

Owns: the source of each figure. Must not know: commands, readers.
"""

from typing import Protocol

import msgspec

from headway_process.histogram import Histogram
from headway_proto.operations import (
    EndCount,
    ExecutorState,
    ExecutorStatus,
    PolicyNames,
    PredictionErrorState,
    PreemptionCount,
    RecentPercentiles,
    Status,
    StepTimeModelState,
    TenantServiceState,
    WastedTokens,
)
from headway_proto.step import BackendInfo
from headway_scheduler.cells.fleet import Fleet
from headway_scheduler.core.state.counters import SchedulerCounters
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.core.view import SchedulerFigures
from headway_scheduler.figures.fleet_view import FleetView
from headway_scheduler.figures.serving_statistics import ExecutorStatistics, ServingStatistics
from headway_scheduler.links.ingress_link import IngressLinks

_BY_KIND = {"preemptions", "wasted_tokens"}
_TOTALS = tuple(
    name for name in SchedulerCounters.__struct_fields__ if name in Status.__struct_fields__ and name not in _BY_KIND
)
"""Counters with the same names in the status."""


class Reported(Protocol):
    """The parts of a scheduler that a status is made of. ``view`` is None before an executor joins."""

    limits: SchedulerLimits
    fleet: Fleet
    gateways: IngressLinks
    statistics: ServingStatistics

    @property
    def view(self) -> FleetView | None:
        """What may be read from the cores."""

    @property
    def state(self) -> str:
        """One of ``ingress.STATE_*``."""


def status_of(scheduler: Reported, now: float) -> Status:
    """Return the current figures; without an executor, the core's are defaults."""
    view, limits, statistics = scheduler.view, scheduler.limits, scheduler.statistics
    statistics.keep_time(now, view)
    cells = scheduler.fleet.cells
    first = next((cell for cell in cells if cell.link.is_open), cells[0])
    counters = SchedulerCounters() if view is None else view.counters
    by_executor = {} if view is None else view.figures_by_executor()
    figures = SchedulerFigures() if view is None else view.figures(by_executor)
    status = Status(
        **figures._asdict(),
        **{name: getattr(counters, name) for name in _TOTALS},
        scheduler_state=scheduler.state,
        executor_state=first.link.executor_state(now),
        epoch=first.link.epoch,
        num_gateways=len(scheduler.gateways),
        max_num_batched_tokens=limits.max_num_batched_tokens if view is None else view.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_steps_in_flight=limits.steps_in_flight(1 if first.info is None else first.info.num_lanes),
        policies=PolicyNames(
            order=limits.order,
            batching=limits.batching,
            budget=limits.budget,
            preemption=limits.preemption,
            placement=scheduler.fleet.policy_name,
        ),
        preemptions=tuple(
            PreemptionCount(mode=kind.mode, reason=kind.reason, count=count)
            for kind, count in sorted(counters.preemptions.items())
        ),
        wasted_tokens=tuple(
            WastedTokens(reason=reason, count=count) for reason, count in sorted(counters.wasted_tokens.items())
        ),
        executor=_executor(first.info, statistics.executors[first.number], now),
    )
    status = _with_statistics(status, statistics, now)
    status = _with_executors(status, scheduler, by_executor, now)
    return status if view is None else _with_rates(status, statistics, view, now)


def _with_statistics(status: Status, statistics: ServingStatistics, now: float) -> Status:
    error = statistics.prediction_error
    ends = sorted((reason.value, count) for reason, count in statistics.ends.items())
    return msgspec.structs.replace(
        status,
        uptime_s=0.0 if statistics.started_at is None else now - statistics.started_at,
        num_epochs=statistics.num_epochs,
        num_executor_losses=statistics.num_executor_losses,
        ttft=_percentiles(statistics.first_token_s),
        itl=_percentiles(statistics.gap_s),
        queue=_percentiles(statistics.queue_s),
        e2e=_percentiles(statistics.request_s),
        ends=tuple(EndCount(reason=reason, count=count) for reason, count in ends),
        prediction_error=PredictionErrorState(**msgspec.structs.asdict(error)) if error.count else None,
    )


def _with_executors(
    status: Status, scheduler: Reported, by_executor: dict[int, SchedulerFigures], now: float
) -> Status:
    fleet, statistics = scheduler.fleet, scheduler.statistics.executors
    executors = []
    for number, figures in by_executor.items():
        cell = fleet.cells[number]
        assert cell.view is not None
        executors.append(
            ExecutorStatus(
                number=number,
                state=cell.link.executor_state(now),
                epoch=cell.link.epoch,
                is_draining=cell.is_draining,
                details=_executor(cell.info, statistics[number], now),
                num_running=figures.num_running,
                num_waiting=figures.num_waiting,
                num_total_blocks=figures.num_total_blocks,
                num_free_blocks=figures.num_free_blocks,
                num_cached_blocks=figures.num_cached_blocks,
                kv_usage=1.0 - figures.num_free_blocks / figures.num_total_blocks,
                num_steps=cell.view.counters.num_steps,
                role=cell.role.value,
            )
        )
    return msgspec.structs.replace(
        status, executors=tuple(executors), num_unplaced=len(fleet.placement), num_moved=fleet.transit.num_moved
    )


def _with_rates(status: Status, statistics: ServingStatistics, view: FleetView, now: float) -> Status:
    rates, model = statistics.rates(view, now), view.step_times
    services = statistics.tenant_services(view)
    return msgspec.structs.replace(
        status,
        prompt_tokens_per_s=rates.prompt_tokens_per_s,
        output_tokens_per_s=rates.output_tokens_per_s,
        step_time_model=None if model is None else StepTimeModelState(**model._asdict()),
        tenant_services=tuple(TenantServiceState(**service._asdict()) for service in services),
    )


def _executor(info: BackendInfo | None, statistics: ExecutorStatistics, now: float) -> ExecutorState | None:
    if info is None or statistics.since is None:
        return None
    last = statistics.last_answer_at
    return ExecutorState(
        backend=info.backend,
        model_name=info.model_name,
        device=info.device,
        dtype=info.dtype,
        age_s=now - statistics.since,
        last_step_us=statistics.last_device_time_us,
        last_step_age_s=-1.0 if last is None else now - last,
    )


def _percentiles(histogram: Histogram) -> RecentPercentiles:
    recent = histogram.recent()
    return RecentPercentiles(
        count=recent.num_values, p50_ms=recent.p50 * 1e3, p90_ms=recent.p90 * 1e3, p99_ms=recent.p99 * 1e3
    )
