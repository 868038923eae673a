"""The moves of blocks that a step asks for, checked against what this epoch has written.

Owns: which host blocks hold something. Must not know: how blocks are moved, tokens.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway_executor.batch.block_tables import BlockTables
from headway_executor.batch.diff_checks import (
    ImpossibleDiff,
    Pull,
    check_distinct,
    check_range,
    checked_pull,
    decoded_group,
)
from headway_proto.columns import Int32Array
from headway_proto.step import AdapterOutput, BackendInfo, LaneOutput, SchedulerOutput, TransferringOutput

NO_PAIRS = np.empty((2, 0), dtype=np.int32)
"""An empty pair of columns."""


class BlockMoves(NamedTuple):
    """Columns are int32, shape ``[2, n]``; ``exports`` follow the step, the others come before it."""

    copies: Int32Array
    swap_out: Int32Array
    swap_in: Int32Array
    exports: Int32Array = NO_PAIRS
    pulls: tuple[Pull, ...] = ()


class MoveChecks:
    """Advances with each step's moves."""

    def __init__(self, info: BackendInfo) -> None:
        self._num_device_blocks = info.num_blocks
        self._host_block_written = np.zeros(info.num_host_blocks, dtype=bool)

    def clear(self) -> None:
        """No host block holds anything of this epoch."""
        self._host_block_written[:] = False

    def checked(
        self, output: SchedulerOutput, tables: BlockTables, live: NDArray[np.bool_], new_rows: list[int]
    ) -> BlockMoves | None:
        """Return the step's moves; None if it has none. ``live`` and ``tables`` are as the step leaves them.

        Raises:
            ImpossibleDiff: a move reads what nobody has written, or writes where it must not.
        """
        transfers = output if isinstance(output, TransferringOutput) else None
        if isinstance(output, LaneOutput | AdapterOutput) and not (output.exports or output.pulls):
            transfers = None  # it is of this type in any case
        if not (output.block_copies or output.swap_out or output.swap_in or transfers):
            return None
        moves = BlockMoves(
            copies=decoded_group(output.block_copies, "block_copies"),
            swap_out=decoded_group(output.swap_out, "swap_out"),
            swap_in=decoded_group(output.swap_in, "swap_in"),
            exports=decoded_group(transfers.exports, "exports") if transfers else NO_PAIRS,
            pulls=tuple([checked_pull(pull) for pull in transfers.pulls]) if transfers else (),
        )
        check_range(moves.copies, self._num_device_blocks, "block_copies: block")
        check_range(moves.swap_out[0], self._num_device_blocks, "swap_out: device block")
        check_range(moves.swap_in[1], self._num_device_blocks, "swap_in: device block")
        check_range(moves.exports[0], self._num_device_blocks, "exports: device block")
        self._swap(moves)
        if moves.pulls:
            self._check_pulled(moves, tables, live, new_rows)
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

    def _check_pulled(
        self, moves: BlockMoves, tables: BlockTables, live: NDArray[np.bool_], new_rows: list[int]
    ) -> None:
        """Blocks of other executors come into rows that begin with this step, and nowhere else."""
        pulled = np.concatenate([pull.blocks[2] for pull in moves.pulls])
        check_range(pulled, self._num_device_blocks, "pulls: device block")
        check_distinct(np.concatenate((moves.swap_in[1], pulled)), "swap_in and pulls: device block")
        is_new = np.zeros(len(live), dtype=bool)
        is_new[new_rows] = True
        for rows, is_wanted in ((np.flatnonzero(is_new), True), (np.flatnonzero(live & ~is_new), False)):
            wrong = pulled[tables.are_held(pulled, rows) != is_wanted]
            if len(wrong):
                problem = "is in no new row of this step" if is_wanted else "is in a row of earlier steps"
                raise ImpossibleDiff(f"pulls: device block {wrong[0]} {problem}")
