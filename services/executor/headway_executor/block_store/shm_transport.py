"""The transport ``shm``: blocks read out of a file in shared memory, for executors of one host and user.

Owns: which files may be opened. Must not know: who holds them, what a block means.

A pull reads and maps nothing, so a file that shrinks or goes is an error, and no memory of a process that ended is kept.
"""

import os
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway_executor.backend import BackendConfigError
from headway_executor.block_store.kept_memory import KeptMemory
from headway_executor.block_store.pool_file import SHARED_MEMORY, PoolLayout, read_header
from headway_executor.block_store.transport import RECORD, Bytes, HostMemory, PulledBlocks, PullError
from headway_proto.columns import Int32Array
from headway_proto.wording import one_line, shown

_NAME = re.compile(r"headway-[0-9A-Za-z_.-]+")


class ShmTransport:
    """See ``transport.BlockTransport``. An address is a file's name within ``/dev/shm``."""

    never_waits = True

    def __init__(self) -> None:
        self._directory = SHARED_MEMORY
        self._kept = KeptMemory()

    def register(self, memory: HostMemory) -> str:
        """See ``BlockTransport``. The file is there already."""
        path = Path(memory.path)
        if not memory.path or path.parent != self._directory or not _NAME.fullmatch(path.name):
            raise BackendConfigError(f"shm: host blocks in {shown(memory.path or 'private memory')} cannot be shared")
        return path.name

    def pull(
        self, pool: str, address: str, host_blocks: Int32Array, *, block_bytes: int, timeout_s: float
    ) -> PulledBlocks:
        """See ``BlockTransport``. It takes as long as copying does."""
        del timeout_s
        if not _NAME.fullmatch(address):
            raise PullError(f"shm: {shown(address)} is no file of a pool")
        try:
            descriptor = os.open(self._directory / address, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise PullError(f"shm: {shown(address)}: {error.strerror}") from error
        try:
            header = read_header(descriptor)
            _check(header.layout, host_blocks, block_bytes)
            if header.name != pool:
                raise ValueError("another pool is there")
            blocks = self._kept.blocks(len(host_blocks), block_bytes)
            return PulledBlocks(_read(descriptor, header.layout, host_blocks, blocks), blocks)
        except (OSError, ValueError) as error:
            raise PullError(f"shm: {shown(address)}: {one_line(error)}") from error
        finally:
            os.close(descriptor)

    def release(self, address: str) -> None:
        """See ``BlockTransport``. Nothing is kept open."""

    def close(self) -> None:
        """See ``BlockTransport``."""


def _check(layout: PoolLayout, host_blocks: Int32Array, block_bytes: int) -> None:
    if layout.block_bytes != block_bytes:
        raise ValueError(f"its blocks have {layout.block_bytes} bytes, not {block_bytes}")
    outside = host_blocks[(host_blocks < 0) | (host_blocks >= layout.num_blocks)]
    if len(outside):
        raise ValueError(f"it has no block {outside[0]}; allowed: 0 to {layout.num_blocks - 1}")


def _read(descriptor: int, layout: PoolLayout, host_blocks: Int32Array, blocks: Bytes) -> NDArray[np.void]:
    """Fill ``blocks``; return their records.

    Records first: a right record then says that its bytes were there. Without any, no bytes are worth reading yet.
    """
    bytes_of_records = np.empty((len(host_blocks), RECORD.itemsize), dtype=np.uint8)
    _read_runs(descriptor, bytes_of_records, host_blocks, layout.records_at)
    records: NDArray[np.void] = bytes_of_records.view(RECORD).reshape(-1)
    if records["epoch"].any():
        _read_runs(descriptor, blocks, host_blocks, layout.blocks_at)
    return records


def _read_runs(descriptor: int, found: Bytes, host_blocks: Int32Array, begin: int) -> None:
    """Fill ``found``, ``[n, size]``, with what lies from ``begin`` on, neighbours in one go."""
    ends = np.flatnonzero(np.diff(host_blocks) != 1) + 1
    for part, numbers in zip(np.split(found, ends), np.split(host_blocks, ends), strict=True):
        if len(part):
            _read_into(descriptor, part.reshape(-1), begin + int(numbers[0]) * part.shape[1])


def _read_into(descriptor: int, buffer: Bytes, offset: int) -> None:
    view = buffer.data
    while view:
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise ValueError("it ends too early")
        view, offset = view[count:], offset + count
