"""What is measured in a run.

Owns: arrival, first token, every token and end of each request, and the totals and percentiles of a run.
Must not know: how requests are scheduled, or how figures are shown.

Times are virtual. Latencies count from the intended arrival. An ITL is one gap between two tokens of a request; all
gaps of all requests count alike. The window of throughputs begins with the first measured arrival and ends with the
last token; every output token in it counts, and the prompts of the requests that are measured.

A request meets its objectives if its first token and each further gap came within them; goodput counts those that do
(Zhong et al., DistServe, OSDI 2024), and who has no objective meets it.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway_lab.simulate.device import StepRecord
from headway_lab.workload.percentiles import Percentiles, percentiles, ratio, rounded
from headway_lab.workload.requests import PRIORITY_NAMES, PlannedRequest
from headway_proto.columns import Int32Array
from headway_scheduler.core.state.counters import SchedulerCounters
from headway_scheduler.core.state.events import FinishedEvent

_NEVER = float("nan")


class RequestFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One request that ended, in order of its number. Times in seconds, gaps in milliseconds."""

    number: int
    tenant: str
    priority: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    reason: str
    arrival_s: float
    ttft_s: float
    end_to_end_s: float
    itl_ms: tuple[float, ...]
    meets_objectives: bool


class GroupTotals(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's or a priority's part of a run, in the units of ``Totals``."""

    num_finished: int
    num_preemptions: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput_requests_per_s: float | None
    ttft_ms: Percentiles
    itl_ms: Percentiles


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """A run in figures. Rates per second of virtual time; latencies in milliseconds; shares from 0 to 1.

    Goodput is None where no request has an objective.
    """

    num_requests: int
    num_finished: int
    num_rejected: int
    num_steps: int
    num_preemptions: int
    virtual_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    goodput_requests_per_s: float | None
    asked_requests_per_s: float | None
    ttft_ms: Percentiles
    itl_ms: Percentiles
    end_to_end_ms: Percentiles
    prefix_hit_rate: float
    mean_batch_size: float
    mean_step_tokens: float
    mean_step_ms: float
    mean_concurrency: float
    device_busy_share: float
    num_swapped_blocks: int
    swap_share: float
    """Of the time that the device was busy."""
    tenants: dict[str, GroupTotals]
    """Of those that have a name; throughput counts requests that arrived in the window."""
    priorities: dict[str, GroupTotals]
    """The most urgent first; likewise."""


class Measurement:
    """Collects a run. Columns of shape ``[requests]`` by request number; requests before ``first_measured`` warm up."""

    def __init__(self, num_requests: int, first_measured: int = 0) -> None:
        self.steps: list[StepRecord] = []
        self.queue: list[tuple[float, int, int]] = []
        """After each answer: the time, and how many requests run and wait."""
        self.num_rejected = 0
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
        """A request was sent."""
        self._requests[request.number] = request
        self._arrival_s[request.number] = time_s

    def rejected(self) -> None:
        """It was refused."""
        self.num_rejected += 1
        self.num_ended += 1

    def tokens(self, numbers: Int32Array, now: float) -> None:
        """Each of these requests got its next token."""
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
        """A request ended."""
        self.num_ended += 1
        self._ends[event.origin.handle] = event
        self._end_s[event.origin.handle] = now

    def requests(self) -> list[RequestFigures]:
        """All requests that ended, by number."""
        owners, gaps = self._all_gaps()
        order = np.argsort(owners, kind="stable")
        owners, gaps = owners[order], gaps[order]
        meets = self._meets_objectives()
        return [self._figures(number, owners, gaps, meets) for number in sorted(self._ends)]

    def _figures(
        self, number: int, owners: Int32Array, gaps: NDArray[np.float64], meets: NDArray[np.bool_]
    ) -> RequestFigures:
        event, request = self._ends[number], self._requests[number]
        place = slice(int(owners.searchsorted(number)), int(owners.searchsorted(number, side="right")))
        arrival_s = float(self._arrival_s[number])
        return RequestFigures(
            number=number,
            tenant=request.tenant,
            priority=PRIORITY_NAMES[request.priority],
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=event.num_output_tokens,
            num_preemptions=event.num_preemptions,
            reason=event.reason.value,
            arrival_s=rounded(arrival_s),
            ttft_s=rounded(float(self._first_token_s[number]) - arrival_s),
            end_to_end_s=rounded(float(self._end_s[number]) - arrival_s),
            itl_ms=tuple((gaps[place] * 1e3).round(6).tolist()),
            meets_objectives=bool(meets[number]),
        )

    def _meets_objectives(self) -> NDArray[np.bool_]:
        """By request number; meaningless for those that have not ended."""
        owners, gaps = self._all_gaps()
        longest_s = np.zeros(len(self._arrival_s))
        np.maximum.at(longest_s, owners, gaps)
        limits_s = np.full((2, len(self._arrival_s)), np.inf)
        for number, request in self._requests.items():
            limits_s[:, number] = request.objectives.limits_s
        first_s = self._first_token_s - self._arrival_s
        meets: NDArray[np.bool_] = (first_s <= limits_s[0]) & (longest_s <= limits_s[1])
        return meets

    def totals(self, counters: SchedulerCounters, asked_requests_per_s: float | None) -> Totals:
        """The whole run, warm-up left out where it says so above."""
        measured = [number for number in sorted(self._ends) if number >= self._first_measured]
        arrival_s, end_s = self._arrival_s[measured], self._end_s[measured]
        start_s = float(arrival_s.min()) if measured else 0.0
        virtual_s = self.steps[-1].end_s if self.steps else 0.0
        window_s = max(virtual_s - start_s, 0.0)
        owners, gaps = self._all_gaps()
        num_output_tokens = sum(count for time_s, count in self._token_times if time_s > start_s)
        num_prompt_tokens = sum(self._requests[number].num_prompt_tokens for number in measured)
        steps = [step for step in self.steps if step.end_s > start_s]
        busy_s = sum(step.end_s - max(step.start_s, start_s) for step in steps)
        return Totals(
            num_requests=len(self._requests),
            num_finished=len(self._ends),
            num_rejected=self.num_rejected,
            num_steps=len(self.steps),
            num_preemptions=counters.num_preemptions,
            virtual_s=rounded(virtual_s),
            output_tokens_per_s=ratio(num_output_tokens, window_s),
            total_tokens_per_s=ratio(num_output_tokens + num_prompt_tokens, window_s),
            requests_per_s=ratio(len(measured), window_s),
            goodput_requests_per_s=self._goodput(measured, window_s),
            asked_requests_per_s=asked_requests_per_s,
            ttft_ms=percentiles((self._first_token_s[measured] - arrival_s) * 1e3),
            itl_ms=percentiles(gaps[owners >= self._first_measured] * 1e3),
            end_to_end_ms=percentiles((end_s - arrival_s) * 1e3),
            prefix_hit_rate=ratio(counters.num_prefix_hit_tokens, counters.num_prefix_query_tokens),
            mean_batch_size=ratio(sum(step.num_rows for step in steps), len(steps)),
            mean_step_tokens=ratio(sum(step.num_tokens for step in steps), len(steps)),
            mean_step_ms=ratio(busy_s * 1e3, len(steps)),
            mean_concurrency=ratio(float((end_s - arrival_s).sum()), window_s),
            device_busy_share=ratio(busy_s, window_s),
            num_swapped_blocks=sum(step.num_swapped_blocks for step in steps),
            swap_share=ratio(sum(step.swap_s for step in steps), busy_s),
            tenants=self._tenants(measured, window_s),
            priorities=self._priorities(measured, window_s),
        )

    def _goodput(self, numbers: Sequence[int], window_s: float) -> float | None:
        if not any(self._requests[number].objectives.are_some for number in numbers):
            return None
        return ratio(int(np.count_nonzero(self._meets_objectives()[numbers])), window_s)

    def _tenants(self, measured: Sequence[int], window_s: float) -> dict[str, GroupTotals]:
        numbers_of: dict[str, list[int]] = {}
        for number in measured:
            numbers_of.setdefault(self._requests[number].tenant, []).append(number)
        return {name: self._group(numbers_of[name], window_s) for name in sorted(numbers_of) if name}

    def _priorities(self, measured: Sequence[int], window_s: float) -> dict[str, GroupTotals]:
        numbers_of: dict[int, list[int]] = {}
        for number in measured:
            numbers_of.setdefault(self._requests[number].priority, []).append(number)
        return {
            PRIORITY_NAMES[priority]: self._group(numbers_of[priority], window_s) for priority in sorted(numbers_of)
        }

    def _group(self, numbers: list[int], window_s: float) -> GroupTotals:
        owners, gaps = self._all_gaps()
        is_own = np.zeros(len(self._arrival_s), dtype=np.bool_)
        is_own[numbers] = True
        ends = [self._ends[number] for number in numbers]
        num_output_tokens = sum(end.num_output_tokens for end in ends)
        num_prompt_tokens = sum(self._requests[number].num_prompt_tokens for number in numbers)
        return GroupTotals(
            num_finished=len(numbers),
            num_preemptions=sum(end.num_preemptions for end in ends),
            output_tokens_per_s=ratio(num_output_tokens, window_s),
            total_tokens_per_s=ratio(num_output_tokens + num_prompt_tokens, window_s),
            goodput_requests_per_s=self._goodput(numbers, window_s),
            ttft_ms=percentiles((self._first_token_s[numbers] - self._arrival_s[numbers]) * 1e3),
            itl_ms=percentiles(gaps[is_own[owners]] * 1e3),
        )

    def _all_gaps(self) -> tuple[Int32Array, NDArray[np.float64]]:
        if not self._gaps:
            return np.empty(0, dtype=np.int32), np.empty(0)
        return np.concatenate(self._gap_owners), np.concatenate(self._gaps)
