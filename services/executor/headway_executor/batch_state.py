"""The executor's copy of the scheduler's rows, advanced by one diff per step.

Owns: counters, block tables, the state digest. Must not know: token values, backends.

Everything is checked: a wrong but plausible diff would make a backend read another request's cache.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway_executor.backend import NewRow, StepBatch
from headway_executor.diff_checks import (
    ImpossibleDiff,
    Pull,
    check_distinct,
    check_range,
    checked_pull,
    decoded,
    decoded_group,
    with_pooling,
)
from headway_executor.row_lanes import RowLanes, checked_exceptions
from headway_proto.columns import Int32Array
from headway_proto.step import (
    AdapterOutput,
    BackendInfo,
    LaneOutput,
    NewRequest,
    PoolingOutput,
    SchedulerOutput,
    TransferringOutput,
    state_digest,
)

_NO_ROWS = np.empty(0, dtype=np.int32)
_NO_BLOCKS = np.empty((2, 0), dtype=np.int32)


class BlockMoves(NamedTuple):
    """Columns are int32, shape ``[2, n]``; ``exports`` follow the step, the others come before it."""

    copies: Int32Array
    swap_out: Int32Array
    swap_in: Int32Array
    exports: Int32Array = _NO_BLOCKS
    pulls: tuple[Pull, ...] = ()


class AppliedStep(NamedTuple):
    """``moves`` is None in most steps."""

    batch: StepBatch
    moves: BlockMoves | None


class BatchState:
    """Rows ``0 .. info.max_num_rows - 1``."""

    def __init__(self, info: BackendInfo) -> None:
        self._info = info
        max_blocks_per_row = -(-info.max_model_len // info.block_size) + 1
        self._live = np.zeros(info.max_num_rows, dtype=bool)
        self._num_tokens = np.zeros(info.max_num_rows, dtype=np.int32)
        self._num_computed_tokens = np.zeros(info.max_num_rows, dtype=np.int32)
        self._num_blocks = np.zeros(info.max_num_rows, dtype=np.int32)
        self._block_table = np.zeros((info.max_num_rows, max_blocks_per_row), dtype=np.int32)
        self._shown_block_table = _read_only(self._block_table.view())
        self._host_block_written = np.zeros(info.num_host_blocks, dtype=bool)
        self._rows = _NO_ROWS
        self._one_each = _NO_ROWS
        self._rows_given_out = _NO_ROWS
        self._rows_of_earlier_epochs = _NO_ROWS
        self._speculating = _NO_BLOCKS
        self._lanes = RowLanes(info.max_num_rows, info.num_lanes) if info.num_lanes > 1 else None
        self._lost: str | None = None

    def begin_epoch(self) -> None:
        """Forget every row and host block. The next batch lists the old rows as finished."""
        self._rows_of_earlier_epochs = np.union1d(self._rows_of_earlier_epochs, self._rows_given_out)
        self._rows_given_out = _NO_ROWS
        self._live[:] = False
        self._num_blocks[:] = 0
        self._host_block_written[:] = False
        self._set_rows(_NO_ROWS)
        self._speculating = _NO_BLOCKS
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
        self._speculating = _NO_BLOCKS
        if rows != expected:
            raise ValueError(f"rows {rows!r:.64} speculated, not {expected!r:.64}")
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
        return state_digest(rows, self._num_computed_tokens[rows], self._num_blocks[rows], self._block_table, lanes)

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
        if isinstance(output, PoolingOutput):
            new_rows = with_pooling(new_rows, output.pooled, self._info)
        lane = self._lane_of(output)
        if self._lanes is not None and finished.size:
            self._lanes.leave(finished)
        if finished.size or new_rows:
            self._set_rows(np.flatnonzero(self._live).astype(np.int32))
        new_blocks = self._append_blocks(output) if output.new_blocks or new_rows else _NO_BLOCKS
        moves = self._block_moves(output, new_rows)
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
            block_table=self._shown_block_table,
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
        self._num_blocks[rows] = 0
        return rows

    def _adapters_of(self, output: SchedulerOutput) -> dict[int, str]:
        if not isinstance(output, AdapterOutput) or not output.adapters:
            return {}
        if not self._info.supports_adapters:
            raise ImpossibleDiff("adapters: this executor takes none")
        adapters = {entry.row: entry.adapter for entry in output.adapters}
        new_rows = {request.row for request in output.scheduled_new_reqs}
        if len(adapters) != len(output.adapters) or not adapters.keys() <= new_rows:
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
        self._live[row] = True
        self._num_tokens[row] = len(token_ids)
        self._num_computed_tokens[row] = request.num_computed_tokens
        self._num_blocks[row] = 0
        return NewRow(
            row=row,
            token_ids=token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            sampling=request.sampling,
            adapter=adapters.get(row, ""),
        )

    def _append_blocks(self, output: SchedulerOutput) -> Int32Array:
        groups = [self._append_to_new(request) for request in output.scheduled_new_reqs]
        if output.new_blocks:
            groups.append(self._append_to_any(decoded_group(output.new_blocks, "new_blocks")))
        return np.concatenate(groups, axis=1) if len(groups) > 1 else groups[0]

    def _append_to_new(self, request: NewRequest) -> Int32Array:
        blocks = decoded(request.block_ids, "block_ids")
        check_range(blocks, self._info.num_blocks, "new_blocks: block")
        if len(blocks) > self._block_table.shape[1]:
            raise self._too_many_blocks(request.row)
        self._block_table[request.row, : len(blocks)] = blocks
        self._num_blocks[request.row] = len(blocks)
        return np.stack((np.full_like(blocks, request.row), blocks))

    def _append_to_any(self, new_blocks: Int32Array) -> Int32Array:
        rows, blocks = new_blocks
        check_range(rows, len(self._live), "new_blocks: row")
        check_range(blocks, self._info.num_blocks, "new_blocks: block")
        if not self._live[rows].all():
            raise ImpossibleDiff(f"new_blocks: row {rows[~self._live[rows]][0]} is not live")
        # A row may get several blocks in one step; they keep the order of the column.
        order = np.argsort(rows, kind="stable")
        sorted_rows = rows[order]
        place_in_run = np.arange(len(rows)) - np.searchsorted(sorted_rows, sorted_rows)
        places = self._num_blocks[sorted_rows] + place_in_run
        if len(places) and places.max() >= self._block_table.shape[1]:
            raise self._too_many_blocks(sorted_rows[int(places.argmax())])
        self._block_table[sorted_rows, places] = blocks[order]
        np.add.at(self._num_blocks, rows, 1)
        return new_blocks

    def _too_many_blocks(self, row: int) -> ImpossibleDiff:
        return ImpossibleDiff(f"new_blocks: row {row} would exceed {self._block_table.shape[1]} blocks")

    def _block_moves(self, output: SchedulerOutput, new_rows: tuple[NewRow, ...]) -> BlockMoves | None:
        transfers = output if isinstance(output, TransferringOutput) else None
        if isinstance(output, LaneOutput | AdapterOutput) and not (output.exports or output.pulls):
            transfers = None  # it is of this type in any case
        if not (output.block_copies or output.swap_out or output.swap_in or transfers):
            return None
        moves = BlockMoves(
            copies=decoded_group(output.block_copies, "block_copies"),
            swap_out=decoded_group(output.swap_out, "swap_out"),
            swap_in=decoded_group(output.swap_in, "swap_in"),
            exports=decoded_group(transfers.exports, "exports") if transfers else _NO_BLOCKS,
            pulls=tuple([checked_pull(pull) for pull in transfers.pulls]) if transfers else (),
        )
        check_range(moves.copies, self._info.num_blocks, "block_copies: block")
        check_range(moves.swap_out[0], self._info.num_blocks, "swap_out: device block")
        check_range(moves.swap_in[1], self._info.num_blocks, "swap_in: device block")
        check_range(moves.exports[0], self._info.num_blocks, "exports: device block")
        self._swap(moves)
        if moves.pulls:
            self._check_pulled(moves, new_rows)
        return moves

    def _swap(self, moves: BlockMoves) -> None:
        written, read, exported = moves.swap_out[1], moves.swap_in[0], moves.exports[1]
        num_host_blocks = len(self._host_block_written)
        for field, blocks in (("swap_out", written), ("swap_in", read), ("exports", exported)):
            if blocks.size and not num_host_blocks:
                raise ImpossibleDiff(f"{field}: this executor has no host blocks")
            check_range(blocks, num_host_blocks, f"{field}: host block")
        check_distinct(written, "swap_out: host block")
        if exported.size:
            check_distinct(np.concatenate((written, exported)), "swap_out and exports: host block")
        check_distinct(moves.swap_in[1], "swap_in: device block")
        self._host_block_written[written] = True
        if not self._host_block_written[read].all():
            empty = read[~self._host_block_written[read]][0]
            raise ImpossibleDiff(f"swap_in: host block {empty} holds nothing that this epoch swapped out or exported")
        # Behind the step: what it swaps in is older.
        self._host_block_written[exported] = True

    def _check_pulled(self, moves: BlockMoves, new_rows: tuple[NewRow, ...]) -> None:
        pulled = np.concatenate([pull.blocks[2] for pull in moves.pulls])
        check_range(pulled, self._info.num_blocks, "pulls: device block")
        check_distinct(np.concatenate((moves.swap_in[1], pulled)), "swap_in and pulls: device block")
        is_new = np.zeros(len(self._live), dtype=bool)
        is_new[[new.row for new in new_rows]] = True
        for rows, is_wanted in ((np.flatnonzero(is_new), True), (np.flatnonzero(self._live & ~is_new), False)):
            wrong = pulled[self._are_held(pulled, rows) != is_wanted]
            if len(wrong):
                problem = "is in no new row of this step" if is_wanted else "is in a row of earlier steps"
                raise ImpossibleDiff(f"pulls: device block {wrong[0]} {problem}")

    def _are_held(self, blocks: Int32Array, rows: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Which of these blocks are in the tables of ``rows``."""
        is_held = np.zeros(self._info.num_blocks, dtype=bool)
        if len(rows):
            is_held[self._blocks_of(rows)] = True
        found: NDArray[np.bool_] = is_held[blocks]
        return found

    def _blocks_of(self, rows: NDArray[np.integer]) -> Int32Array:
        counts = self._num_blocks[rows]
        width = int(counts.max(initial=0))
        found: Int32Array = self._block_table[rows, :width][np.arange(width) < counts[:, None]]
        return found

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
        covered = np.minimum(self._num_blocks[rows] * self._info.block_size, self._info.max_model_len)
        if (reached > covered).any():
            place = int((reached - covered).argmax())
            raise ImpossibleDiff(
                f"row {rows[place]} is to reach {reached[place]} tokens; its {self._num_blocks[rows[place]]} blocks and "
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
        covered = np.minimum(self._num_blocks[speculating] * self._info.block_size, self._info.max_model_len)
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
