"""Device blocks whose contents are not what rows are told they are, until something else is written there.

Owns: which rows follow from them. Must not know: why they are not right.

A later row may share a block with a stale row before the scheduler hears that it is stale. What a stale row writes is no
better than what it reads.
"""

import numpy as np

from headway_executor.backend import NewRow, StepBatch
from headway_executor.batch.block_moves import BlockMoves
from headway_executor.block_store.puller import FetchedBlocks
from headway_proto.columns import EMPTY_COLUMN, Int32Array


class SuspectBlocks:
    """The suspect blocks of an epoch."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: set[int] = set()
        self._rows: set[int] = set()

    def forget(self) -> None:
        """A new epoch begins: whatever its rows read, they write or pull first."""
        self._blocks.clear()
        self._rows.clear()

    def stale_rows(self, batch: StepBatch, moves: BlockMoves | None, fetched: FetchedBlocks | None) -> Int32Array:
        """Follow a step; return its new rows that read a suspect block, int32, ascending."""
        if fetched is not None:
            self._blocks.update(fetched.missing.tolist())
        if not self._blocks:
            return EMPTY_COLUMN
        self._rows.difference_update(batch.finished_rows.tolist())
        if moves is not None:
            self._blocks.difference_update(moves.swap_in[1].tolist())
        if fetched is not None:
            self._blocks.difference_update(fetched.blocks.tolist())
        rows, blocks = batch.new_blocks
        tables = {new.row: blocks[rows == new.row].tolist() for new in batch.new_rows}
        stale = self._found_among(batch.new_rows, tables)
        for new in batch.new_rows:
            if new.row not in stale:
                self._blocks.difference_update(tables[new.row][self._num_read(new) :])
        for row, block in zip(rows.tolist(), blocks.tolist(), strict=True):
            if row in self._rows and row not in tables:
                self._blocks.add(block)
            elif row not in tables:
                self._blocks.discard(block)
        return np.array(sorted(stale), dtype=np.int32)

    def _found_among(self, new_rows: tuple[NewRow, ...], tables: dict[int, list[int]]) -> set[int]:
        """A new row may read what another one writes in the same step, so look until nothing is found."""
        stale: set[int] = set()
        while True:
            found = [
                new
                for new in new_rows
                if new.row not in stale and not self._blocks.isdisjoint(tables[new.row][: self._num_read(new)])
            ]
            if not found:
                self._rows |= stale
                return stale
            stale.update(new.row for new in found)
            for new in found:
                self._blocks.update(tables[new.row][new.num_computed_tokens // self._block_size :])

    def _num_read(self, new: NewRow) -> int:
        return -(-new.num_computed_tokens // self._block_size)
