"""The executor's copy of the scheduler's rows, advanced by one diff per step.

Owns: which rows are live, their counters, the state digest. Must not know: token values, backends.

Everything is checked: a wrong but plausible diff would make a backend read another request's cache.
"""

from typing import NamedTuple

import numpy as np

from headway_executor.backend import NewRow, StepBatch
from headway_executor.batch.block_moves import NO_PAIRS, BlockMoves, MoveChecks
from headway_executor.batch.block_tables import BlockTables
from headway_executor.batch.diff_checks import (
    ImpossibleDiff,
    check_distinct,
    check_range,
    decoded,
    decoded_group,
    with_pooling,
)
from headway_executor.batch.row_lanes import RowLanes, checked_exceptions
from headway_proto.columns import Int32Array
from headway_proto.step import (
    BackendInfo,
    LaneOutput,
    NewRequest,
    SchedulerOutput,
    adapters_in,
    pooled_in,
    state_digest,
)
from headway_proto.wording import shown

_NO_ROWS = np.empty(0, dtype=np.int32)


class AppliedStep(NamedTuple):
    """``moves`` is None in most steps."""

    batch: StepBatch
    moves: BlockMoves | None


class BatchState:
    """Rows ``0 .. info.max_num_rows - 1``."""

    def __init__(self, info: BackendInfo) -> None:
        self._info = info
        self._live = np.zeros(info.max_num_rows, dtype=bool)
        self._num_tokens = np.zeros(info.max_num_rows, dtype=np.int32)
        self._num_computed_tokens = np.zeros(info.max_num_rows, dtype=np.int32)
        self._tables = BlockTables(info)
        self._moves = MoveChecks(info)
        self._rows = _NO_ROWS
        self._one_each = _NO_ROWS
        self._rows_given_out = _NO_ROWS
        self._rows_of_earlier_epochs = _NO_ROWS
        self._speculating = NO_PAIRS
        self._lanes = RowLanes(info.max_num_rows, info.num_lanes) if info.num_lanes > 1 else None
        self._lost: str | None = None

    def begin_epoch(self) -> None:
        """Forget every row and host block. The next batch lists the old rows as finished."""
        self._rows_of_earlier_epochs = np.union1d(self._rows_of_earlier_epochs, self._rows_given_out)
        self._rows_given_out = _NO_ROWS
        self._live[:] = False
        self._tables.num_blocks[:] = 0
        self._moves.clear()
        self._set_rows(_NO_ROWS)
        self._speculating = NO_PAIRS
        if self._lanes is not None:
            self._lanes.clear()
        self._lost = None

    def apply(self, output: SchedulerOutput) -> AppliedStep:
        """Advance the state by one step.

        Raises:
            ImpossibleDiff: ``output`` contradicts the state. Further calls raise too, until ``begin_epoch``.
        """
        if self._lost is not None:
            raise ImpossibleDiff(f"the epoch was lost before: {self._lost}")
        try:
            return self._apply(output)
        except ImpossibleDiff as error:
            self._lost = str(error)
            raise

    def accept(self, accepted_tokens: Int32Array) -> None:
        """Count the proposals that the last step accepted.

        Raises:
            ValueError: it cannot have produced this.
        """
        # There are few rows: lists are faster than arrays.
        rows, proposed, accepted = accepted_tokens.tolist()
        expected, limits = self._speculating.tolist()
        self._speculating = NO_PAIRS
        if rows != expected:
            raise ValueError(f"rows {shown(rows)} speculated, not {shown(expected)}")
        if not all(
            0 <= right <= count <= limit for right, count, limit in zip(accepted, proposed, limits, strict=True)
        ):
            raise ValueError("more tokens were accepted than proposed, or more proposed than were allowed")
        if any(accepted):
            self._num_computed_tokens[rows] += accepted_tokens[2]
            self._num_tokens[rows] += accepted_tokens[2]

    def digest(self) -> int:
        """See ``headway_proto.step.state_digest``."""
        rows = self._rows
        lanes = None if self._lanes is None else self._lanes.of(rows)
        tables = self._tables
        return state_digest(rows, self._num_computed_tokens[rows], tables.num_blocks[rows], tables.table, lanes)

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._info.block_size

    @property
    def live_rows(self) -> Int32Array:
        """The live rows, ascending, int32, read-only."""
        return self._rows

    def _apply(self, output: SchedulerOutput) -> AppliedStep:
        if self._speculating.size:
            raise ImpossibleDiff("a step was sent before the answer to the one before it, which speculates")
        finished = self._finish(output.finished_rows) if output.finished_rows else _NO_ROWS
        new_rows: tuple[NewRow, ...] = ()
        if output.scheduled_new_reqs:
            adapters = self._adapters_of(output)
            new_rows = tuple([self._admit(request, adapters) for request in output.scheduled_new_reqs])
        if pooled := pooled_in(output):
            new_rows = with_pooling(new_rows, pooled, self._info)
        lane = self._lane_of(output)
        if self._lanes is not None and finished.size:
            self._lanes.leave(finished)
        if finished.size or new_rows:
            self._set_rows(np.flatnonzero(self._live).astype(np.int32))
        new_blocks = self._append_blocks(output) if output.new_blocks or new_rows else NO_PAIRS
        moves = self._moves.checked(output, self._tables, self._live, [new.row for new in new_rows])
        rows, scheduled, computed, samples = self._advance(output, lane)
        speculative = None
        if output.num_speculative_tokens:
            speculative = self._speculate(output.num_speculative_tokens, rows, scheduled, samples)
        if self._rows_of_earlier_epochs.size:
            finished = self._rows_of_earlier_epochs
            self._rows_of_earlier_epochs = _NO_ROWS
        self._rows_given_out = self._rows
        batch = StepBatch(
            step=output.step,
            finished_rows=finished,
            new_rows=new_rows,
            new_blocks=new_blocks,
            rows=rows,
            num_scheduled_tokens=scheduled,
            num_computed_tokens=computed,
            samples=samples,
            block_table=self._tables.shown,
            num_speculative_tokens=speculative,
            lane=lane,
        )
        return AppliedStep(batch, moves)

    def _lane_of(self, output: SchedulerOutput) -> int:
        if self._lanes is not None:
            return self._lanes.lane_of_step(output)
        if isinstance(output, LaneOutput):
            raise ImpossibleDiff("lane: this executor has one, so its steps name none")
        return 0

    def _finish(self, column: bytes) -> Int32Array:
        rows = decoded(column, "finished_rows")
        check_range(rows, len(self._live), "finished_rows: row")
        check_distinct(rows, "finished_rows: row")
        if not self._live[rows].all():
            raise ImpossibleDiff(f"finished_rows: row {rows[~self._live[rows]][0]} is not live")
        self._live[rows] = False
        self._tables.num_blocks[rows] = 0
        return rows

    def _adapters_of(self, output: SchedulerOutput) -> dict[int, str]:
        entries = adapters_in(output)
        if not entries:
            return {}
        if not self._info.supports_adapters:
            raise ImpossibleDiff("adapters: this executor takes none")
        adapters = {entry.row: entry.adapter for entry in entries}
        new_rows = {request.row for request in output.scheduled_new_reqs}
        if len(adapters) != len(entries) or not adapters.keys() <= new_rows:
            raise ImpossibleDiff("adapters: a row is not new in this step, or has several")
        return adapters

    def _admit(self, request: NewRequest, adapters: dict[int, str]) -> NewRow:
        row = request.row
        token_ids = decoded(request.token_ids, "token_ids")
        if not 0 <= row < len(self._live):
            raise ImpossibleDiff(f"new row {row} is outside 0 to {len(self._live) - 1}")
        if self._live[row]:
            raise ImpossibleDiff(f"new row {row} is already live")
        if not 0 < len(token_ids) <= self._info.max_model_len:
            raise ImpossibleDiff(f"new row {row} has {len(token_ids)} tokens; allowed: 1 to {self._info.max_model_len}")
        check_range(token_ids, self._info.vocab_size, f"new row {row}: token id")
        if not 0 < request.num_prompt_tokens <= len(token_ids):
            raise ImpossibleDiff(f"new row {row} has {request.num_prompt_tokens} prompt tokens of {len(token_ids)}")
        if not 0 <= request.num_computed_tokens < len(token_ids):
            raise ImpossibleDiff(f"new row {row} has {request.num_computed_tokens} computed of {len(token_ids)} tokens")
        if self._info.keeps_states and request.num_computed_tokens:
            raise ImpossibleDiff(
                f"new row {row} has {request.num_computed_tokens} computed tokens, and its state has none"
            )
        self._live[row] = True
        self._num_tokens[row] = len(token_ids)
        self._num_computed_tokens[row] = request.num_computed_tokens
        self._tables.num_blocks[row] = 0
        return NewRow(
            row=row,
            token_ids=token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            sampling=request.sampling,
            adapter=adapters.get(row, ""),
        )

    def _append_blocks(self, output: SchedulerOutput) -> Int32Array:
        groups = [self._tables.give(request) for request in output.scheduled_new_reqs]
        if output.new_blocks:
            groups.append(self._tables.append(output.new_blocks, self._live))
        return np.concatenate(groups, axis=1) if len(groups) > 1 else groups[0]

    def _advance(self, output: SchedulerOutput, lane: int) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array]:
        """Return (rows, scheduled, computed before this step, samples)."""
        rows, scheduled = self._rows, self._one_each
        if self._lanes is not None:
            exceptions = output.num_scheduled_tokens
            rows, scheduled = self._lanes.scheduled(lane, exceptions, self._live, self._info.max_model_len)
        elif output.num_scheduled_tokens:
            rows, scheduled = self._with_exceptions(output.num_scheduled_tokens)
        computed, known = self._num_computed_tokens[rows], self._num_tokens[rows]
        reached = computed + scheduled
        if (reached > known).any():
            place = int((reached - known).argmax())
            raise ImpossibleDiff(
                f"row {rows[place]} is to run {scheduled[place]} tokens from {computed[place]} of {known[place]}"
            )
        covered = self._tables.covered(rows)
        if (reached > covered).any():
            place = int((reached - covered).argmax())
            raise ImpossibleDiff(
                f"row {rows[place]} is to reach {reached[place]} tokens; its {self._tables.num_blocks[rows[place]]} blocks and "
                f"max_model_len {self._info.max_model_len} allow {covered[place]}"
            )
        total = int(scheduled.sum())
        if total != output.total_num_scheduled_tokens:
            raise ImpossibleDiff(
                f"total_num_scheduled_tokens is {output.total_num_scheduled_tokens}; the rows add up to {total}"
            )
        samples = (reached == known).astype(np.int32)
        self._num_computed_tokens[rows] = reached
        self._num_tokens[rows] = known + samples
        if self._lanes is not None:
            self._lanes.enter(lane, rows[samples != 0])
        return rows, scheduled, computed, samples

    def _speculate(self, column: bytes, rows: Int32Array, scheduled: Int32Array, samples: Int32Array) -> Int32Array:
        speculating, counts = group = decoded_group(column, "num_speculative_tokens")
        check_range(speculating, len(self._live), "num_speculative_tokens: row")
        check_range(counts - 1, self._info.max_speculative_tokens, "num_speculative_tokens: count less one")
        if len(speculating) > 1 and (np.diff(speculating) <= 0).any():
            raise ImpossibleDiff("num_speculative_tokens: the rows do not ascend")
        places = np.searchsorted(rows, speculating)
        places[places == len(rows)] = 0
        may = (rows[places] == speculating) & (scheduled[places] == 1) & (samples[places] == 1)
        if not may.all():
            raise ImpossibleDiff(f"num_speculative_tokens: row {speculating[~may][0]} does not decode in this step")
        covered = self._tables.covered(speculating)
        reached = self._num_computed_tokens[speculating] + counts
        if (reached > covered).any():
            place = int((reached - covered).argmax())
            raise ImpossibleDiff(
                f"row {speculating[place]} may reach {reached[place]} tokens by speculation; its blocks and max_model_len "
                f"allow {covered[place]}"
            )
        self._speculating = group
        speculative = np.zeros_like(rows)
        speculative[places] = counts
        return _read_only(speculative)

    def _with_exceptions(self, column: bytes) -> tuple[Int32Array, Int32Array]:
        rows, counts = checked_exceptions(column, self._live, self._info.max_model_len)
        scheduled = self._one_each.copy()
        scheduled[np.searchsorted(self._rows, rows)] = counts
        if counts.all():
            return self._rows, scheduled
        running = scheduled > 0
        return self._rows[running], scheduled[running]

    def _set_rows(self, rows: Int32Array) -> None:
        self._rows = _read_only(rows)
        self._one_each = _read_only(np.ones_like(rows))


def _read_only(array: Int32Array) -> Int32Array:
    array.flags.writeable = False
    return array
