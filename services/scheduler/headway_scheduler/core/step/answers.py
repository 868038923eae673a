"""Takes in answers: tokens, log probabilities, failed rows, and the ends that follow.

Owns: the tokens of an answer. Must not know: who receives them.
"""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from headway_proto.columns import Int32Array, decode_column
from headway_proto.step import ExecutorOutput, PooledOutput
from headway_scheduler.core.admission.admission import Admission
from headway_scheduler.core.admission.core_state import CoreState
from headway_scheduler.core.admission.endings import Endings
from headway_scheduler.core.admission.running_requests import RunningRequests
from headway_scheduler.core.memory.cached_prefixes import CachedPrefixes
from headway_scheduler.core.memory.epoch import Epoch
from headway_scheduler.core.state.events import (
    FinishedEvent,
    FirstTokenEvent,
    LogprobsEvent,
    PromptLogprobsEvent,
    StepEvents,
    VectorEvent,
)
from headway_scheduler.core.state.indices import is_any
from headway_scheduler.core.state.request import FinishReason, Request, RequestStatus
from headway_scheduler.core.state.step_plan import InFlightStep, StepLoad
from headway_scheduler.core.step.accepted_tokens import AcceptedTokens
from headway_scheduler.core.step.answer_checks import AnswerChecks
from headway_scheduler.core.step.gap_guard import GapGuard
from headway_scheduler.core.step.handing_off import HandingOff
from headway_scheduler.core.step.speculation import SpeculationPolicy
from headway_scheduler.core.step.token_columns import NOBODY, SamplingRows, TokenColumns


