"""Moves of whole KV blocks, all layers of all pairs in one launch: inside the pool, out to main memory and back.

Owns: the CUDA source, the launch. Must not know: why or when a block moves.

``layers``, the device's pool, is ``[num_layers, num_blocks, *block]``; ``host``, pinned main memory,
``[num_host_blocks, num_layers, *block]``. Both contiguous, one dtype. ``pairs``: (source, destination), int32, ``[2,
n]``, contiguous, on the device. Moves have no order: no destination may be listed twice or be a source of the same
copy. A few dozen thread blocks saturate the link.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

KERNELS = ("copy_blocks", "swap_out", "swap_in")
THREADS = 256
PIECES_PER_THREAD = 4
_LINK_THREAD_BLOCKS = 32
_COPY_THREAD_BLOCKS = 1024

PIECE_TYPES = {16: "uint4", 4: "unsigned int", 1: "unsigned char"}
"""The type that a thread moves at once, by its bytes: the widest that divides a block of one layer."""

SOURCE = r"""
// Compiled once per PIECE, a type of 16, 4 or 1 bytes. Sizes and strides count pieces. PIECES_PER_THREAD is how many
// loads of a thread are under way at once.

// A block of one layer is at start + block * block_stride + layer * layer_stride.
struct Pool {
    PIECE *start;
    long long block_stride;
    long long layer_stride;
};

__device__ PIECE *place_in(Pool pool, int block, int layer) {
    return pool.start + block * pool.block_stride + layer * pool.layer_stride;
}

// What is read or written once need not push out of the cache what the step uses.
template <bool IS_STREAMED> __device__ PIECE load(const PIECE *place) {
    return IS_STREAMED ? __ldcs(place) : *place;
}

template <bool IS_STREAMED> __device__ void store(PIECE *place, PIECE piece) {
    if (IS_STREAMED) {
        __stcs(place, piece);
    } else {
        *place = piece;
    }
}

// The pieces first, first + blockDim.x, ... of a block: all loads before the first store.
template <bool STREAM_IN, bool STREAM_OUT>
__device__ void move_pieces(const PIECE *from, PIECE *to, int first, int block_pieces) {
    PIECE held[PIECES_PER_THREAD];
#pragma unroll
    for (int i = 0; i < PIECES_PER_THREAD; ++i) {
        const int piece = first + i * (int)blockDim.x;
        if (piece < block_pieces) {
            held[i] = load<STREAM_IN>(from + piece);
        }
    }
#pragma unroll
    for (int i = 0; i < PIECES_PER_THREAD; ++i) {
        const int piece = first + i * (int)blockDim.x;
        if (piece < block_pieces) {
            store<STREAM_OUT>(to + piece, held[i]);
        }
    }
}

// The work is pairs x layers x chunks, the last running fastest; a block of threads takes every gridDim.x-th of it, so
// that the division is done once for all that its threads hold.
template <bool STREAM_IN, bool STREAM_OUT>
__device__ void move_blocks(Pool from, Pool to, const int *pairs, int num_pairs, int num_layers, int block_pieces) {
    const int chunk_pieces = (int)blockDim.x * PIECES_PER_THREAD;
    const int num_chunks = (block_pieces - 1) / chunk_pieces + 1;
    const long long work = (long long)num_pairs * num_layers * num_chunks;
    for (long long item = blockIdx.x; item < work; item += gridDim.x) {
        const long long block_layer = item / num_chunks;
        const int chunk = (int)(item - block_layer * num_chunks);
        const int pair = (int)(block_layer / num_layers);
        const int layer = (int)(block_layer - (long long)pair * num_layers);
        const PIECE *source = place_in(from, pairs[pair], layer);
        PIECE *target = place_in(to, pairs[num_pairs + pair], layer);
        move_pieces<STREAM_IN, STREAM_OUT>(source, target, chunk * chunk_pieces + (int)threadIdx.x, block_pieces);
    }
}

#define KERNEL(NAME, STREAM_IN, STREAM_OUT)                                                                            \
    extern "C" __global__ void NAME(PIECE *from, long long from_block_stride, long long from_layer_stride, PIECE *to,  \
                                    long long to_block_stride, long long to_layer_stride, const int *pairs,            \
                                    int num_pairs, int num_layers, int block_pieces) {                                 \
        const Pool source = {from, from_block_stride, from_layer_stride};                                              \
        const Pool target = {to, to_block_stride, to_layer_stride};                                                    \
        move_blocks<STREAM_IN, STREAM_OUT>(source, target, pairs, num_pairs, num_layers, block_pieces);                \
    }

// What is swapped in or copied is read again at once, by the step that waits for it.
KERNEL(copy_blocks, false, false)
KERNEL(swap_out, true, true)
KERNEL(swap_in, true, false)
"""


def compile_options(piece_bytes: int) -> tuple[str, ...]:
    """The compiler's options for pieces of that size."""
    return ("-std=c++17", f"-DPIECE={PIECE_TYPES[piece_bytes]}", f"-DPIECES_PER_THREAD={PIECES_PER_THREAD}")


class PoolView(NamedTuple):
    """The blocks of a pool in memory, in bytes."""

    address: int
    block_stride: int
    layer_stride: int


class Launch(NamedTuple):
    """One launch, for pieces of ``piece_bytes``."""

    kernel: str
    piece_bytes: int
    thread_blocks: int
    source: PoolView
    target: PoolView
    num_pairs: int
    num_layers: int
    block_pieces: int


