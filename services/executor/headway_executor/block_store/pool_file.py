"""The file of a host pool in shared memory: where things are in it, and which living process holds it.

Owns: its layout, name, size and lock. Must not know: transports, what a block means.

A page with the header, the records, then the blocks, from a page's beginning. The kernel drops the lock of a process that
is killed, once it has given back all its memory: so a later process of the same place finds the file, and nobody else writes it. Nothing is reserved: memory is
taken as blocks are written, so the file must fit into what is free, beside what other pools may still take.
"""

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import secrets
import stat
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway_executor.block_store.transport import RECORD, Bytes

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (the place of shared memory)
FILE_PREFIX = "headway-"

_MAGIC, _VERSION = b"HWBLOCKS", 1
_HEADER = struct.Struct("<8sIIQ64s64s")
_PAGE = 4096
_POLL_S = 0.02
_FORGOTTEN_S = 3600.0
"""A file that nobody holds and nobody wrote for so long is removed by whoever makes a new one."""


class PoolLayout(NamedTuple):
    """Sizes of a pool; offsets in bytes."""

    num_blocks: int
    block_bytes: int

    @property
    def records_at(self) -> int:
        """Where the records begin."""
        return _PAGE

    @property
    def blocks_at(self) -> int:
        """Where the blocks begin."""
        return -(-(_PAGE + self.num_blocks * RECORD.itemsize) // _PAGE) * _PAGE

    @property
    def size(self) -> int:
        """Of the whole file."""
        return self.blocks_at + self.num_blocks * self.block_bytes


class PoolHeader(NamedTuple):
    """``name`` of the contents; ``identity`` of what wrote them, see ``store``. Both "" in a new file."""

    layout: PoolLayout
    name: str
    identity: str


def read_header(descriptor: int) -> PoolHeader:
    """Read and check the header of an open file, which must be its owner's alone.

    Raises:
        ValueError: it is no pool of this user; one line.
        OSError: it cannot be read.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ValueError("it is no file of this user alone")
    data = os.pread(descriptor, _HEADER.size, 0)
    if len(data) != _HEADER.size:
        raise ValueError("it has no header")
    magic, version, num_blocks, block_bytes, name, identity = _HEADER.unpack(data)
    if (magic, version) != (_MAGIC, _VERSION):
        raise ValueError("it is no pool of this version")
    layout = PoolLayout(num_blocks, block_bytes)
    if status.st_size != layout.size:
        raise ValueError(f"it has {status.st_size} bytes, not {layout.size}")
    return PoolHeader(layout, *(text.rstrip(b"\0").decode("ascii", "replace") for text in (name, identity)))


class PoolFile:
    """A file that this process holds, until ``close``."""

    def __init__(self, path: Path, descriptor: int, header: PoolHeader) -> None:
        self.path = path
        self.header = header
        self._descriptor = descriptor
        layout = header.layout
        memory = mmap.mmap(descriptor, layout.size)
        self.records: NDArray[np.void] = np.frombuffer(memory, RECORD, layout.num_blocks, layout.records_at)
        self.blocks: Bytes = np.frombuffer(memory, np.uint8, offset=layout.blocks_at).reshape(
            layout.num_blocks, layout.block_bytes
        )

    def write_header(self, *, name: str, identity: str) -> None:
        """Name the contents; both at most 64 characters."""
        self.header = PoolHeader(self.header.layout, name, identity)
        os.pwrite(self._descriptor, _packed(self.header), 0)

    def touch(self) -> None:
        """Note that blocks were written: the kernel does not see it."""
        os.utime(self._descriptor)

    def close(self, *, remove: bool) -> None:
        """Let go of the file; the arrays stay valid. May be called twice."""
        if self._descriptor < 0:
            return
        if remove:
            with contextlib.suppress(OSError):
                self.path.unlink()
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)
        self._descriptor = -1


def hold_pool_file(
    directory: Path, place: str, number: int, layout: PoolLayout, *, patience_s: float = 0.0
) -> PoolFile:
    """Take over the file that a dead process of this place and number left behind, or make one.

    Files that it left and that have other sizes are removed. If another process holds one, wait so long for its end.

    Raises:
        OSError: there is no such directory, or too little room.
    """
    digest = hashlib.sha256(f"{os.geteuid()} {place}".encode()).hexdigest()[:12]
    prefix = f"{FILE_PREFIX}{digest}-{'x' if number < 0 else number}-"
    deadline = time.monotonic() + patience_s
    while True:
        paths = sorted(directory.glob(f"{prefix}*"))
        left = _take_over(paths, layout)
        if left is not None:
            return left
        if not any(path.exists() for path in paths) or time.monotonic() >= deadline:
            return _make(directory, directory / f"{prefix}{secrets.token_hex(6)}", layout)
        time.sleep(_POLL_S)


def _take_over(paths: Sequence[Path], layout: PoolLayout) -> PoolFile | None:
    """The first of these files that nobody holds and that has these sizes. Those with others are removed."""
    for path in paths:
        descriptor = _lock(path)
        if descriptor is None:
            continue
        with contextlib.suppress(ValueError, OSError):
            header = read_header(descriptor)
            if header.layout == layout:
                return PoolFile(path, descriptor, header)
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(descriptor)
    return None


def _make(directory: Path, path: Path, layout: PoolLayout) -> PoolFile:
    # It gets its name when it is locked and complete: until then nobody takes it over.
    unfinished = directory / f"{FILE_PREFIX}new-{secrets.token_hex(8)}"
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_forgotten(directory, now=os.fstat(descriptor).st_mtime)
        free = _free_bytes(directory)
        if layout.size > free:
            raise OSError(errno.ENOSPC, f"{layout.size >> 20} MiB are needed and {max(0, free) >> 20} MiB are free")
        os.ftruncate(descriptor, layout.size)
        header = PoolHeader(layout, "", "")
        os.pwrite(descriptor, _packed(header), 0)
        held = PoolFile(path, descriptor, header)
        unfinished.rename(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        os.close(descriptor)
        raise
    return held


def _remove_forgotten(directory: Path, *, now: float) -> None:
    """Of places that nobody came back to, for example of a server that was killed as a whole."""
    for path in directory.glob(f"{FILE_PREFIX}*"):
        with contextlib.suppress(OSError):
            is_old = path.lstat().st_mtime < now - _FORGOTTEN_S
            descriptor = _lock(path) if is_old else None
            if descriptor is not None:
                path.unlink()
                os.close(descriptor)


def _lock(path: Path) -> int | None:
    """Return None if another process holds the file, if it is another user's, or if it has just gone."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(descriptor)
        if status.st_nlink and status.st_uid == os.geteuid():
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _free_bytes(directory: Path) -> int:
    """What is free, less what other pools have not yet written."""
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    for path in directory.glob(f"{FILE_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            free -= max(0, status.st_size - status.st_blocks * 512)
    return free


def _packed(header: PoolHeader) -> bytes:
    layout, name, identity = header
    return _HEADER.pack(_MAGIC, _VERSION, *layout, name.encode("ascii"), identity.encode("ascii"))
