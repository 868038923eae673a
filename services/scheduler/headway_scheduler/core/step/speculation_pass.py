"""The speculation pass: proposals for decoding rows, with the rest of the budget.

Owns: how many proposals fit. Must not know: when speculation pays (``speculation``).
"""

from headway_scheduler.core.admission.core_state import CoreState
from headway_scheduler.core.admission.running_requests import RunningRequests
from headway_scheduler.core.memory.epoch import Epoch
from headway_scheduler.core.state.step_plan import StepPlan
from headway_scheduler.core.step.speculation import SpeculationPolicy


class SpeculationPass:
    """Costs nothing if the executor does not speculate."""

    def __init__(self, state: CoreState, epoch: Epoch, running: RunningRequests) -> None:
        self.policy = SpeculationPolicy(epoch.capacity.max_speculative_tokens, state.step_times)
        self._limits = state.limits
        self._losses = state.losses
        self._epoch = epoch
        self._rows = epoch.rows
        self._running = running

    def serve(self, plan: StepPlan) -> None:
        """Let decoding rows run proposals."""
        if not self.policy.max_tokens or self._losses.is_active:
            return
        rows, decoding, step = self._rows, self._epoch.decoding.indices(), self._epoch.next_step
        if not 0 < len(decoding) <= self._limits.max_speculating_seqs:
            return
        is_ready = rows.num_computed_tokens[decoding] >= rows.speculates_from[decoding]
        if not self.policy.is_time_to_try(step, len(decoding)):
            is_ready &= rows.is_proven[decoding].any()
        ready = decoding[is_ready].tolist()
        if self._epoch.leaving:
            # How much of it there is to copy must be known before the answer.
            ready = [row for row in ready if row not in self._epoch.leaving]
        if not ready:
            return
        records = [rows.request_in(row).speculation for row in ready]
        positions = rows.num_computed_tokens[ready].tolist()
        candidates = list(zip(records, positions, strict=True))
        objective_s = self._running.tightest.tightest_s
        counts = self.policy.choose(candidates, self._epoch.decoding.shape(), step, objective_s)
        for row, record, count in zip(ready, records, counts, strict=True):
            rows.record_speculation(row, record)
            num_tokens = self._find_room(plan, row, count)
            if num_tokens > 0:
                plan.let_speculate(row, num_tokens)

    def _find_room(self, plan: StepPlan, row: int, count: int) -> int:
        """How many of ``count`` proposals fit; 0 or less for none.

        New blocks are taken only if one per row stays free: proposals, perhaps wrong, must not cause a preemption.
        """
        rows, epoch = self._rows, self._epoch
        end = int(rows.num_computed_tokens[row]) + 1
        count = min(count, int(rows.last_position[row]) - end, epoch.budget_left(plan) - plan.num_speculative_tokens)
        missing = -(-(end + count) // rows.block_size) - int(rows.num_blocks[row])
        if count <= 0 or missing <= 0:
            return count
        if plan.short_of_blocks or epoch.pool.num_free < missing + rows.num_live:
            return int(rows.num_blocks[row]) * rows.block_size - end
        epoch.extend(plan, row, missing)
        epoch.decoding.start([row])
        return count
