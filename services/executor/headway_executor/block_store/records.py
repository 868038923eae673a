"""The records of a process's own host blocks: what says that a block is complete, and which step wrote it.

Owns: the order of writing, checksums. Must not know: where the memory is, who copies.
"""

import threading

import numpy as np
from numpy.typing import NDArray

from headway_executor.block_store.transport import RECORD, Bytes
from headway_proto.checksum import crc32
from headway_proto.columns import Int32Array


class BlockRecords:
    """``records``: ``RECORD``, ``[num_blocks]``; ``blocks``: uint8, ``[num_blocks, block_bytes]``. Any thread may call."""

    def __init__(self, records: NDArray[np.void], blocks: Bytes) -> None:
        self._records = records
        self._blocks = blocks
        self._writes = np.zeros(len(records), dtype=np.int64)
        """The newest write of each block."""
        self._num_writes = 0
        self._lock = threading.Lock()

    def begin(self, host_blocks: Int32Array) -> int:
        """Invalidate the records of blocks that will be overwritten; return the number of this write."""
        with self._lock:
            self._num_writes += 1
            self._writes[host_blocks] = self._num_writes
            self._records[host_blocks] = np.zeros(1, dtype=RECORD)
            return self._num_writes

    def forget(self) -> None:
        """Invalidate all records, and what is being written."""
        self.begin(np.arange(len(self._records), dtype=np.int32))

    def end(self, write: int, host_blocks: Int32Array, *, epoch: int, step: int) -> None:
        """Record blocks whose bytes are there, except those that a later write has begun to overwrite."""
        checksums = np.array([checksum(self._blocks[block], block) for block in host_blocks.tolist()], dtype=np.uint32)
        with self._lock:
            own = self._writes[host_blocks] == write
            blocks = host_blocks[own]
            # A reader that comes between finds no epoch.
            self._records["checksum"][blocks] = checksums[own]
            self._records["step"][blocks] = step
            self._records["epoch"][blocks] = epoch


def checksum(contents: Bytes, host_block: int) -> int:
    """CRC32 of a block's bytes, contiguous, that begins with its place: another block with its record is never right."""
    return crc32(contents.data, host_block)


def checksums_fit(records: NDArray[np.void], blocks: Bytes, host_blocks: Int32Array) -> NDArray[np.bool_]:
    """Whether each block is the one that was asked for, and what its record says, ``[n]``."""
    numbers = host_blocks.tolist()
    found = np.array([checksum(block, number) for block, number in zip(blocks, numbers, strict=True)], dtype=np.uint32)
    fit: NDArray[np.bool_] = found == records["checksum"]
    return fit
