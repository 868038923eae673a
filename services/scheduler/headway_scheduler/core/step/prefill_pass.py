"""The prefill pass: chunks of prompts under way, and starts of waiting requests.

Owns: order and size of chunks. Must not know: which rows decode.
"""

from headway_scheduler.core.admission.admission import Admission
from headway_scheduler.core.admission.core_state import CoreState
from headway_scheduler.core.admission.lane_balance import LaneBalance
from headway_scheduler.core.admission.making_way import MakingWay
from headway_scheduler.core.admission.running_requests import RunningRequests
from headway_scheduler.core.admission.waiting_queue import HEAD_RANK, Lane
from headway_scheduler.core.memory.epoch import Epoch
from headway_scheduler.core.policies.batching import PromptCut, StepRules
from headway_scheduler.core.policies.token_budget import PromptLoad
from headway_scheduler.core.state.step_plan import StepPlan


class PrefillPass:
    """``budget_in_force``: tokens allowed in the newest step with prompts."""

    def __init__(
        self, state: CoreState, epoch: Epoch, running: RunningRequests, making_way: MakingWay, admission: Admission
    ) -> None:
        self.budget_in_force = epoch.max_num_batched_tokens
        self._state = state
        self._waiting = state.waiting
        self._epoch = epoch
        self._rows = epoch.rows
        self._prefilling = epoch.prefilling
        self._running = running
        self._making_way = making_way
        self._admission = admission
        self._balance = LaneBalance(state, epoch)

    def serve(self, plan: StepPlan, rules: StepRules) -> None:
        """Serve prompts under way, then waiting ones, or first those that the order prefers."""
        cut = self._admission.cut_of(rules)
        if self._prefilling:
            self._promote_starved(plan.now)
        if rules.cut is not PromptCut.NOWHERE:
            spares = self._state.losses.disturbs(self._epoch)
            plan.budget = self._state.budget.step_tokens(
                plan.budget, lambda: self._prompt_load(plan.now), spares=spares
            )
            self.budget_in_force = plan.budget
        if self._prefilling:
            self._serve_under_way(plan, cut)
        if cut is not None:
            self._admission.admit_waiting(plan, cut)

    def _promote_starved(self, now: float) -> None:
        """Move prompts without tokens for ``aging_s`` above all classes, which could fill every step."""
        for row in sorted(self._prefilling):
            request = self._rows.request_in(row)
            if self._waiting.queue.is_starved(request, now):
                request.rank = HEAD_RANK
                self._rows.order_key[row] = request.order_key

    def _prompt_load(self, now: float) -> PromptLoad | None:
        """The prompts that want to run beside the decodes; None if nothing decodes."""
        rows, decoding = self._rows, self._epoch.decoding.shape()
        if not decoding.num_rows:
            return None
        under_way = self._prompts_under_way()
        num_left = self._waiting.room.num_tokens
        for row in under_way:
            num_left += int(rows.num_tokens[row] - rows.num_computed_tokens[row])
        first = self._waiting.queue.first(now)
        return PromptLoad(
            decoding=decoding,
            objective_s=self._running.tightest.tightest_s,
            num_computed_tokens=int(rows.num_computed_tokens[under_way[0]]) if under_way else 0,
            num_left=num_left,
            is_urgent=first is not None and first.lane == Lane.URGENT,
        )

    def _serve_under_way(self, plan: StepPlan, cut: PromptCut | None) -> None:
        """Run a chunk of each prompt, after waiting requests that the order prefers."""
        rows = self._rows
        under_way = [(row, rows.request_in(row)) for row in self._prompts_under_way()]
        is_overtaken = cut is not None and (self._waiting.queue.may_overtake() or self._admission.is_decode_next())
        for row, request in under_way:
            if cut is not None and is_overtaken:
                self._admission.admit_waiting(plan, cut, before=request)
            if row not in self._prefilling or rows.requests[row] is not request:
                continue  # preempted for an earlier request
            num_tokens = 0 if row in plan.sits_out else self._next_chunk(plan, row)
            if num_tokens:
                end = int(rows.num_computed_tokens[row]) + num_tokens
                self._epoch.extend(plan, row, -(-end // rows.block_size) - int(rows.num_blocks[row]))
                self._running.advance_prompt(plan, request, end, num_tokens)
            elif row in self._prefilling:
                plan.leave_out(row)

    def _prompts_under_way(self) -> list[int]:
        """Rows in their prompt, in the order in which they are served."""
        request_in, place = self._rows.request_in, self._waiting.queue.prompt_place
        return sorted(self._prefilling, key=lambda row: place(request_in(row)))

    def _next_chunk(self, plan: StepPlan, row: int) -> int:
        rows = self._rows
        computed = int(rows.num_computed_tokens[row])
        num_left = int(rows.num_tokens[row]) - computed
        wanted = self._balance.most_of(plan, min(num_left, self._epoch.budget_left(plan)), num_left)
        if wanted <= 0:
            return 0
        room = int(rows.num_blocks[row]) * rows.block_size - computed
        if room < wanted and not room and not self._making_way.obtain_block(plan, row):
            return 0
        room += self._epoch.pool.num_free * rows.block_size
        plan.short_of_blocks |= room < wanted
        return min(wanted, room)
