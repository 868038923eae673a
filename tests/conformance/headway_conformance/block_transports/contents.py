"""What the blocks hold: bytes that follow from the block's number and a version.

Owns: the bytes, their records, comparing. Must not know: processes, transports.
"""

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway_conformance.failures import require
from headway_executor.block_store.transport import RECORD, Bytes, PulledBlocks


def content_of(block: int, version: int, block_bytes: int) -> Bytes:
    """The bytes of one block, ``[block_bytes]``."""
    return np.random.default_rng((block, version)).integers(0, 256, block_bytes, dtype=np.uint8)


def record_of(block: int, version: int, content: Bytes) -> NDArray[np.void]:
    """Its record, ``[1]``."""
    return np.array([(version, block, zlib.crc32(content.data))], dtype=RECORD)


def require_equal(pulled: PulledBlocks, blocks: Sequence[int], version: int, block_bytes: int) -> None:
    """The pulled blocks are these, all of this version."""
    require_shapes(pulled, len(blocks), block_bytes)
    for place, block in enumerate(blocks):
        content = content_of(block, version, block_bytes)
        record = record_of(block, version, content)[0]
        require(
            bool(pulled.records[place] == record),
            f"block {block} (place {place} of {len(blocks)}) came with the record {pulled.records[place]}; expected: {record}",
        )
        differing = np.flatnonzero(pulled.blocks[place] != content)
        require(not len(differing), f"block {block} (place {place}) differs in {len(differing)} of {block_bytes} bytes")


def require_shapes(pulled: PulledBlocks, num_blocks: int, block_bytes: int) -> None:
    """Both arrays have the form that the protocol says."""
    found = (pulled.records.dtype, pulled.records.shape, pulled.blocks.dtype, pulled.blocks.shape)
    expected = (RECORD, (num_blocks,), np.dtype(np.uint8), (num_blocks, block_bytes))
    require(found == expected, f"pulled arrays have {found}; expected: {expected}")


def num_whole(pulled: PulledBlocks, blocks: Sequence[int], block_bytes: int) -> int:
    """How many blocks fit their records; each of those must be what its owner once wrote."""
    found = 0
    for place, block in enumerate(blocks):
        version, number, checksum = pulled.records[place].item()
        if zlib.crc32(pulled.blocks[place].data) != checksum:
            continue
        found += 1
        require(number == block, f"block {number} came where block {block} was asked for")
        expected = content_of(block, version, block_bytes)
        require(
            bool(np.array_equal(pulled.blocks[place], expected)),
            f"block {block} fits its checksum and is not what was written as version {version}",
        )
    return found
