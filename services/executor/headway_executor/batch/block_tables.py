"""The block tables of the executor's rows.

Owns: which blocks each row has, in order, and the checks of what a diff adds. Must not know: tokens, what blocks hold.
"""

import numpy as np
from numpy.typing import NDArray

from headway_executor.batch.diff_checks import ImpossibleDiff, check_range, decoded, decoded_group
from headway_proto.columns import Int32Array
from headway_proto.step import BackendInfo, NewRequest


class BlockTables:
    """``table`` is int32, ``[rows, most blocks of a row]``; the first ``num_blocks[row]`` entries of a row hold."""

    def __init__(self, info: BackendInfo) -> None:
        self._block_size, self._max_model_len = info.block_size, info.max_model_len
        self._num_pool_blocks = info.num_blocks
        most_blocks = -(-info.max_model_len // info.block_size) + 1
        self.table = np.zeros((info.max_num_rows, most_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(info.max_num_rows, dtype=np.int32)
        self.shown = self.table.view()
        """The table, read-only."""
        self.shown.flags.writeable = False

    def give(self, request: NewRequest) -> Int32Array:
        """Begin a new row's table; return rows and blocks, int32 ``[2, n]``.

        Raises:
            ImpossibleDiff: there is no such block, or too many for a row.
        """
        blocks = decoded(request.block_ids, "block_ids")
        check_range(blocks, self._num_pool_blocks, "new_blocks: block")
        if len(blocks) > self.table.shape[1]:
            raise self._too_many_blocks(request.row)
        self.table[request.row, : len(blocks)] = blocks
        self.num_blocks[request.row] = len(blocks)
        return np.stack((np.full_like(blocks, request.row), blocks))

    def append(self, column: bytes, live: NDArray[np.bool_]) -> Int32Array:
        """Append to the tables of any ``live`` rows; return rows and blocks, int32 ``[2, n]``.

        Raises:
            ImpossibleDiff: there is no such row or block, or too many for a row.
        """
        new_blocks = decoded_group(column, "new_blocks")
        rows, blocks = new_blocks
        check_range(rows, len(live), "new_blocks: row")
        check_range(blocks, self._num_pool_blocks, "new_blocks: block")
        if not live[rows].all():
            raise ImpossibleDiff(f"new_blocks: row {rows[~live[rows]][0]} is not live")
        # A row may get several blocks in one step; they keep the order of the column.
        order = np.argsort(rows, kind="stable")
        sorted_rows = rows[order]
        place_in_run = np.arange(len(rows)) - np.searchsorted(sorted_rows, sorted_rows)
        places = self.num_blocks[sorted_rows] + place_in_run
        if len(places) and places.max() >= self.table.shape[1]:
            raise self._too_many_blocks(sorted_rows[int(places.argmax())])
        self.table[sorted_rows, places] = blocks[order]
        np.add.at(self.num_blocks, rows, 1)
        return new_blocks

    def covered(self, rows: Int32Array) -> Int32Array:
        """For how many tokens each row has blocks, within the longest context."""
        return np.minimum(self.num_blocks[rows] * self._block_size, self._max_model_len)

    def are_held(self, blocks: Int32Array, rows: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Which of these blocks are in the tables of ``rows``."""
        is_held = np.zeros(self._num_pool_blocks, dtype=bool)
        if len(rows):
            is_held[self._blocks_of(rows)] = True
        found: NDArray[np.bool_] = is_held[blocks]
        return found

    def _blocks_of(self, rows: NDArray[np.integer]) -> Int32Array:
        counts = self.num_blocks[rows]
        width = int(counts.max(initial=0))
        found: Int32Array = self.table[rows, :width][np.arange(width) < counts[:, None]]
        return found

    def _too_many_blocks(self, row: int) -> ImpossibleDiff:
        return ImpossibleDiff(f"new_blocks: row {row} would exceed {self.table.shape[1]} blocks")
