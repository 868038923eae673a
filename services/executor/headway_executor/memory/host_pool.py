"""Swapped-out blocks in main memory.

Owns: their memory, moving them. Must not know: rows.
"""

import contextlib
import ctypes
import math
import weakref
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_executor.backend import AUTOMATIC_SWAP_SPACE, BackendConfigError, HostMemorySource
from headway_executor.memory.host_memory import free_host_bytes, untouched_zeros
from headway_proto.checksum import crc32
from headway_proto.columns import Int32Array
from headway_proto.wording import one_line

HostBytes: TypeAlias = NDArray[np.uint8]

_SHARE = 0.25
_MOST_PINNED_BYTES = 2 << 30
_STAGED_BYTES = 64 << 20
_MOST_BLOCKS = 1 << 30
_MIB = 1 << 20
_MAPPED = 3
"""``cudaHostRegisterPortable | cudaHostRegisterMapped``: kernels read it at the host's addresses."""

# It has no types.
_untyped_cuda: Any = torch.cuda


class HostPool:
    """Blocks of ``block_shape`` numbers: all layers of a device block. ``memory``: theirs, if it comes from elsewhere."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        memory: HostBytes | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.is_recorded = memory is not None
        shape = (num_blocks, *block_shape)
        self._blocks = allocate_blocks(shape, dtype, device) if memory is None else as_blocks(memory, shape, dtype)
        self._is_staged = device.type != "cpu"
        self._in_one_go = in_one_go(self._blocks)

    def store(self, layers: Tensor, blocks: Int32Array, host_blocks: Int32Array) -> None:
        """Swap out ``blocks`` of ``layers`` (``KvPool.layers``); both int32, ``[n]``."""
        if not self._is_staged:
            # One copy per block: gathering into a temporary and scattering from it took three times as long.
            for block, host_block in zip(blocks.tolist(), host_blocks.tolist(), strict=True):
                self._blocks[host_block].copy_(layers[:, block])
            return
        for part in self._parts(len(blocks)):
            staged = layers.index_select(1, block_index(blocks[part], layers)).transpose(0, 1).contiguous()
            for here, there in _runs(host_blocks[part]):
                self._blocks[there].copy_(staged[here], non_blocking=True)
        _wait_for(layers.device)

    def load(self, layers: Tensor, host_blocks: Int32Array, blocks: Int32Array) -> None:
        """Swap in ``host_blocks``; both int32, ``[n]``."""
        if not self._is_staged:
            for here, there in _runs(host_blocks):
                _scatter(self._blocks[there], layers, blocks[here])
            return
        for part in self._parts(len(blocks)):
            staged = torch.empty_like(self._blocks[: part.stop - part.start], device=layers.device)
            for here, there in _runs(host_blocks[part]):
                staged[here].copy_(self._blocks[there], non_blocking=True)
            layers.index_copy_(1, block_index(blocks[part], layers), staged.transpose(0, 1))
        _wait_for(layers.device)

    def fill(self, layers: Tensor, contents: HostBytes, blocks: Int32Array) -> None:
        """Fill ``blocks`` with contents of other pools, uint8, ``[n, block_bytes]``."""
        others = as_blocks(contents, (len(blocks), *self._blocks.shape[1:]), layers.dtype)
        if not self._is_staged:
            _scatter(others, layers, blocks)
            return
        for part in self._parts(len(blocks)):
            staged = others[part].to(layers.device)
            layers.index_copy_(1, block_index(blocks[part], layers), staged.transpose(0, 1))
        _wait_for(layers.device)

    def check_all(self, host_blocks: Int32Array) -> None:
        """Compute the checksums that records of these blocks need."""
        for host_block in host_blocks.tolist():
            crc32(self._blocks[host_block].view(torch.uint8).numpy().data)

    def _parts(self, count: int) -> Iterator[slice]:
        return parts_of(count, self._in_one_go)


def in_one_go(blocks: Tensor) -> int:
    """How many of these are copied at once: what lies between takes memory that no step has asked for."""
    return max(1, _STAGED_BYTES // max(1, blocks[:1].nbytes))


def parts_of(count: int, most: int) -> Iterator[slice]:
    """Divide blocks into parts of at most ``most``."""
    for start in range(0, count, most):
        yield slice(start, min(start + most, count))


def memory_for(
    source: HostMemorySource, *, num_blocks: int, block_bytes: int, layout: str, device: torch.device
) -> HostBytes | None:
    """Ask for the memory of host blocks; None: they take their own."""
    memory = source(num_blocks, block_bytes, layout)
    if memory is None or device.type == "cpu" or _pin(memory, device):
        return memory
    source(0, block_bytes, layout)
    return None


def as_blocks(memory: HostBytes, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """View bytes, ``[n, block_bytes]``, as blocks of numbers."""
    return torch.from_numpy(memory.reshape(-1)).view(dtype).view(shape)


def _pin(memory: HostBytes, device: torch.device) -> bool:
    """Let the device copy from and to this memory; return whether it can."""
    try:
        is_pinned = int(_untyped_cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, _MAPPED)) == 0
    except (AssertionError, RuntimeError):  # no device
        return False
    if not is_pinned:
        # CUDA keeps the error, and torch would raise it at its next launch: so it does here.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)
    return is_pinned


def allocate_blocks(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros: untouched beside a CPU, pinned beside a GPU.

    Raises:
        BackendConfigError: the memory cannot be had.
    """
    if not shape[0]:
        return torch.empty(shape, dtype=dtype)
    try:
        if device.type == "cpu":
            return untouched_zeros(shape, dtype)
        return _pinned_zeros(shape, dtype, device)
    except (OSError, OverflowError, RuntimeError) as error:
        asked = -(-math.prod(shape) * dtype.itemsize // _MIB)
        reason = one_line(error)
        raise BackendConfigError(
            f"swap_space_mib {asked} is not allowed; the memory cannot be had: {reason:.120}; "
            "allowed: less, or 0 (no swapping)"
        ) from error


def _pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Torch itself takes a power of two: for 33 GiB, 64."""
    own = untouched_zeros((math.prod(shape) * dtype.itemsize,), torch.uint8).numpy()
    if not _pin(own, device):
        return torch.zeros(shape, dtype=dtype, pin_memory=True)
    # Every view holds it, and it goes before the memory does.
    holder = (ctypes.c_uint8 * own.nbytes).from_buffer(own.data)
    weakref.finalize(holder, _unpin, own.ctypes.data).atexit = False
    return torch.frombuffer(holder, dtype=dtype).view(shape)


def _unpin(address: int) -> None:
    _untyped_cuda.cudart().cudaHostUnregister(address)


def num_host_blocks(
    *, swap_space_mib: int, block_bytes: int, num_device_blocks: int, device: torch.device, num_ranks: int = 1
) -> int:
    """How many blocks the swap space holds; ``num_ranks`` ranks have an equal share of it.

    ``AUTOMATIC_SWAP_SPACE``: as many as the device has, within a share of the free memory. Requests that are preempted
    together never have more (Kwon et al., PagedAttention, SOSP 2023, section 4.5).

    Raises:
        BackendConfigError: the space does not hold a single block.
    """
    if swap_space_mib == 0:
        return 0
    if swap_space_mib == AUTOMATIC_SWAP_SPACE:
        budget = _SHARE * free_host_bytes() / num_ranks
        if device.type != "cpu":
            budget = min(budget, _MOST_PINNED_BYTES)
        return min(num_device_blocks, int(budget // block_bytes))
    block_bytes *= num_ranks
    found = min(swap_space_mib * _MIB // block_bytes, _MOST_BLOCKS)
    if not found:
        raise BackendConfigError(
            f"swap_space_mib {swap_space_mib} is not allowed; one block takes {block_bytes} bytes, so allowed: "
            f"0 (no swapping), -1 (automatic), {-(-block_bytes // _MIB)} or more"
        )
    return found


def _scatter(contents: Tensor, layers: Tensor, blocks: Int32Array) -> None:
    """Fill ``blocks`` of ``layers`` with ``contents``, ``[n, num_layers, ...]``, all in main memory.

    NumPy does it in one operation without the interpreter's lock. A copy in torch for each block took 1.4 to 2 times as
    long, and waited for the lock each time.
    """
    _bytes_of(layers)[:, blocks] = _bytes_of(contents).swapaxes(0, 1)


def _bytes_of(tensor: Tensor) -> HostBytes:
    """The same memory, contiguous behind the first two dimensions, as uint8, ``[*tensor.shape[:2], m]``."""
    num_elements = math.prod(tensor.shape[2:])
    found: HostBytes = tensor.view(*tensor.shape[:2], num_elements).view(torch.uint8).numpy()
    return found


def _wait_for(device: torch.device) -> None:
    """The next step may overwrite the sources."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def block_index(blocks: Int32Array, layers: Tensor) -> Tensor:
    """Block numbers as an index for ``layers``: int64, ``[n]``."""
    return torch.from_numpy(blocks.astype(np.int64)).to(layers.device)


def _runs(host_blocks: Int32Array) -> Iterator[tuple[slice, slice]]:
    starts = np.flatnonzero(np.diff(host_blocks, prepend=host_blocks[:1] - 2) != 1)
    ends = np.append(starts[1:], len(host_blocks))
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        first = int(host_blocks[start])
        yield slice(start, end), slice(first, first + end - start)
