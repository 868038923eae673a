"""Main memory for blocks: how much is free, and zeros that cost nothing before use.

Owns: a container's limit, large tensors. Must not know: their use.
"""

import contextlib
import math
import mmap
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from headway_process.control_groups import groups_around

_MEMINFO = Path("/proc/meminfo")
_NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""By version of control groups: the files of limit and use, and what could be given back."""


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that the system provides on first use; torch would write them at a second per gigabyte.

    Raises:
        OSError: too little address space.
    """
    return _in_huge_pages(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), shape, dtype)


def copy_of_table(table: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy a large table, all of which is used. In huge pages this takes a third of the time of ``to``.

    Raises:
        OSError: too little memory.
    """
    if not table.numel():
        return table.to(dtype)  # a rank may have no part of it, and a mapping of 0 bytes is not allowed
    # Private: by default Linux gives no huge pages to memory that processes could share.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, table.numel() * dtype.itemsize, flags=flags)
    return _in_huge_pages(memory, tuple(table.shape), dtype).copy_(table)


def _in_huge_pages(memory: mmap.mmap, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def free_host_bytes() -> int:
    """Free main memory within the limits of the container, the systemd unit, or whatever the process is in."""
    return min((_meminfo_available(), *_left_in_groups()))


def _left_in_groups() -> Iterator[int]:
    for version, group in groups_around("memory"):
        limit_name, used_name, cached_name = _NAMES[version]
        limit, used = _read_number(group / limit_name), _read_number(group / used_name)
        if limit is not None and used is not None:
            # Files that nobody reads at present go when memory is wanted.
            yield max(0, limit - max(0, used - _statistic(group / "memory.stat", cached_name)))


def _statistic(path: Path, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0


def _meminfo_available() -> int:
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 4 << 30


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