class Answers:
    """Looks singly only at rows that end, failed or speculate."""

    def __init__(
        self,
        state: CoreState,
        epoch: Epoch,
        prefixes: CachedPrefixes,
        running: RunningRequests,
        admission: Admission,
        endings: Endings,
        speculation: SpeculationPolicy,
        gaps: GapGuard,
        handing_off: HandingOff,
    ) -> None:
        self._handing_off = handing_off
        self._state = state
        self._observer = state.observer
        self._counters = state.counters
        self._queue = state.waiting.queue
        self._epoch = epoch
        self._rows = epoch.rows
        self._prefixes = prefixes
        self._admission = admission
        self._endings = endings
        self._speculation = speculation
        self._gaps = gaps
        self._checks = AnswerChecks(epoch, running.stop_tokens)
        self._sampling = [SamplingRows(epoch.rows) for _ in epoch.lanes]

    def take(self, output: ExecutorOutput, now: float) -> StepEvents:
        """Take in the answer to the oldest step in flight.

        Raises:
            StateMismatch: it is not that answer.
        """
        step, token_ids, stops_some, accepted = self._checks.take(output)
        self._epoch.pool.complete_step(step.step)
        self._learn(step, output, now, accepted)
        finished: list[FinishedEvent] = []
        first_tokens: list[FirstTokenEvent] = []
        resumed_gaps_s: list[float] = []
        failed = {error.row: error.message for error in output.errors}
        stale = set(decode_column(output.stale_rows).tolist()) if output.stale_rows else set()
        if stale:
            # Nothing of these rows counts, not even their errors.
            failed |= dict.fromkeys(stale, "")
        prompt_logprobs: tuple[PromptLogprobsEvent, ...] = ()
        if step.chunks:
            prompt_logprobs = self._prompt_logprobs(step, output, failed)
            self._confirm_chunks(step, failed, now, first_tokens, resumed_gaps_s)
        vectors = _vectors(step, output, failed) if isinstance(output, PooledOutput) else ()
        logprobs = self._logprobs(step, output, failed) if output.logprobs else ()
        sampling = self._sampling[step.lane]
        late: list[tuple[Request, int]] = []
        if failed or step.leavers:
            sampling.turn_to(step.sampling_rows, {*failed, *step.leavers})
            late = self._late_tokens(step, token_ids, failed)
            token_ids, stops_some = token_ids[sampling.stay], stops_some[sampling.stay]
            if failed:
                self._fail_rows(step, {row: failed[row] for row in failed if row not in stale}, finished)
            if stale:
                self._handing_off.preempt_stale(step, stale)
        else:
            sampling.turn_to(step.sampling_rows, NOBODY)
        if self._gaps.is_on:
            self._gaps.record_tokens(sampling.rows, now)
        columns = self._append_tokens(step.lane, sampling, token_ids, stops_some, finished)
        if late:
            columns = self._append_late_tokens(columns, late, finished)
        if accepted:
            columns = self._append_accepted(step, accepted, columns, finished)
            sampling.forget()
            ends = {end.origin: end.num_output_tokens for end in finished}
            logprobs = tuple(event for event in logprobs if event.index < ends.get(event.origin, event.index + 1))
        self._counters.num_output_tokens += len(columns.token_ids)
        left = () if step.transfers is None else self._handing_off.confirm(step.transfers)
        return StepEvents(
            admitted=self._admission.starts.take_admitted(),
            owners=columns.owners,
            handles=columns.handles,
            indices=columns.indices,
            token_ids=columns.token_ids,
            logprobs=logprobs,
            finished=tuple(finished),
            first_tokens=tuple(first_tokens),
            resumed_gaps_s=tuple(resumed_gaps_s),
            prompt_logprobs=prompt_logprobs,
            left=left,
            vectors=vectors,
        )

    # --------------------------------------------------------------------------------------------- the time of steps

    def _learn(self, step: InFlightStep, output: ExecutorOutput, now: float, accepted: list[AcceptedTokens]) -> None:
        # The time of a step that moved blocks is useless: the moves may have run beside the step before. Exports come
        # behind their step, and an executor for prompts has hardly a step without.
        has_waited = step.num_moved_blocks > 0 or (step.transfers is not None and len(step.transfers.fetched) > 0)
        if step.load is not None and not has_waited:
            self._learn_duration(step, step.load, now, accepted)
        self._observer.record_answer(step.lane, now)
        self._counters.device_us += output.device_time_us
        if step.num_moved_blocks:
            self._epoch.swapping.costs.observe_moves(step.num_moved_blocks, output.move_time_us)

    def _learn_duration(self, step: InFlightStep, load: StepLoad, now: float, accepted: list[AcceptedTokens]) -> None:
        if step.speculating:
            num_proposed = sum(entry.num_proposed for entry in accepted)
            self._speculation.record_step(load.shape, self._observer.duration_s(step.lane, load, now), num_proposed)
        else:
            self._observer.learn(step.lane, load, now)

    # -------------------------------------------------------------------------------------- prompts, log probabilities

    def _prompt_logprobs(
        self, step: InFlightStep, output: ExecutorOutput, failed: dict[int, str]
    ) -> tuple[PromptLogprobsEvent, ...]:
        """What is not reported yet; this follows from the step alone, so a replay needs no values."""
        reported = {entry.row: entry.values for entry in output.prompt_logprobs}
        events = []
        for chunk in step.chunks:
            request = chunk.request
            if chunk.row in failed or not chunk.counts or not request.is_owed_prompt_logprobs:
                continue
            if request.status is RequestStatus.FINISHED:
                continue
            first = request.num_prompt_logprobs + 1
            if chunk.end_of_prompt_logprobs > first:
                request.num_prompt_logprobs = chunk.end_of_prompt_logprobs - 1
                if chunk.row in reported:
                    events.append(PromptLogprobsEvent(request.new.origin, reported[chunk.row].behind(first)))
        return tuple(events)

    def _confirm_chunks(
        self,
        step: InFlightStep,
        failed: dict[int, str],
        now: float,
        first_tokens: list[FirstTokenEvent],
        resumed_gaps_s: list[float],
    ) -> None:
        for chunk in step.chunks:
            request = chunk.request
            if chunk.row in failed or not chunk.counts or request.status is RequestStatus.FINISHED:
                continue
            if chunk.completes and request.first_token_time is None:
                request.first_token_time = now
                request.device_us_marks = request.device_us_marks[0], self._counters.device_us
                assert request.scheduled_time is not None
                first_tokens.append(FirstTokenEvent(request.arrival_time, request.scheduled_time))
            elif chunk.completes and request.last_token_time is not None:
                resumed_gaps_s.append(now - request.last_token_time)
            if chunk.holds_blocks:
                self._prefixes.register(request, chunk.row, chunk.num_computed_tokens)

    def _logprobs(
        self, step: InFlightStep, output: ExecutorOutput, failed: dict[int, str]
    ) -> tuple[LogprobsEvent, ...]:
        events = []
        num_reported: Counter[int] = Counter()
        for values in output.logprobs:
            request = step.leavers[values.row] if values.row in step.leavers else self._rows.requests[values.row]
            if request is not None and request.status is not RequestStatus.FINISHED and values.row not in failed:
                num_tokens = self._rows.num_tokens_of(request)
                index = num_tokens - request.new.num_prompt_tokens + num_reported[values.row]
                num_reported[values.row] += 1
                events.append(LogprobsEvent(request.new.origin, index, values))
        return tuple(events)

    # ----------------------------------------------------------------------------------------------- rows that are gone

    def _late_tokens(
        self, step: InFlightStep, token_ids: Int32Array, failed: dict[int, str]
    ) -> list[tuple[Request, int]]:
        """Tokens of requests that lost their row since, rows ascending."""
        late = []
        for row, request in sorted([(row, request) for row, request in step.leavers.items() if request is not None]):
            request.num_unreturned -= 1
            if row not in failed and request.status is not RequestStatus.FINISHED:
                late.append((request, int(token_ids[step.place_of(row)])))
        return late

    def _fail_rows(self, step: InFlightStep, failed: dict[int, str], finished: list[FinishedEvent]) -> None:
        for row, message in sorted(failed.items()):
            request = step.leavers[row] if row in step.leavers else self._rows.requests[row]
            if request is not None and request.status is not RequestStatus.FINISHED:
                finished.append(self._endings.finish(request, FinishReason.ERROR, error=message))

    # ----------------------------------------------------------------------------------------------------------- tokens

    def _append_tokens(
        self,
        lane: int,
        sampling: SamplingRows,
        token_ids: Int32Array,
        stops_some: NDArray[np.bool_],
        finished: list[FinishedEvent],
    ) -> TokenColumns:
        rows, sampling_rows = self._rows, sampling.rows
        columns = sampling.append(token_ids)
        self._queue.charge_rows(rows.tenant, sampling_rows)
        if self._epoch.lanes[lane].may_end:
            stops_some = stops_some | (rows.num_tokens[sampling_rows] > rows.last_position[sampling_rows])
        for entry in stops_some.nonzero()[0].tolist() if is_any(stops_some) else ():
            row = int(sampling_rows[entry])
            end = self._end_at(rows.request_in(row), int(rows.num_tokens[row]), int(token_ids[entry]))
            if end is not None:
                finished.append(end)
        return columns

    def _append_late_tokens(
        self, columns: TokenColumns, late: list[tuple[Request, int]], finished: list[FinishedEvent]
    ) -> TokenColumns:
        for request, token_id in late:
            request.append_token(token_id)
            request.last_token_time = self._observer.last_answer_time
            self._queue.charge_token(self._queue.place_of_tenant(request))
        for request, token_id in late:
            end = self._end_at(request, len(request.token_ids), token_id)
            if end is not None:
                finished.append(end)
        return columns.with_late(late)

    def _append_accepted(
        self,
        step: InFlightStep,
        accepted: list[AcceptedTokens],
        columns: TokenColumns,
        finished: list[FinishedEvent],
    ) -> TokenColumns:
        rows, lane, counters = self._rows, self._epoch.lanes[step.lane], self._counters
        entries: list[tuple[int, int, int, int]] = []
        moved: list[int] = []
        for row, num_allowed, num_proposed, token_ids in accepted:
            counters.num_drafts += num_proposed > 0
            counters.num_draft_tokens += num_proposed
            counters.num_accepted_tokens += len(token_ids)
            request = None if row in step.leavers else rows.requests[row]
            if request is None:  # it ended, perhaps with its first token
                self._state.count_surplus(len(token_ids))
                continue
            lane.accept(row, len(token_ids))
            self._speculation.learn(
                request.speculation,
                int(rows.num_computed_tokens[row]),
                num_allowed=num_allowed,
                num_proposed=num_proposed,
                num_accepted=len(token_ids),
            )
            rows.record_speculation(row, request.speculation)
            num_taken, end = self._append_to(request, token_ids, entries)
            self._state.count_surplus(len(token_ids) - num_taken)
            if end is not None:
                finished.append(end)
            elif token_ids:
                moved.append(row)
        if moved:
            lane.start(moved)
        return columns.with_further(entries) if entries else columns

    def _append_to(
        self, request: Request, token_ids: list[int], entries: list[tuple[int, int, int, int]]
    ) -> tuple[int, FinishedEvent | None]:
        """Append tokens until one ends the request: how many, and the end."""
        rows, row, origin = self._rows, request.row, request.new.origin
        for place, token_id in enumerate(token_ids):
            num_tokens = int(rows.num_tokens[row])
            rows.token_ids[row, num_tokens] = token_id
            rows.num_tokens[row] = num_tokens + 1
            entries.append((origin.owner, origin.handle, num_tokens - request.new.num_prompt_tokens, token_id))
            self._queue.charge_token(int(rows.tenant[row]))
            end = self._end_at(request, num_tokens + 1, token_id)
            if end is not None:
                return place + 1, end
        return len(token_ids), None

    def _end_at(self, request: Request, num_tokens: int, token_id: int) -> FinishedEvent | None:
        new = request.new
        if token_id in new.stop_token_ids and num_tokens - new.num_prompt_tokens >= new.sampling.min_tokens:
            return self._endings.finish(request, FinishReason.STOP, stop_token_id=token_id)
        if num_tokens == request.limit:
            return self._endings.finish(request, FinishReason.LENGTH)
        return None


def _vectors(step: InFlightStep, output: PooledOutput, failed: dict[int, str]) -> tuple[VectorEvent, ...]:
    """No decision depends on them, so a replay needs none."""
    reported = {entry.row: entry.values for entry in output.vectors}
    return tuple(
        [
            VectorEvent(chunk.request.new.origin, reported[chunk.row])
            for chunk in step.chunks
            if chunk.row in reported
            and chunk.row not in failed
            and chunk.counts
            and chunk.request.status is not RequestStatus.FINISHED
        ]
    )
