"""The paged store of keys and values.

Owns: its memory, moving blocks. Must not know: rows, attention.
"""

import time
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway_executor.backend import BackendConfig, BackendConfigError, HostMemorySource
from headway_executor.memory.host_memory import free_host_bytes, untouched_zeros
from headway_executor.memory.host_pool import HostBytes, HostPool, block_index, memory_for
from headway_proto.columns import Int32Array
from headway_proto.wording import one_line

_CPU_SHARE = 0.5
DEVICE_SHARE = 0.85
# Few, so that opening stays quick. In a large model they exceed a processor's cache, which would halve the time.
_TIMED_BLOCKS = 16
_TIMED_ROUNDS = 2


CODES = "fp8"
"""The ``kv_cache_dtype`` of pools of codes; see ``headway_kernels.kv_codes``."""


class StoredBlock(NamedTuple):
    """A block of one layer as it lies in memory. Blocks of codes are uint8, and as wide as their exponents make them."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of this layer."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def stored_block(kv_cache_dtype: str, shape: tuple[int, ...], dtype: torch.dtype) -> StoredBlock:
    """The form of a block of ``shape`` numbers of a model's ``dtype``; of codes, the last dimension is a head's channels."""
    if kv_cache_dtype == CODES:
        return StoredBlock((*shape[:-1], shape[-1] + 1), torch.uint8)
    return StoredBlock(shape, dtype)


class KvPool:
    """Blocks of ``block_size`` positions for every layer, stored as ``block``.

    ``layers`` is ``[num_layers, num_blocks, *block.shape]``, at first zeros. ``num_host_blocks`` take swapped-out
    blocks, in memory of ``host_memory`` (see ``BackendConfig``). ``part_of`` names the rank's part, if it has not all.

    Raises:
        BackendConfigError: the main memory cannot be had.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        block: StoredBlock,
        device: torch.device,
        num_host_blocks: int = 0,
        host_memory: HostMemorySource | None = None,
        part_of: str = "",
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = _zeros((num_layers, num_blocks, *block.shape), block.dtype, device)
        memory = None
        if host_memory is not None:
            memory = memory_for(
                host_memory,
                num_blocks=num_host_blocks,
                block_bytes=num_layers * block.num_bytes,
                layout=f"{type(self).__name__} {num_layers} {block.shape} {block.dtype}{part_of}",
                device=device,
            )
        self._host = self._host_pool(num_host_blocks, memory)

    @property
    def num_host_blocks(self) -> int:
        """Blocks that can be swapped out."""
        return self._host.num_blocks

    def move(self, *, copies: Int32Array, swap_out: Int32Array, swap_in: Int32Array) -> None:
        """Swap out, swap in, then copy, and wait. Each int32, ``[2, n]``."""
        if swap_out.shape[1]:
            self._host.store(self.layers, *swap_out)
        if swap_in.shape[1]:
            self._host.load(self.layers, *swap_in)
        if copies.shape[1]:
            sources, destinations = (block_index(blocks, self.layers) for blocks in copies)
            self.layers[:, destinations] = self.layers[:, sources]

    def load_blocks(self, contents: HostBytes, blocks: Int32Array) -> None:
        """See ``ExecutorBackend.load_blocks``; wait."""
        self._host.fill(self.layers, contents, blocks)

    def measure_swap_us(self) -> float:
        """Microseconds to swap one block one way; 0.0 without host blocks. Host blocks keep their contents."""
        blocks = np.arange(min(_TIMED_BLOCKS, self.num_blocks, self.num_host_blocks), dtype=np.int32)
        if not len(blocks):
            return 0.0
        scratch = self._host_pool(len(blocks), None)
        best = float("inf")
        for round_number in range(1 + _TIMED_ROUNDS):
            started = time.perf_counter()
            scratch.store(self.layers, blocks, blocks)
            if self._host.is_recorded:
                scratch.check_all(blocks)
            scratch.load(self.layers, blocks, blocks)
            if round_number:
                best = min(best, time.perf_counter() - started)
        return best * 1e6 / (2 * len(blocks))

    def _host_pool(self, num_blocks: int, memory: HostBytes | None) -> HostPool:
        num_layers, _, *block_shape = self.layers.shape
        return HostPool(
            num_blocks=num_blocks,
            block_shape=(num_layers, *block_shape),
            dtype=self.layers.dtype,
            device=self.layers.device,
            memory=memory,
        )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        return untouched_zeros(shape, dtype)
    except (OSError, OverflowError) as error:
        raise BackendConfigError(
            f"num_kv_blocks {shape[1]} is not allowed; the memory cannot be had: {one_line(error):.120}; allowed: fewer"
        ) from error


def free_bytes(device: torch.device) -> int:
    """Free memory of a device, or main memory."""
    return free_host_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def num_pool_blocks(
    config: BackendConfig,
    *,
    max_model_len: int,
    block_bytes: int,
    device: torch.device,
    device_share: float = DEVICE_SHARE,
    bytes_beside: int = 0,
) -> int:
    """Return the configured number of blocks, or as many as fit and can be used.

    Steps need room on a device: blocks may take ``device_share`` of its free memory. The ranks of a group share the main
    memory of their host, of which ``bytes_beside`` are promised already.

    Raises:
        BackendConfigError: one request of ``max_model_len`` tokens does not fit.
    """
    if config.num_kv_blocks:
        return config.num_kv_blocks
    is_cpu = device.type == "cpu"
    budget = (
        max(0, _CPU_SHARE * free_bytes(device) / config.place.size - bytes_beside)
        if is_cpu
        else device_share * free_bytes(device)
    )
    blocks_of_one = -(-max_model_len // config.block_size)
    num_blocks = min(config.max_num_seqs * blocks_of_one, int(budget // block_bytes))
    if num_blocks < blocks_of_one:
        raise BackendConfigError(
            f"max_model_len {max_model_len} is not allowed; the free memory holds {num_blocks} blocks of "
            f"{config.block_size} tokens, so allowed: up to {num_blocks * config.block_size}"
        )
    return num_blocks
