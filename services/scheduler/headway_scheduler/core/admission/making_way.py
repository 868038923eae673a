"""Preemption: for a block, for a waiting request, or for one that runs alone.

Owns: preemption and its limits. Must not know: budgets, or when a request starts.
"""

from headway_scheduler.core.admission.core_state import CoreState
from headway_scheduler.core.admission.running_requests import RunningRequests
from headway_scheduler.core.admission.waiting_queue import HEAD_RANK, Lane, is_promoted
from headway_scheduler.core.memory.epoch import Epoch
from headway_scheduler.core.memory.preemption import choose_victim, in_victim_order
from headway_scheduler.core.state.counters import Preemption, PreemptionMode, PreemptionReason, WasteReason
from headway_scheduler.core.state.request import START_BITS, Request, RequestStatus
from headway_scheduler.core.state.step_plan import StepPlan

HIGHEST_CLASS = 1
MAX_WAYS_MADE = 4


class MakingWay:
    """Preempts requests, which return to the queue."""

    def __init__(self, state: CoreState, epoch: Epoch, running: RunningRequests) -> None:
        self._state = state
        self._epoch = epoch
        self._rows = epoch.rows
        self._pool = epoch.pool
        self._running = running
        self._queue = state.waiting.queue

    def preempt(self, plan: StepPlan, row: int, reason: PreemptionReason) -> None:
        """Preempt a row. After ``MAX_WAYS_MADE`` times for others its request goes before all classes."""
        request = self._rows.request_in(row)
        self._running.keep_tokens(request, WasteReason.RECOMPUTE)
        self._swap_out(request, row)
        self._running.release_row(row, owed_tokens=True)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        if reason.is_for_another:
            request.num_ways_made += 1
            if request.num_ways_made >= MAX_WAYS_MADE:
                request.rank = HEAD_RANK
        mode = PreemptionMode.SWAP if request.num_swapped_tokens else PreemptionMode.RECOMPUTE
        counters = self._state.counters
        counters.num_preemptions += 1
        counters.preemptions[Preemption(mode, reason)] += 1
        self._state.waiting.enter(request)
        plan.drop_row(row)
        plan.short_of_blocks = True

    def _swap_out(self, request: Request, row: int) -> None:
        """Copy blocks to the host if that is cheaper than recomputing them."""
        rows = self._rows
        num_tokens = int(rows.num_computed_tokens[row])
        if num_tokens == int(rows.last_position[row]):
            return  # it is about to end
        blocks = rows.blocks_of(row)[: -(-num_tokens // rows.block_size)]
        self._state.counters.num_swapped_out_blocks += self._epoch.swapping.swap_out(request, blocks, num_tokens)

    def obtain_block(self, plan: StepPlan, row: int) -> bool:
        """Whether a block is free for ``row``, after preempting later requests if needed.

        The row sits out if a step in flight will free a block, or if all later requests already run in this step.
        """
        while not self._pool.num_free:
            plan.short_of_blocks = True
            if self._pool.num_fenced > plan.num_promised_blocks:
                plan.num_promised_blocks += 1
                return False
            victim = choose_victim(self._rows, self._pool, row, plan.rows_in_prompt())
            if victim is None:
                return False
            self.preempt(plan, victim, PreemptionReason.NO_BLOCK)
            if victim == row:
                return False
        return True

    def may_preempt_for(self, request: Request) -> bool:
        """Whether lower classes are preempted for this request."""
        return self._queue.reason_to_preempt_for(request) is not None

    def make_room(self, plan: StepPlan, request: Request, *, num_blocks: int, needs_row: bool) -> bool:
        """Preempt requests of lower classes for blocks or a row.

        Once per step, and none if all were not enough. Blocks behind a fence come free anyway.
        """
        reason = self._queue.reason_to_preempt_for(request)
        if plan.short_of_blocks or reason is None:
            return False
        num_blocks -= self._pool.num_fenced
        if num_blocks <= 0 and not needs_row:
            return False
        victims = self._victims_for(plan, request, num_blocks)
        for row in victims:
            victim = self._rows.request_in(row)
            self.preempt(plan, row, reason)
            if reason is PreemptionReason.LATE_FIRST_TOKEN:
                # Otherwise it would come back first and take the room again.
                self._queue.move(victim, Lane.NORMAL)
        return bool(victims)

    def _victims_for(self, plan: StepPlan, request: Request, num_blocks: int) -> list[int]:
        """The lowest class first; empty if all are not enough."""
        rows = self._rows
        own_class = HIGHEST_CLASS if is_promoted(request.rank) else request.new.priority
        keys = rows.order_key[: rows.end]
        is_lower = (
            (keys >= 0) & ((keys >> START_BITS) % 2 != 0) & (rows.priority[: rows.end] > own_class)
        )  # none promoted
        is_lower &= rows.num_computed_tokens[: rows.end] < rows.last_position[: rows.end]  # or it is about to end
        planned = plan.rows_in_prompt()
        candidates = [row for row in is_lower.nonzero()[0].tolist() if row not in planned]
        victims = []
        for row in in_victim_order(rows, self._pool, candidates):
            victims.append(row)
            num_blocks -= self._pool.num_held_once(rows.blocks_of(row))
            if num_blocks <= 0:
                return victims
        return []

    def clear_for(self, plan: StepPlan, alone: Request) -> None:
        """Preempt all requests but ``alone``."""
        for row in self._rows.live_rows().tolist():
            if self._rows.request_in(row) is not alone:
                self.preempt(plan, row, PreemptionReason.RUN_ALONE)
        plan.short_of_blocks = False
