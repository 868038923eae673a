"""The paged store of keys and values.

Owns: its layout, its size, writing new positions, and moving whole blocks.
Must not know: rows, attention, or which request a block belongs to.

Layout: ``[layers, 2, kv_heads, num_slots, head_dim]``, keys first; slot ``block * block_size + offset`` holds one
position. Per layer and head the slots are the rows of one matrix, which is what attention gathers from.
"""

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
    """``num_blocks`` blocks of ``block_size`` positions for every layer.

    The memory starts as zeros and, on a CPU, is not touched before it is used.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_layers, 2, num_kv_heads, num_blocks * block_size, head_dim)
        self._slots = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = list(self._slots.unbind(0))
        self._writable = [layer.flatten(0, 1) for layer in self._layers]
        self._host_blocks: dict[int, Tensor] = {}

    def layer(self, index: int) -> Tensor:
        """Keys and values of one layer: a view, shape ``[2, kv_heads, num_slots, head_dim]``."""
        return self._layers[index]

    def write(self, index: int, slots: Tensor, keys_values: Tensor) -> None:
        """Store new positions of one layer.

        ``slots`` int64, shape ``[tokens]``; ``keys_values`` shape ``[tokens, 2 * kv_heads, head_dim]``: all key heads,
        then all value heads.
        """
        self._writable[index].index_copy_(1, slots, keys_values.transpose(0, 1))

    def move(self, *, copies: Int32Array, swap_out: Int32Array, swap_in: Int32Array) -> None:
        """Move whole blocks, all layers at once: swap out, swap in, then copy. Each int32, shape ``[2, n]``.

        Raises:
            KeyError: a swapped-in host block was never swapped out.
        """
        if swap_out.shape[1]:
            evicted = self._blocks[:, :, :, self._index(swap_out[0])].cpu()
            for i, host_block in enumerate(swap_out[1].tolist()):
                self._host_blocks[host_block] = evicted[:, :, :, i].clone()
        if swap_in.shape[1]:
            held = torch.stack([self._host_blocks.pop(host_block) for host_block in swap_in[0].tolist()], dim=3)
            self._blocks[:, :, :, self._index(swap_in[1])] = held.to(self._slots.device)
        if copies.shape[1]:
            self._blocks[:, :, :, self._index(copies[1])] = self._blocks[:, :, :, self._index(copies[0])]

    @property
    def _blocks(self) -> Tensor:
        return self._slots.view(*self._slots.shape[:3], self.num_blocks, self.block_size, -1)

    def _index(self, blocks: Int32Array) -> Tensor:
        return torch.from_numpy(blocks.astype(np.int64)).to(self._slots.device)


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
