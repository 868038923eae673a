"""The rows that decode: one token per step, until they need a block or have nothing left to compute.

Owns: which rows decode, are stalled or idle. Must not know: where blocks come from.
"""

import numpy as np

from headway_scheduler.core.memory.row_table import NEVER, RowTable
from headway_scheduler.core.state.indices import NO_ROWS, RowIndices
from headway_scheduler.core.state.step_plan import StepPlan
from headway_scheduler.core.state.step_shape import StepShape


class DecodingRows:
    """``stalled`` rows wait for a block, ``idle`` rows for their last token."""

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows
        self.stalled: set[int] = set()
        self.idle: set[int] = set()
        self._indices = NO_ROWS
        self._is_changed = False

    def indices(self) -> RowIndices:
        """The rows, ascending; the same array until they change."""
        if self._is_changed:
            rows = self._rows
            self._indices = rows.decoding[: rows.end].nonzero()[0]
            self._is_changed = False
        return self._indices

    def shape(self) -> StepShape:
        """A step of these rows alone; O(rows)."""
        decoding = self.indices()
        num_context_tokens = int(self._rows.num_computed_tokens[decoding].sum())
        return StepShape(len(decoding), len(decoding), num_context_tokens, 0)

    def start(self, starting: list[int], tick: int) -> None:
        """Let these rows decode from step ``tick`` on."""
        rows = self._rows
        indices = np.asarray(starting)
        end = np.minimum(rows.num_blocks[indices] * rows.tokens_per_block, rows.last_position[indices])
        rows.due_tick[indices] = end - rows.num_computed_tokens[indices] + np.array(tick, dtype=np.int64)
        rows.decoding[indices] = 1
        self._is_changed = True

    def stop(self, row: int) -> None:
        """Stop a row's decoding."""
        self._rows.decoding[row] = 0
        self._rows.due_tick[row] = NEVER
        self._is_changed = True

    def resume(self, served: RowIndices) -> None:
        """Let the stalled ones of ``served`` decode; they have their block."""
        if self.stalled:
            self._rows.decoding[served] = 1
            self._is_changed = True
            self.stalled.difference_update(served.tolist())

    def hold_back(self, plan: StepPlan, decoding: list[int]) -> None:
        """Let decoding rows sit out this step."""
        if decoding:
            self._rows.hold_back(decoding)
            plan.held_back = plan.held_back + decoding
            self._is_changed = True

    def let_decode(self, held_back: list[int], *, in_this_step: bool) -> None:
        """Undo ``hold_back``, now or from the next step on."""
        if held_back:
            self._rows.let_decode(held_back, in_this_step=in_this_step)
            self._is_changed = True

    def give_up(self, row: int) -> None:
        """Forget a row that has been released."""
        self._is_changed = True
        self.stalled.discard(row)
        self.idle.discard(row)
