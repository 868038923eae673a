"""The rows of one lane, which decode: one token per step of the lane, until they need a block or have nothing left to
compute.

Owns: which rows of the lane decode, are stalled or idle, and in which steps of the lane, counted from 0 (*ticks*), they
need a block (*due*) or have nothing left to compute (*end*). Must not know: where blocks come from, or other lanes.

A row that decodes fills a block every ``block_size`` ticks. So the tick in which its blocks are full, modulo
``block_size``, is the same for as long as it decodes: its *turn*. Each tick has one turn, whose rows are due.
"""

import numpy as np

from headway_scheduler.core.memory.row_table import RowTable
from headway_scheduler.core.state.indices import NO_ROWS, RowIndices
from headway_scheduler.core.state.step_plan import StepPlan
from headway_scheduler.core.state.step_shape import StepShape

NEVER = np.iinfo(np.int32).max
NO_TURN = -1


class DecodingRows:
    """``stalled`` rows wait for a block, ``idle`` rows for their last token."""

    def __init__(self, rows: RowTable, lane: int = 0) -> None:
        self.lane = lane
        self.stalled: set[int] = set()
        self.idle: set[int] = set()
        self.num_rows = 0
        """All rows of the lane."""
        self.num_decoding = 0
        """Those that run a token in the lane's next step: ``len(indices())``, without looking."""
        self._rows = rows
        self._tick = 0
        # Shape [max_rows]: 1 while the row runs one token in each step of the lane, until it is due or ends.
        self._decodes = np.zeros(rows.max_rows, dtype=np.int32)
        self._turn = np.full(rows.max_rows, NO_TURN, dtype=np.int32)
        """Of each row that decodes."""
        self._rows_of_turn: list[RowIndices | None] = [None] * rows.block_size
        """None if they have changed since they were looked for."""
        self._all_due_from = 0
        """From this tick on every row whose turn it is is due. Before, some still have room in their blocks."""
        self._end_tick = np.full(rows.max_rows, NEVER, dtype=np.int32)
        self._next_end = NEVER
        """No row ends before this tick."""
        self._indices = NO_ROWS
        self._is_changed = False
        self._num_context_tokens = 0
        """Computed tokens of the rows that decode."""

    def indices(self) -> RowIndices:
        """The rows that decode, ascending; the same array until they change."""
        if self._is_changed:
            self._indices = self._decodes[: self._rows.end].nonzero()[0]
            self._is_changed = False
        return self._indices

    def can_go_on(self) -> bool:
        """Whether a row that decodes has something left to compute; O(rows)."""
        decoding = self.indices()
        return bool((self._rows.num_computed_tokens[decoding] < self._rows.last_position[decoding]).any())

    @property
    def may_end(self) -> bool:
        """Whether the next answer may bring the last token of some row: no row has anything left to compute before."""
        return bool(self.idle) or self._tick >= self._next_end

    def due(self) -> RowIndices:
        """The rows that need a block for the lane's next step, ascending, once those that end are stopped."""
        turn, rows = self._tick % self._rows.block_size, self._rows
        known = self._rows_of_turn[turn]
        found: RowIndices = (self._turn[: rows.end] == turn).nonzero()[0] if known is None else known
        self._rows_of_turn[turn] = found
        if self._tick < self._all_due_from:
            found = found[rows.num_computed_tokens[found] == rows.num_blocks[found] * rows.block_size]
        return found

    def stop_ended(self) -> None:
        """Let the rows idle that have nothing left to compute; they wait for their last token."""
        if self._tick < self._next_end:
            return
        decoding = self.indices()
        for row in decoding[self._end_tick[decoding] == self._tick].tolist():
            self.stop(row)
            self.idle.add(row)
        self._next_end = int(self._end_tick[self.indices()].min(initial=NEVER))

    def shape(self) -> StepShape:
        """A step of these rows alone."""
        return StepShape(self.num_decoding, self.num_decoding, self._num_context_tokens, 0)

    def advance(self) -> None:
        """A step of the lane is sent: every row that decodes computes one token more."""
        end = self._rows.end
        num_computed = self._rows.num_computed_tokens[:end]
        num_computed += self._decodes[:end]
        self._num_context_tokens += self.num_decoding
        self._tick += 1

    def accept(self, row: int, num_tokens: int) -> None:
        """A row of the last step has computed ``num_tokens`` tokens more, which were proposed."""
        self._rows.num_computed_tokens[row] += num_tokens
        if self._decodes[row]:
            self._num_context_tokens += num_tokens

    def enter(self, starting: list[int]) -> None:
        """These rows, whose prompts are complete, decode in this lane from its next step on."""
        for row in starting:
            self._rows.lane[row] = self.lane
        self.num_rows += len(starting)
        self.start(starting)

    def start(self, starting: list[int]) -> None:
        """Let these rows decode from the lane's next step on."""
        # One by one: nearly always it is one, and many come only after speculation.
        rows = self._rows
        for row in starting:
            num_computed = int(rows.num_computed_tokens[row])
            since = self._tick - num_computed
            end = int(rows.last_position[row]) + since
            self._note_due(int(rows.num_blocks[row]) * rows.block_size + since)
            self._end_tick[row] = end
            self._next_end = min(self._next_end, end)
            if self._decodes[row]:
                self._rows_of_turn[int(self._turn[row])] = None
            else:
                self._decodes[row] = 1
                self.num_decoding += 1
                self._num_context_tokens += num_computed
            turn = since % rows.block_size
            self._turn[row] = turn
            self._rows_of_turn[turn] = None
        self._is_changed = True

    def stop(self, row: int) -> None:
        """Stop a row's decoding."""
        if self._decodes[row]:
            self._decodes[row] = 0
            self._rows_of_turn[int(self._turn[row])] = None
            self._turn[row] = NO_TURN
            self.num_decoding -= 1
            self._num_context_tokens -= int(self._rows.num_computed_tokens[row])
            self._is_changed = True

    def go_on(self, served: RowIndices) -> None:
        """Each of these rows, which were due or stalled, has one block more."""
        if self.stalled:
            self.start(served.tolist())
            self.stalled.difference_update(served.tolist())

    def hold_back(self, plan: StepPlan, decoding: list[int]) -> None:
        """Let decoding rows sit out this step."""
        if decoding:
            self._decodes[decoding] = 0
            self._turn[decoding] = NO_TURN
            self.num_decoding -= len(decoding)
            self._num_context_tokens -= int(self._rows.num_computed_tokens[decoding].sum())
            plan.held_back = plan.held_back + decoding
            self._forget_turns()

    def let_decode(self, held_back: list[int]) -> None:
        """Undo ``hold_back``, before or after that step."""
        if held_back:
            rows = self._rows
            num_computed = rows.num_computed_tokens[held_back]
            since = self._tick - num_computed
            end = rows.last_position[held_back] + since
            self._decodes[held_back] = 1
            self._turn[held_back] = since % rows.block_size
            self._note_due(int((rows.num_blocks[held_back] * rows.block_size + since).max()))
            self._end_tick[held_back] = end
            self._next_end = min(self._next_end, int(end.min()))
            self.num_decoding += len(held_back)
            self._num_context_tokens += int(num_computed.sum())
            self._forget_turns()

    def _forget_turns(self) -> None:
        self._rows_of_turn = [None] * self._rows.block_size
        self._is_changed = True

    def _note_due(self, tick: int) -> None:
        """Some row is due in this tick, perhaps not in its first turn."""
        if tick >= self._tick + self._rows.block_size:
            self._all_due_from = max(self._all_due_from, tick)

    def give_up(self, row: int) -> None:
        """Forget a row of the lane, which is being released."""
        self.stop(row)
        self.num_rows -= 1
        self.stalled.discard(row)
        self.idle.discard(row)
