"""The prefill pass: chunks of prompts under way, and starts of waiting requests.

Owns: order and size of chunks. Must not know: which rows decode.
"""

from headway_scheduler.core.admission.admission import Admission
from headway_scheduler.core.admission.core_state import CoreState
from headway_scheduler.core.admission.making_way import MakingWay
from headway_scheduler.core.admission.running_requests import RunningRequests
from headway_scheduler.core.admission.waiting_queue import HEAD_RANK, Lane
from headway_scheduler.core.memory.epoch import Epoch
from headway_scheduler.core.policies.batching import PromptCut, StepRules
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
        self._ranks_classes = state.order.ranks_classes
        self._overtakes = state.order.overtakes_prompts

    def serve(self, plan: StepPlan, rules: StepRules) -> None:
        """Serve prompts under way, then waiting ones, or first those that the order prefers."""
        cut = self._admission.cut_of(rules)
        if self._prefilling and self._ranks_classes:
            self._promote_starved(plan.now)
        if self._state.bounds_prompts and rules.cut is not PromptCut.NOWHERE:
            self._bound_prompts(plan)
        if self._prefilling:
            self._serve_under_way(plan, cut)
        if cut is not None:
            self._admission.admit_waiting(plan, cut)

    def _promote_starved(self, now: float) -> None:
        """Move prompts without tokens for ``aging_s`` above all classes, which could fill every step."""
        for row in sorted(self._prefilling):
            request = self._rows.request_in(row)
            if request.rank != HEAD_RANK and now - request.served_time >= self._state.limits.aging_s:
                request.rank = HEAD_RANK
                self._rows.order_key[row] = request.order_key

    def _bound_prompts(self, plan: StepPlan) -> None:
        rows, decoding = self._rows, self._epoch.decoding.shape()
        self.budget_in_force = plan.budget
        if not decoding.num_rows:
            return
        under_way = self._prompts_under_way()
        num_left = self._waiting.room.num_tokens
        for row in under_way:
            num_left += int(rows.num_tokens[row] - rows.num_computed_tokens[row])
        first = self._waiting.queue.first(plan.now)
        num_prompt_tokens = self._state.budget.prompt_tokens(
            decoding=decoding,
            objective_s=self._running.tightest.tightest_s,
            num_computed_tokens=int(rows.num_computed_tokens[under_way[0]]) if under_way else 0,
            num_left=num_left,
            is_urgent=first is not None and first.lane == Lane.URGENT,
        )
        plan.budget = min(plan.budget, decoding.num_rows + num_prompt_tokens)
        self.budget_in_force = plan.budget

    def _serve_under_way(self, plan: StepPlan, cut: PromptCut | None) -> None:
        """Run a chunk of each prompt, after waiting requests that the order prefers."""
        rows = self._rows
        under_way = [(row, rows.request_in(row)) for row in self._prompts_under_way()]
        is_overtaken = cut is not None and self._overtakes and not self._keeps_service_order
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
                plan.exceptions.append((row, 0))

    @property
    def _keeps_service_order(self) -> bool:
        """Whether prompts follow the service order, not the queue's.

        They do while a preempted request waits: memory is short, and blocks are taken in service order. Otherwise a
        prompt could take blocks that another waits for, be preempted, and come back first.
        """
        return self._waiting.num_preempted > 0 and not self._ranks_classes

    def _prompts_under_way(self) -> list[int]:
        if self._keeps_service_order:
            return sorted(self._prefilling, key=self._rows.order_key.__getitem__)
        request_in, place = self._rows.request_in, self._waiting.queue.prompt_place
        return sorted(self._prefilling, key=lambda row: place(request_in(row)))

    def _next_chunk(self, plan: StepPlan, row: int) -> int:
        rows = self._rows
        computed = int(rows.num_computed_tokens[row])
        wanted = min(int(rows.num_tokens[row]) - computed, self._epoch.budget_left(plan))
        if wanted <= 0:
            return 0
        room = int(rows.num_blocks[row]) * rows.block_size - computed
        if room < wanted and not room and not self._making_way.obtain_block(plan, row):
            return 0
        room += self._epoch.pool.num_free * rows.block_size
        plan.short_of_blocks |= room < wanted
        return min(wanted, room)
