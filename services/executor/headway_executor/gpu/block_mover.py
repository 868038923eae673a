"""A pool's blocks and their moves: beside the steps on a GPU, at once on a CPU.

Owns: the interface, the pool's memory. Must not know: fences, streams.
"""

import time
from typing import Protocol

import torch
from torch import Tensor

from headway_executor.backend import HostMemorySource, StepBatch
from headway_executor.gpu.runtime import CudaRuntime, Runtime
from headway_executor.memory.device_moves import DeviceMoves, Mark
from headway_executor.memory.host_pool import HostBytes, memory_for
from headway_executor.memory.kv_pool import KvPool, StoredBlock
from headway_proto.columns import Int32Array


class BlockMover(Protocol):
    """Moves the blocks of one pool; see ``ExecutorBackend.move_blocks``."""

    @property
    def num_host_blocks(self) -> int:
        """Blocks that can be swapped out."""
        ...

    def move(self, *, copies: Int32Array, swap_out: Int32Array, swap_in: Int32Array) -> Mark | None:
        """Start moves between two steps. Each int32, ``[2, n]``. Return the end of the swap-out; None: now."""
        ...

    def load(self, contents: HostBytes, blocks: Int32Array) -> None:
        """Fill blocks, int32, ``[n]``; see ``ExecutorBackend.load_blocks``."""
        ...

    def before_step(self, batch: StepBatch) -> None:
        """Make the step wait for its moves only."""
        ...

    def after_step(self) -> int:
        """Count the launched step; return its number."""
        ...

    def move_time_us(self, number: int) -> int:
        """Microseconds of a step's moves. Call once, from any thread."""
        ...

    def measure_swap_us(self) -> float:
        """Microseconds to swap one block one way; 0.0 without host blocks."""
        ...

    def close(self) -> None:
        """Wait for running moves."""
        ...


class _ImmediateMoves:
    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._coming_us = 0
        self._times_us: dict[int, int] = {}
        self._num_steps = 0

    @property
    def num_host_blocks(self) -> int:
        return self._pool.num_host_blocks

    def move(self, *, copies: Int32Array, swap_out: Int32Array, swap_in: Int32Array) -> None:
        started = time.perf_counter_ns()
        self._pool.move(copies=copies, swap_out=swap_out, swap_in=swap_in)
        self._coming_us += (time.perf_counter_ns() - started) // 1000

    def load(self, contents: HostBytes, blocks: Int32Array) -> None:
        started = time.perf_counter_ns()
        self._pool.load_blocks(contents, blocks)
        self._coming_us += (time.perf_counter_ns() - started) // 1000

    def before_step(self, batch: StepBatch) -> None:
        """Do nothing."""

    def after_step(self) -> int:
        self._num_steps += 1
        if self._coming_us:
            self._times_us = {self._num_steps: self._coming_us}
            self._coming_us = 0
        return self._num_steps

    def move_time_us(self, number: int) -> int:
        return self._times_us.pop(number, 0)

    def measure_swap_us(self) -> float:
        return self._pool.measure_swap_us()

    def close(self) -> None:
        """Do nothing."""


def open_pool(
    runtime: Runtime,
    block: StoredBlock,
    *,
    num_layers: int,
    block_size: int,
    num_blocks: int,
    num_host_blocks: int,
    host_memory: HostMemorySource,
    part_of: str,
) -> tuple[Tensor, BlockMover]:
    """A pool of zeros, ``[num_layers, num_blocks, *block.shape]``, and its moves; a block has ``block_size`` positions.
    ``part_of``: see ``KvPool``.

    Raises:
        BackendConfigError: no main memory for swapped-out blocks.
    """
    block_bytes = num_layers * block.num_bytes
    if isinstance(runtime, CudaRuntime):
        layers = torch.zeros((num_layers, num_blocks, *block.shape), dtype=block.dtype, device=runtime.device)
        memory = memory_for(
            host_memory,
            num_blocks=num_host_blocks,
            block_bytes=block_bytes,
            layout=f"triton {num_layers} {block.shape} {block.dtype}{part_of}",
            device=runtime.device,
        )
        return layers, DeviceMoves.of_pool(
            layers, num_host_blocks=num_host_blocks, compute_stream=runtime.stream, memory=memory
        )
    pool = KvPool(
        num_layers=num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        block=block,
        device=runtime.device,
        num_host_blocks=num_host_blocks,
        host_memory=host_memory,
        part_of=part_of,
    )
    return pool.layers, _ImmediateMoves(pool)
