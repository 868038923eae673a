"""The paged store of keys and values.

Owns: its memory, its size, and moving whole blocks.
Must not know: rows, attention, what a block looks like inside, or which request it belongs to.
"""

import contextlib
import math
import mmap
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headway_executor.backend import BackendConfigError
from headway_proto.columns import Int32Array

_CPU_SHARE = 0.5
_DEVICE_SHARE = 0.85
_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


class KvPool:
    """``num_blocks`` blocks of ``block_size`` positions for every layer; each is ``block_shape`` numbers.

    ``layers`` holds them: shape ``[num_layers, num_blocks, *block_shape]``. The memory starts as zeros and, on a CPU, is
    not touched before it is used.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        block_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = _zeros((num_layers, num_blocks, *block_shape), dtype, device)
        self._host_blocks: dict[int, Tensor] = {}

    def move(self, *, copies: Int32Array, swap_out: Int32Array, swap_in: Int32Array) -> None:
        """Move whole blocks, all layers at once: swap out, swap in, then copy. Each int32, shape ``[2, n]``.

        Raises:
            KeyError: a swapped-in host block was never swapped out.
        """
        if swap_out.shape[1]:
            evicted = self.layers[:, self._index(swap_out[0])].cpu()
            for i, host_block in enumerate(swap_out[1].tolist()):
                self._host_blocks[host_block] = evicted[:, i].clone()
        if swap_in.shape[1]:
            held = torch.stack([self._host_blocks.pop(host_block) for host_block in swap_in[0].tolist()], dim=1)
            self.layers[:, self._index(swap_in[1])] = held.to(self.layers.device)
        if copies.shape[1]:
            self.layers[:, self._index(copies[1])] = self.layers[:, self._index(copies[0])]

    def _index(self, blocks: Int32Array) -> Tensor:
        return torch.from_numpy(blocks.astype(np.int64)).to(self.layers.device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that cost no time: on a CPU torch would write all of them, which takes a second per gigabyte or more.

    In huge pages where the system has them: blocks are scattered, and finding the small page of each takes longer than
    reading it.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def num_blocks_that_fit(*, block_bytes: int, useful_blocks: int, device: torch.device) -> int:
    """How many blocks to reserve when the user named no number.

    A share of the memory that is free now (half on a CPU, which others use too), but no more than ``useful_blocks``,
    the most that all rows together could ever hold.
    """
    if device.type == "cpu":
        budget = _CPU_SHARE * _free_host_bytes()
    else:
        budget = _DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]
    return min(useful_blocks, int(budget // block_bytes))


def check_pool_size(*, num_blocks: int, given: bool, block_size: int, max_model_len: int) -> None:
    """Refuse a pool that one request of ``max_model_len`` tokens could not run in.

    ``given`` tells whether the user named the number or the free memory did.

    Raises:
        BackendConfigError: the pool is too small.
    """
    needed = -(-max_model_len // block_size)
    if num_blocks >= needed:
        return
    if given:
        raise BackendConfigError(
            f"num_kv_blocks {num_blocks} is not allowed; one request of max_model_len {max_model_len} takes {needed} "
            f"blocks of {block_size} tokens, so allowed: {needed} or more"
        )
    raise BackendConfigError(
        f"max_model_len {max_model_len} is not allowed; the free memory holds {num_blocks} blocks of {block_size} "
        f"tokens, so allowed: up to {num_blocks * block_size}"
    )


def _free_host_bytes() -> int:
    """Free main memory, within the limit of the container that this process may run in."""
    free = _meminfo_available()
    limit, used = _read_number(_CGROUP_LIMIT), _read_number(_CGROUP_USED)
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


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
