"""The events of a simulated run, and its figures.

The window of throughputs begins with the first measured arrival and ends with the last token.
"""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway_lab.measurement import GroupTotals, Measurement, RequestFigures, TimeColumns, Totals
from headway_lab.percentiles import ratio, rounded
from headway_lab.simulate.device import StepRecord
from headway_lab.workload.requests import PlannedRequest
from headway_proto.columns import Int32Array
from headway_scheduler.core.state.counters import SchedulerCounters
from headway_scheduler.core.state.events import FinishedEvent

_NEVER = float("nan")


class SimulatedRequest(RequestFigures, frozen=True, kw_only=True):
    """A request that ended."""

    num_preemptions: int
    reason: str
    arrival_s: float


class SimulatedGroup(GroupTotals, frozen=True, kw_only=True):
    """A group's ended requests; throughput counts arrivals in the window."""

    num_finished: int
    num_preemptions: int
    total_tokens_per_s: float
    goodput_requests_per_s: float | None


class SimulationTotals(Totals, frozen=True, kw_only=True):
    """A simulated run; rates are per second of virtual time."""

    num_finished: int
    num_rejected: int
    first_refusal: str
    """Why the first of them was refused."""
    num_steps: int
    num_preemptions: int
    virtual_s: float
    prefix_hit_rate: float
    prefix_restore_rate: float
    mean_batch_size: float
    mean_step_tokens: float
    mean_step_ms: float
    mean_concurrency: float
    device_busy_share: float
    num_swapped_blocks: int
    swap_share: float
    """The share of the device's busy time."""
    num_moved: int
    """How often a request went from one executor to another."""
    num_pulled_tokens: int
    """Tokens that came with requests instead of being computed again."""
    num_stale_pulls: int
    """Requests whose blocks took too long, so that they were computed again."""
    pull_ms: float
    """The mean time of a step's pulls."""
    bubble_share: float
    """How long the stages of a pipeline stood idle while a step was in one of them, as a share of their time."""
    tenants: dict[str, SimulatedGroup]
    priorities: dict[str, SimulatedGroup]


def bubble_share(steps: Iterable[StepRecord]) -> float:
    """Return how long stages stood idle while a step was in one of them, as a share from 0 to 1 of all stages' time."""
    all_s = busy_s = 0.0
    for step in steps:
        all_s += step.num_stages * (step.end_s - step.start_s - step.overlap_s)
        busy_s += step.stages_s
    return max(0.0, ratio(all_s - busy_s, all_s))


