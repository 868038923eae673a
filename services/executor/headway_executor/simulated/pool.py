"""The simulated KV pool: it detects a row that would attend to a block with the wrong contents.

Owns: contents of blocks. Must not know: tokens.

A slot holds the hash of the prefix that ends with its token.
"""

import numpy as np
from numpy.typing import NDArray

from headway_executor.backend import HostMemorySource, StepBatch
from headway_executor.simulated.token_hash import Hashes
from headway_proto.columns import Int32Array


class CacheMismatch(RuntimeError):  # noqa: N818 (it names the finding)
    """A row was about to attend to a wrong block."""


class SimulatedPool:
    """Slots hold hashes of prefixes. A host block is its slots and how many of them are filled, 8 bytes each."""

    def __init__(
        self, num_blocks: int, num_host_blocks: int, block_size: int, host_memory: HostMemorySource = lambda *_: None
    ) -> None:
        self._block_size = block_size
        self._slots = np.zeros((num_blocks, block_size), dtype=np.uint64)
        self._filled = np.zeros(num_blocks, dtype=np.int32)
        memory = host_memory(num_host_blocks, 8 * (block_size + 1), "simulated")
        if memory is None:
            memory = np.zeros((num_host_blocks, 8 * (block_size + 1)), dtype=np.uint8)
        self._host: Hashes = memory.view(np.uint64)
        self._host_written = np.zeros(num_host_blocks, dtype=bool)

    def check_partial_blocks(self, batch: StepBatch, prefixes: Hashes) -> None:
        """Before the step writes, a partial block must hold its row's last token."""
        offsets = batch.num_computed_tokens % self._block_size
        places = np.flatnonzero(offsets)
        rows, ends, offsets = batch.rows[places], batch.num_computed_tokens[places], offsets[places]
        indices = ends // self._block_size
        blocks = batch.block_table[rows, indices]
        right = (self._slots[blocks, offsets - 1] == prefixes[rows, ends]) & (self._filled[blocks] >= offsets)
        if not right.all():
            first = int(right.argmin())
            raise _mismatch(rows[first], blocks[first], indices[first], ends[first] - offsets[first], ends[first])

    def check_full_blocks(self, batch: StepBatch, prefixes: Hashes) -> None:
        """After the step wrote, each full block must hold the row's prefix. Rows may fill shared blocks."""
        num_full = batch.num_computed_tokens // self._block_size
        width = int(num_full.max(initial=0))
        if not width:
            return
        blocks = batch.block_table[batch.rows, :width]
        expected = prefixes[:, self._block_size : width * self._block_size + 1 : self._block_size][batch.rows]
        right = (self._slots[:, -1][blocks] == expected) & (self._filled[blocks] == self._block_size)
        # Shorter rows also compare unused places; these do not count.
        wrong = ~right & (np.arange(width) < num_full[:, None])
        if wrong.any():
            place, index = (int(axis[0]) for axis in np.nonzero(wrong))
            start = index * self._block_size
            raise _mismatch(batch.rows[place], blocks[place, index], index, start, start + self._block_size)

    def write(self, batch: StepBatch, prefixes: Hashes, total: int) -> None:
        """Write the scheduled tokens, ``total`` in all."""
        rows: NDArray[np.integer] = batch.rows
        positions: NDArray[np.integer] = batch.num_computed_tokens
        if total != len(rows):
            counts = batch.num_scheduled_tokens
            first = np.cumsum(counts) - counts
            rows = np.repeat(rows, counts)
            positions = np.repeat(positions - first, counts) + np.arange(total)
        blocks = batch.block_table[rows, positions // self._block_size]
        offsets = positions % self._block_size
        self._slots[blocks, offsets] = prefixes[rows, positions + 1]
        # If a block is written several times, numpy keeps the last value, which is the furthest offset.
        self._filled[blocks] = offsets + 1

    def write_at(self, table: Int32Array, positions: NDArray[np.integer], hashes: Hashes) -> None:
        """Write ``hashes`` at consecutive positions of one row."""
        blocks = table[positions // self._block_size]
        offsets = positions % self._block_size
        self._slots[blocks, offsets] = hashes
        self._filled[blocks] = offsets + 1

    def move(self, *, copies: Int32Array, swap_out: Int32Array, swap_in: Int32Array) -> None:
        """Swap out, swap in, then copy."""
        blocks, host_blocks = swap_out
        self._host[host_blocks, :-1] = self._slots[blocks]
        self._host[host_blocks, -1] = self._filled[blocks]
        self._host_written[host_blocks] = True
        host_blocks, blocks = swap_in
        empty = ~self._host_written[host_blocks]
        if empty.any():
            raise CacheMismatch(f"host block {host_blocks[empty][0]} is to be swapped in and holds nothing")
        self._fill(blocks, self._host[host_blocks])
        sources, destinations = copies
        self._slots[destinations] = self._slots[sources]
        self._filled[destinations] = self._filled[sources]

    def load(self, contents: NDArray[np.uint8], blocks: Int32Array) -> None:
        """Fill blocks with contents of host blocks."""
        self._fill(blocks, contents.view(np.uint64))

    def _fill(self, blocks: Int32Array, contents: Hashes) -> None:
        self._slots[blocks] = contents[:, :-1]
        self._filled[blocks] = contents[:, -1].astype(np.int32)


def _mismatch(row: int, block: int, index: int, start: int, end: int) -> CacheMismatch:
    where = f"block {block}, number {index} of its table"
    return CacheMismatch(f"row {row}: {where}, does not hold its tokens {start} to {end - 1}")
