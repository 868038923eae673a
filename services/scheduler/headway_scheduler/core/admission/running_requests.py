"""The requests with a row, from taking it to giving it up.

Owns: rows, blocks, stop tokens and objectives, which change together. Must not know: which request starts or is preempted.
"""

from headway_proto.step import NO_LANE
from headway_scheduler.core.admission.core_state import CoreState
from headway_scheduler.core.admission.objectives import TightestObjective
from headway_scheduler.core.admission.running_adapters import RunningAdapters
from headway_scheduler.core.memory.cached_prefixes import CachedPrefixes
from headway_scheduler.core.memory.epoch import Epoch
from headway_scheduler.core.state.counters import WasteReason
from headway_scheduler.core.state.indices import BlockIndices
from headway_scheduler.core.state.request import Request, RequestStatus
from headway_scheduler.core.state.step_plan import PrefillChunk, StepPlan
from headway_scheduler.core.state.stop_tokens import StopTokens

NUM_COMPARED_PREFIXES = 8


class RunningRequests:
    """``tightest``: their tightest inter-token objective. ``adapters``: which of them they use."""

    def __init__(self, state: CoreState, epoch: Epoch, prefixes: CachedPrefixes) -> None:
        self.tightest = TightestObjective()
        self.adapters = RunningAdapters(state.limits.max_adapters)
        self.stop_tokens = StopTokens(epoch.capacity.vocab_size)
        self._state = state
        self._epoch = epoch
        self._rows = epoch.rows
        self._prefixes = prefixes
        self._may_speculate = epoch.capacity.max_speculative_tokens > 0
        self._frees_at_once = not state.batching.overlaps_own_steps or epoch.num_lanes > 1
        """Whether a row may be in no step in flight, so that its blocks need not wait for one."""
        self._offloads = epoch.swapping.offloads
        self._protects_gaps = state.limits.protect_itl

    def take_row(self, request: Request, table: BlockIndices, num_shared: int) -> int:
        """Give a request a row; the first ``num_shared`` blocks of ``table`` are cached."""
        rows, state = self._rows, self._state
        if request.start < 0:
            request.start = state.num_started
            state.num_started += 1
        row = rows.take(request, table)
        if self._may_speculate:
            rows.record_speculation(row, request.speculation)
        rows.tenant[row] = state.waiting.queue.place_of_tenant(request)
        if request.num_swapped_tokens or request.stored is not None:
            self._epoch.swapping.swap_in(request, table, num_shared)
        if request.is_leaving:
            self._epoch.leaving.add(row)
        if self._protects_gaps:
            rows.itl_slo_ms[row], rows.token_time[row] = request.itl_slo_ms, 0.0
        if request.itl_slo_ms:
            self.tightest.change(request.itl_slo_ms, 1)
        request.num_cached_blocks = num_shared
        request.status = RequestStatus.RUNNING
        self.adapters.join(request)
        self.stop_tokens.add(request.new.stop_token_ids)
        return row

    def advance_prompt(self, plan: StepPlan, request: Request, end: int, num_tokens: int) -> None:
        """Run ``num_tokens`` tokens of a prompt, up to position ``end``."""
        row = request.row
        request.served_time = plan.now
        self._rows.num_computed_tokens[row] = end
        completes = end == request.num_admitted_tokens
        plan.add_chunk(row, num_tokens)
        plan.num_completing += completes
        plan.chunks.append(PrefillChunk(request, row, end - num_tokens, end, completes))
        if plan.newest_prompts is not None:
            others = [other for other in plan.newest_prompts if other is not request]
            plan.newest_prompts = [request, *others[: NUM_COMPARED_PREFIXES - 1]]
        if completes:
            self._epoch.prefilling.discard(row)
        else:
            self._epoch.prefilling.add(row)

    def keep_tokens(self, request: Request, reason: WasteReason) -> None:
        """Copy tokens from the row. ``reason``: why computed ones may be lost."""
        rows, row = self._rows, request.row
        request.token_ids = rows.tokens_of(row)
        request.lost_work = int(rows.num_computed_tokens[row]), reason
        if len(request.token_ids) > request.num_admitted_tokens:
            request.last_token_time = self._state.observer.last_answer_time

    def release_row(self, row: int, *, owed_tokens: bool, cache: bool = True) -> None:
        """Give up a row and its blocks. ``owed_tokens``: steps in flight still owe tokens."""
        rows, epoch = self._rows, self._epoch
        request = rows.request_in(row)
        num_tokens = int(rows.num_tokens[row])
        if cache and num_tokens > request.num_admitted_tokens:
            # Each token sampled in this stay came from a step that had computed all tokens before it.
            self._prefixes.register(request, row, num_tokens - 1)
        if self._offloads and cache:
            self._state.counters.num_offloaded_blocks += self._prefixes.offload(request, row)
        fence = self._fence_of(row)
        for step in epoch.in_flight:
            if row not in step.leavers:
                samples = step.samples(row)
                step.leavers[row] = request if samples and owed_tokens else None
                if samples and owed_tokens:
                    request.num_unreturned += 1
                elif samples:
                    self._state.count_surplus(1)
        epoch.pool.release(rows.blocks_of(row), fence)
        if request.itl_slo_ms:
            self.tightest.change(request.itl_slo_ms, -1)
        lane = rows.lane[row]
        if lane != NO_LANE:
            epoch.lanes[lane].give_up(row)
        rows.give_back(row)
        epoch.prefilling.discard(row)
        epoch.leaving.discard(row)
        epoch.finished_rows.append(row)
        self.adapters.leave(request)
        self.stop_tokens.remove(request.new.stop_token_ids)

    def _fence_of(self, row: int) -> int | None:
        """The step that must return before the blocks are reused; None if no step may write them."""
        in_flight = self._epoch.in_flight
        if not in_flight:
            return None
        if self._frees_at_once and not any(step.runs(row) for step in in_flight):
            return None
        return in_flight[-1].step

    def newest_prompts(self, plan: StepPlan) -> list[Request]:
        """Return a few running prompts, planned or in flight, latest first."""
        if plan.newest_prompts is None:
            newest: dict[int, Request] = {}
            for chunks in (plan.chunks, *(step.chunks for step in reversed(self._epoch.in_flight))):
                for chunk in reversed(chunks):
                    if chunk.holds_blocks and len(newest) < NUM_COMPARED_PREFIXES:
                        newest.setdefault(chunk.row, chunk.request)
            plan.newest_prompts = list(newest.values())
        return plan.newest_prompts