class RunCollector:
    """A run's events. Requests before ``first_measured`` are warm-up."""

    def __init__(self, num_requests: int, first_measured: int = 0) -> None:
        self.steps: list[StepRecord] = []
        self.queue: list[tuple[float, int, int]] = []
        """After each answer: the time, and how many requests are running and waiting."""
        self.num_rejected = 0
        self._first_refusal = ""
        self.num_ended = 0
        self._first_measured = first_measured
        self._requests: dict[int, PlannedRequest] = {}
        self._ends: dict[int, FinishedEvent] = {}
        self._arrival_s = np.full(num_requests, _NEVER)
        self._first_token_s = np.full(num_requests, _NEVER)
        self._last_token_s = np.full(num_requests, _NEVER)
        self._end_s = np.full(num_requests, _NEVER)
        self._gap_owners: list[Int32Array] = []
        self._gaps: list[NDArray[np.float64]] = []
        self._token_times: list[tuple[float, int]] = []

    def arrived(self, request: PlannedRequest, time_s: float) -> None:
        """Record that a request was sent."""
        self._requests[request.number] = request
        self._arrival_s[request.number] = time_s

    def rejected(self, why: str) -> None:
        """Record that one was refused; the first one's ``why`` is told."""
        self.num_rejected += 1
        self._first_refusal = self._first_refusal or why
        self.num_ended += 1

    def tokens(self, numbers: Int32Array, now: float) -> None:
        """Record the next token of each request."""
        if not len(numbers):
            return
        gaps = now - self._last_token_s[numbers]
        is_first = np.isnan(gaps)
        if is_first.any():
            self._first_token_s[numbers[is_first]] = now
            self._gap_owners.append(numbers[~is_first])
            self._gaps.append(gaps[~is_first])
        else:
            self._gap_owners.append(numbers)
            self._gaps.append(gaps)
        self._last_token_s[numbers] = now
        self._token_times.append((now, len(numbers)))

    def finished(self, event: FinishedEvent, now: float) -> None:
        """Record that a request ended."""
        self.num_ended += 1
        self._ends[event.origin.handle] = event
        self._end_s[event.origin.handle] = now

    def measurement(self) -> Measurement:
        """Return the times of all requests so far."""
        has_gaps = bool(self._gaps)
        times = TimeColumns(
            arrival_s=self._arrival_s,
            first_token_s=self._first_token_s,
            end_s=self._end_s,
            is_answered=~np.isnan(self._first_token_s),
            gap_owners=np.concatenate(self._gap_owners) if has_gaps else np.empty(0, dtype=np.int32),
            gaps_s=np.concatenate(self._gaps) if has_gaps else np.empty(0),
        )
        return Measurement(self._requests, times)

    def preempted(self) -> list[int]:
        """Return the ended requests that were preempted, by number."""
        return sorted(number for number, event in self._ends.items() if event.num_preemptions)

    def requests(self) -> list[SimulatedRequest]:
        """Return all ended requests."""
        measurement = self.measurement()
        return [self._figures(measurement, number) for number in sorted(self._ends)]

    def _figures(self, measurement: Measurement, number: int) -> SimulatedRequest:
        event = self._ends[number]
        figures = measurement.figures(
            number,
            num_prompt_tokens=self._requests[number].num_prompt_tokens,
            num_output_tokens=event.num_output_tokens,
        )
        return SimulatedRequest(
            **msgspec.structs.asdict(figures),
            num_preemptions=event.num_preemptions,
            reason=event.reason.value,
            arrival_s=rounded(float(self._arrival_s[number])),
        )

    def totals(
        self,
        counters: SchedulerCounters,
        asked_requests_per_s: float | None,
        num_executors: int = 1,
        num_moved: int = 0,
    ) -> SimulationTotals:
        """Return the run's figures without the warm-up."""
        measured = [number for number in sorted(self._ends) if number >= self._first_measured]
        measurement = self.measurement()
        arrival_s, end_s = self._arrival_s[measured], self._end_s[measured]
        start_s = float(arrival_s.min()) if measured else 0.0
        virtual_s = self.steps[-1].end_s if self.steps else 0.0
        window_s = max(virtual_s - start_s, 0.0)
        num_output_tokens = sum(count for time_s, count in self._token_times if time_s > start_s)
        num_prompt_tokens = sum(self._requests[number].num_prompt_tokens for number in measured)
        steps = [step for step in self.steps if step.end_s > start_s]
        step_s = sum(step.end_s - max(step.start_s, start_s) for step in steps)
        busy_s = sum(step.end_s - max(step.start_s + step.overlap_s, start_s) for step in steps)
        pulls_s = [step.pull_s for step in steps if step.pull_s]

        def group(numbers: Sequence[int]) -> SimulatedGroup:
            return self._group(measurement, numbers, window_s)

        return SimulationTotals(
            num_requests=len(self._requests),
            num_finished=len(self._ends),
            num_rejected=self.num_rejected,
            first_refusal=self._first_refusal,
            num_steps=len(self.steps),
            num_preemptions=counters.num_preemptions,
            virtual_s=rounded(virtual_s),
            output_tokens_per_s=ratio(num_output_tokens, window_s),
            total_tokens_per_s=ratio(num_output_tokens + num_prompt_tokens, window_s),
            requests_per_s=ratio(len(measured), window_s),
            goodput_requests_per_s=measurement.goodput(measured, window_s),
            asked_requests_per_s=asked_requests_per_s,
            ttft_ms=measurement.ttft_ms(measured),
            itl_ms=measurement.itl_ms(range(self._first_measured, len(self._arrival_s))),
            end_to_end_ms=measurement.end_to_end_ms(measured),
            prefix_hit_rate=ratio(counters.num_prefix_hit_tokens, counters.num_prefix_query_tokens),
            prefix_restore_rate=ratio(counters.num_restored_tokens, counters.num_prefix_query_tokens),
            mean_batch_size=ratio(sum(step.num_rows for step in steps), len(steps)),
            mean_step_tokens=ratio(sum(step.num_tokens for step in steps), len(steps)),
            mean_step_ms=ratio(step_s * 1e3, len(steps)),
            mean_concurrency=ratio(float((end_s - arrival_s).sum()), window_s),
            device_busy_share=ratio(busy_s, window_s * num_executors),
            num_swapped_blocks=sum(step.num_swapped_blocks for step in steps),
            swap_share=ratio(sum(step.swap_s for step in steps), busy_s),
            num_moved=num_moved,
            num_pulled_tokens=counters.num_pulled_tokens,
            num_stale_pulls=counters.num_stale_pulls,
            pull_ms=ratio(sum(pulls_s) * 1e3, len(pulls_s)),
            bubble_share=bubble_share(steps),
            tenants=measurement.by_tenant(measured, group),
            priorities=measurement.by_priority(measured, group),
        )

    def _group(self, measurement: Measurement, numbers: Sequence[int], window_s: float) -> SimulatedGroup:
        ends = [self._ends[number] for number in numbers]
        num_output_tokens = sum(end.num_output_tokens for end in ends)
        num_prompt_tokens = sum(self._requests[number].num_prompt_tokens for number in numbers)
        return SimulatedGroup(
            num_finished=len(numbers),
            num_preemptions=sum(end.num_preemptions for end in ends),
            output_tokens_per_s=ratio(num_output_tokens, window_s),
            total_tokens_per_s=ratio(num_output_tokens + num_prompt_tokens, window_s),
            goodput_requests_per_s=measurement.goodput(numbers, window_s),
            ttft_ms=measurement.ttft_ms(numbers),
            itl_ms=measurement.itl_ms(numbers),
        )