def copy_blocks(layers: Tensor, pairs: Tensor, *, stream: torch.cuda.Stream | None = None) -> None:
    """Copy blocks within the pool."""
    pool = device_view(layers)
    _launch(plan("copy_blocks", pool, pool, layers, pairs.shape[1]), pairs, stream)


def swap_out(layers: Tensor, host: Tensor, pairs: Tensor, *, stream: torch.cuda.Stream | None = None) -> None:
    """Copy blocks to main memory.

    Raises:
        ValueError: the device cannot reach ``host``.
    """
    target = host_view(host, _mapped_address(host))
    _launch(plan("swap_out", device_view(layers), target, layers, pairs.shape[1]), pairs, stream)


def swap_in(layers: Tensor, host: Tensor, pairs: Tensor, *, stream: torch.cuda.Stream | None = None) -> None:
    """Copy blocks from main memory.

    Raises:
        ValueError: the device cannot reach ``host``.
    """
    source = host_view(host, _mapped_address(host))
    _launch(plan("swap_in", source, device_view(layers), layers, pairs.shape[1]), pairs, stream)


def compile_moves(layers: Tensor) -> None:
    """Compile all moves of this pool's blocks, which takes seconds: else the first one does, while a step waits."""
    import cupy

    pool = device_view(layers)
    piece_bytes = plan("copy_blocks", pool, pool, layers, 1).piece_bytes
    with cupy.cuda.Device(layers.device.index):
        for kernel in KERNELS:
            _kernel(kernel, piece_bytes)


def device_view(layers: Tensor) -> PoolView:
    """The blocks of ``[num_layers, num_blocks, *block]``."""
    assert layers.is_contiguous()
    itemsize = layers.element_size()
    return PoolView(layers.data_ptr(), layers.stride(1) * itemsize, layers.stride(0) * itemsize)


def host_view(host: Tensor, address: int) -> PoolView:
    """The blocks of ``[num_host_blocks, num_layers, *block]``, which the device sees at ``address``."""
    assert host.is_contiguous()
    itemsize = host.element_size()
    return PoolView(address, host.stride(0) * itemsize, host.stride(1) * itemsize)


def plan(kernel: str, source: PoolView, target: PoolView, layers: Tensor, num_pairs: int) -> Launch:
    """Choose pieces and thread blocks."""
    num_layers = layers.shape[0]
    block_bytes = math.prod(layers.shape[2:]) * layers.element_size()
    piece_bytes = _piece_bytes(block_bytes, source.address, target.address)
    block_pieces = block_bytes // piece_bytes
    work = num_pairs * num_layers * -(-block_pieces // (THREADS * PIECES_PER_THREAD))
    most = _COPY_THREAD_BLOCKS if kernel == "copy_blocks" else _LINK_THREAD_BLOCKS
    return Launch(
        kernel=kernel,
        piece_bytes=piece_bytes,
        thread_blocks=min(work, most),
        source=_in_pieces(source, piece_bytes),
        target=_in_pieces(target, piece_bytes),
        num_pairs=num_pairs,
        num_layers=num_layers,
        block_pieces=block_pieces,
    )


def _piece_bytes(*aligned: int) -> int:
    """The widest piece that divides a block and both addresses."""
    return next(width for width in PIECE_TYPES if all(value % width == 0 for value in aligned))


def _in_pieces(pool: PoolView, piece_bytes: int) -> PoolView:
    return PoolView(pool.address, pool.block_stride // piece_bytes, pool.layer_stride // piece_bytes)


def _launch(launch: Launch, pairs: Tensor, stream: torch.cuda.Stream | None) -> None:
    import cupy

    if not launch.thread_blocks:
        return
    assert pairs.is_cuda
    assert pairs.dtype == torch.int32
    assert pairs.is_contiguous()
    chosen = torch.cuda.current_stream(pairs.device) if stream is None else stream
    with cupy.cuda.Device(pairs.device.index), _cupy_stream(chosen):
        _kernel(launch.kernel, launch.piece_bytes)((launch.thread_blocks,), (THREADS,), _arguments(launch, pairs))


def _arguments(launch: Launch, pairs: Tensor) -> tuple[np.generic, ...]:
    return (
        *map(np.int64, launch.source),
        *map(np.int64, launch.target),
        np.int64(pairs.data_ptr()),
        *map(np.int32, (launch.num_pairs, launch.num_layers, launch.block_pieces)),
    )


@functools.cache
def _kernel(name: str, piece_bytes: int) -> Any:
    return _module(piece_bytes).get_function(name)


@functools.cache
def _module(piece_bytes: int) -> Any:
    import cupy

    return cupy.RawModule(code=SOURCE, options=compile_options(piece_bytes))


class _StreamOfTorch:
    """CuPy 14 wants a torch stream in this form."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream.cuda_stream


def _cupy_stream(stream: torch.cuda.Stream) -> Any:
    import cupy

    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_StreamOfTorch(stream))
    return cupy.cuda.ExternalStream(stream.cuda_stream, stream.device.index)


def _mapped_address(host: Tensor) -> int:
    import cupy

    address = cupy.cuda.runtime.pointerGetAttributes(host.data_ptr()).devicePointer
    if not address:
        raise ValueError("the host pool is not pinned: the device cannot reach it")
    return int(address)
