"""Which passes make a step, and in which order.

Owns: the rules in force, and which rows sit out. Must not know: how a pass works.
"""

from headway_scheduler.core.admission.admission import Admission
from headway_scheduler.core.admission.core_state import CoreState
from headway_scheduler.core.admission.refusals import Reason
from headway_scheduler.core.memory.epoch import Epoch
from headway_scheduler.core.policies.batching import StepRules
from headway_scheduler.core.state.step_plan import StepPlan
from headway_scheduler.core.step.decode_pass import DecodePass
from headway_scheduler.core.step.gap_guard import GapGuard
from headway_scheduler.core.step.prefill_pass import PrefillPass


class Passes:
    """Asks for rules only when a batch begins or first decodes."""

    def __init__(
        self,
        state: CoreState,
        epoch: Epoch,
        admission: Admission,
        decode: DecodePass,
        prefill: PrefillPass,
        gaps: GapGuard,
    ) -> None:
        self._batching = state.batching
        self._max_decode_only_steps = state.limits.max_decode_only_steps
        self._num_decode_only_steps = 0
        """Steps in a row that only decoded while a prompt waited."""
        self._waiting = state.waiting
        self._epoch = epoch
        self._admission = admission
        self._decode = decode
        self._prefill = prefill
        self._gaps = gaps
        self._chooses_batch = not state.batching.overlaps_own_steps and epoch.num_lanes == 1
        """Whether steps in flight may share no row. With several lanes they do not: the lanes are the batches."""
        self._owed: set[int] = set()
        """Lanes that decode before another prompt runs alone."""
        self._set_rules(any_decoded=False)

    def _set_rules(self, *, any_decoded: bool) -> None:
        """``any_decoded``: whether this batch has decoded."""
        self._any_decoded = any_decoded
        self.rules = self._batching.rules(any_decoded=any_decoded)

    def begin_step(self) -> None:
        """End the batch if nothing runs."""
        if self._any_decoded and not self._epoch.rows.num_live:
            self._set_rules(any_decoded=False)

    def end_step(self, plan: StepPlan, *, has_decoded: bool) -> None:
        """Record a complete plan, which is about to be sent."""
        self._owed.discard(self._epoch.decoding.lane)
        if self._gaps.is_on:
            self._gaps.record_step(plan)
        if self._max_decode_only_steps:
            is_decode_only = not plan.chunks and bool(self._epoch.prefilling or self._waiting)
            self._num_decode_only_steps = self._num_decode_only_steps + 1 if is_decode_only else 0
        if has_decoded and not self._any_decoded:
            self._set_rules(any_decoded=True)

    def run(self, plan: StepPlan) -> int:
        """Fill the plan; return its tokens without proposals. Without any, nothing is left of it."""
        self._fill(plan)
        epoch = self._epoch
        total = epoch.decoding.num_decoding + plan.num_chunk_tokens
        if not total:
            epoch.swapping.complete_plan()
            epoch.decoding.let_decode(plan.held_back)
        return total

    def _fill(self, plan: StepPlan) -> None:
        rules = self.rules
        if self._chooses_batch:
            self._choose_batch(plan)
        if 0 < self._max_decode_only_steps <= self._num_decode_only_steps:
            self._admission.hurry(plan, rules)
        if not rules.prompts_run_alone:
            self._serve_decodes(plan)
            if self._epoch.prefilling or self._waiting:
                self._prefill.serve(plan, rules)
        elif not self._run_prompts_alone(plan, rules):
            self._serve_decodes(plan)
        if self._gaps.is_on and not plan.chunks and not self._epoch.decoding.num_decoding and self._end_hold(plan):
            # The rows for which others sat out lack blocks.
            self._decode.serve(plan)

    def _serve_decodes(self, plan: StepPlan) -> None:
        if self._gaps.is_on:
            self._gaps.serve(plan)
        self._decode.serve(plan)

    def _choose_batch(self, plan: StepPlan) -> None:
        """Leave out rows in flight, and rows beyond the batch size; O(running)."""
        epoch, rows = self._epoch, self._epoch.rows
        in_flight = set[int]().union(*(step.ran_rows() for step in epoch.in_flight))
        ready = [row for row in rows.live_rows().tolist() if row not in in_flight]
        ready.sort(key=rows.order_key.__getitem__)
        batch = ready[: epoch.max_rows_per_step]
        if len(batch) < len(ready) and self._gaps.is_active:
            batch = self._gaps.most_urgent(ready, len(batch), plan.now)
        plan.max_new_requests = epoch.max_rows_per_step - len(batch)
        plan.sits_out = in_flight.union(set(ready).difference(batch))
        epoch.decoding.hold_back(plan, [row for row in epoch.decoding.indices().tolist() if row in plan.sits_out])

    def _run_prompts_alone(self, plan: StepPlan, rules: StepRules) -> bool:
        """Fill the step with prompts while decodes sit out; return whether one ran.

        None runs while a decode needs a block: prompts would take every free block, be preempted, and start again, for
        ever. For the same reason each lane that decodes gets a step once prompts are short of blocks: the decodes for which
        they make way may be another lane's.
        """
        epoch = self._epoch
        if epoch.has_stalled_rows or self._owes_decodes():
            for row in sorted(epoch.prefilling):
                plan.leave_out(row)
            self._admission.refuse_all(Reason.BLOCKS)
            return False
        if not epoch.prefilling and (not self._waiting or self._admission.cut_of(rules) is None):
            return False
        epoch.decoding.hold_back(plan, epoch.decoding.indices().tolist())
        self._prefill.serve(plan, rules)
        if not plan.chunks:
            self._end_hold(plan)
            if plan.short_of_blocks:
                self._owed.update(range(epoch.num_lanes))
        return bool(plan.chunks)

    def _owes_decodes(self) -> bool:
        self._owed = {lane for lane in self._owed if self._epoch.lanes[lane].can_go_on()}
        return bool(self._owed)

    def _end_hold(self, plan: StepPlan) -> bool:
        """Let rows decode in this step after all; return whether there are any."""
        held_back = [row for row in plan.held_back if row not in plan.sits_out]
        self._epoch.decoding.let_decode(held_back)
        plan.held_back = [row for row in plan.held_back if row in plan.sits_out]
        return bool(held_back)
