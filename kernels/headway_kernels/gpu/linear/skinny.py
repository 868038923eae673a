"""Products of a few tokens of 16-bit numbers with a weight, in one launch, perhaps with the gated activation behind them.

Owns: the product, its cut. Must not know: a layer's use, how weights become codes.

Reading the weight takes the time. A narrow layer's inputs are cut into *splits*, so that all processors read. The block
that ends last adds the splits of its tile, first to last. The weight's shape alone decides the cut: a token's result
depends neither on the number of tokens nor on the block that ends last.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.activation import Gate, activated
from headway_kernels.gpu.dependence import await_grid, dependent_launch
from headway_kernels.gpu.float8 import has_e4m3
from headway_kernels.gpu.linear.weights import (
    DeviceWeight,
    WeightForm,
    fetch_ahead,
    finished,
    multiply_tile,
    tile_constants,
    tile_tensors,
)

MOST_TOKENS = 64
"""Beyond it, tensor cores bound a product, and larger tiles are better."""
BLOCK_OUTPUTS = 64
BLOCK_INPUTS = 128
"""Splits are whole steps of so many; a weight whose groups are smaller is read in smaller steps."""
NUM_WARPS = 4
MAX_REGISTERS = 255
"""Of a thread: all that two blocks per processor leave. The assembler for sm_100 would spare them and use memory."""
PROGRAMS = 264
"""Two per processor of an H100 or H200 run at a time."""
MOST_SPLITS = 8
BLOCKS_TO_START = 4
"""What a program costs before its loads flow, in steps of ``BLOCK_INPUTS``."""

_UNGATED = tl.constexpr(int(Gate.NONE))


def takes(num_tokens: int, dtype: torch.dtype) -> bool:
    """Whether ``skinny_linear`` multiplies so many tokens of this dtype."""
    return 0 < num_tokens <= MOST_TOKENS and dtype.itemsize == 2


def workspace_sizes(num_outputs: int, num_inputs: int) -> tuple[int, int]:
    """Elements of ``partial`` and of ``arrived`` for a weight."""
    splits, _ = cut(num_outputs, num_inputs)
    tiles = triton.cdiv(num_outputs, BLOCK_OUTPUTS)
    return (splits * tiles * BLOCK_OUTPUTS * MOST_TOKENS, tiles) if splits > 1 else (0, 0)


def skinny_linear(
    x: Tensor, weight: DeviceWeight, bias: Tensor | None, out: Tensor, partial: Tensor, arrived: Tensor, gate: Gate
) -> None:
    """``out = x @ weight.T + bias``, or with a gate the activation of that.

    ``x`` ``[T, K]`` and ``out`` ``[T, N]``, any row stride; ``weight`` ``[N, K]``; ``bias`` ``[N]`` or None;
    one dtype of 16 bits, ``T`` up to ``MOST_TOKENS``. With a gate, ``out`` is ``[T, N / 2]``: see ``activation``.
    ``partial`` float32, ``arrived`` int32, zeros before and after: see ``workspace_sizes``. Sums are float32; the result
    is rounded once, with a gate as by two operators.
    """
    num_tokens, num_outputs, num_inputs = len(x), weight.num_outputs, weight.num_inputs
    tiles, splits = triton.cdiv(num_outputs, BLOCK_OUTPUTS), cut(num_outputs, num_inputs)[0]
    partial_size, arrived_size = workspace_sizes(num_outputs, num_inputs)
    assert takes(num_tokens, x.dtype), "few tokens of 16-bit numbers"
    assert partial.numel() >= partial_size, "the workspace holds all splits"
    assert arrived.numel() >= arrived_size, "the workspace counts all tiles"
    values, scales, minima, order = tile_tensors(weight)
    num_stages, constants = product_constants(num_tokens, weight, gate, has_bias=bias is not None)
    skinny_kernel[(tiles, splits)](
        x,
        values,
        scales,
        minima,
        order,
        scales if bias is None else bias,
        out,
        partial if splits > 1 else scales,
        arrived if splits > 1 else scales,
        x.stride(0),
        out.stride(0),
        num_tokens,
        **constants,
        HAS_E4M3=has_e4m3(x.device),
        # Triton's interpreter knows no bfloat16 products; those of float32 are the same.
        WIDE=not x.is_cuda,
        num_warps=NUM_WARPS,
        num_stages=num_stages,
        maxnreg=MAX_REGISTERS,
        **dependent_launch(x.device),
    )


def product_constants(
    num_tokens: int, weight: DeviceWeight, gate: Gate, *, has_bias: bool
) -> tuple[int, dict[str, int | bool]]:
    """Pipeline stages and constants of the kernel: two blocks fit a processor's shared memory."""
    splits, split_inputs = cut(weight.num_outputs, weight.num_inputs)
    block_tokens, num_stages = 16, 5
    if num_tokens > block_tokens:
        block_tokens, num_stages = MOST_TOKENS, 3 if weight.form is WeightForm.DENSE else 4
    return num_stages, tile_constants(weight) | {
        "SPLIT_INPUTS": split_inputs,
        "SPLITS": splits,
        "GATE": int(gate),
        "HAS_BIAS": has_bias,
        "BLOCK_TOKENS": block_tokens,
        "BLOCK_OUTPUTS": BLOCK_OUTPUTS,
        "BLOCK_INPUTS": weight.step(BLOCK_INPUTS),
    }


def cut(num_outputs: int, num_inputs: int) -> tuple[int, int]:
    """The number of splits, none of them empty, and the inputs of each: those that should take the least time."""
    tiles, blocks = triton.cdiv(num_outputs, BLOCK_OUTPUTS), triton.cdiv(num_inputs, BLOCK_INPUTS)

    def time(splits: int) -> int:
        return int(triton.cdiv(tiles * splits, PROGRAMS) * (triton.cdiv(blocks, splits) + BLOCKS_TO_START))

    split_blocks = triton.cdiv(blocks, min(range(1, min(MOST_SPLITS, blocks) + 1), key=time))
    return triton.cdiv(blocks, split_blocks), split_blocks * BLOCK_INPUTS


@triton.jit(do_not_specialize=["num_tokens"])
def skinny_kernel(
    x,
    values,
    scales,
    minima,
    order,
    bias,
    out,
    partial,
    arrived,
    x_stride,
    out_stride,
    num_tokens,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROW: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPED: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    SCALED: tl.constexpr,
    SPLIT_INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program multiplies a split of a tile of outputs. With a gate, a tile has gates and ups in turn."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    lanes = tl.arange(0, BLOCK_OUTPUTS)
    # Beyond the edge, read the last token and output again: this needs no mask in the loop, and changes no result.
    if GATE == _UNGATED:
        row = tl.minimum(tile * BLOCK_OUTPUTS + lanes, OUTPUTS - 1)
    else:
        row = tl.minimum(tile * (BLOCK_OUTPUTS // 2) + lanes // 2, OUTPUTS // 2 - 1) + lanes % 2 * (OUTPUTS // 2)
    first = split * SPLIT_INPUTS
    if PDL:
        fetch_ahead(values, row, first, ROW, FORM)
    await_grid(PDL)
    tokens = tl.arange(0, BLOCK_TOKENS)
    sums = multiply_tile(
        x + tl.minimum(tokens, num_tokens - 1).to(tl.int64) * x_stride,
        values,
        scales,
        minima,
        order,
        row,
        first,
        tl.minimum(first + SPLIT_INPUTS, INPUTS),
        OUTPUTS,
        INPUTS,
        ROW,
        FORM,
        GROUP,
        GROUPED,
        HAS_MINIMA,
        HAS_ORDER,
        HAS_E4M3,
        WIDE,
        BLOCK_TOKENS,
        BLOCK_OUTPUTS,
        BLOCK_INPUTS,
    )
    if SPLITS == 1:
        _store(
            sums,
            scales,
            bias,
            out,
            out_stride,
            row,
            tile,
            tokens,
            num_tokens,
            OUTPUTS,
            SCALED,
            HAS_BIAS,
            GATE,
            BLOCK_OUTPUTS,
        )
    else:
        place = lanes[:, None] * BLOCK_TOKENS + tokens[None, :]
        parts = partial + tile.to(tl.int64) * (SPLITS * BLOCK_OUTPUTS * BLOCK_TOKENS) + place
        tl.store(parts + split * (BLOCK_OUTPUTS * BLOCK_TOKENS), sums)
        # All threads have stored before one of them tells.
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1:
            # Past the first cache, which other processors' stores do not reach.
            sums = tl.load(parts, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                sums += tl.load(parts + other * (BLOCK_OUTPUTS * BLOCK_TOKENS), cache_modifier=".cg")
            _store(
                sums,
                scales,
                bias,
                out,
                out_stride,
                row,
                tile,
                tokens,
                num_tokens,
                OUTPUTS,
                SCALED,
                HAS_BIAS,
                GATE,
                BLOCK_OUTPUTS,
            )
            tl.store(arrived + tile, 0)


@triton.jit
def _store(
    sums,
    scales,
    bias,
    out,
    out_stride,
    row,
    tile,
    tokens,
    num_tokens,
    OUTPUTS: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
):
    """``sums`` ``[BLOCK_OUTPUTS, tokens]``."""
    dtype = out.dtype.element_ty
    sums = finished(sums, scales, bias, row[:, None], OUTPUTS, SCALED, HAS_BIAS)
    if GATE == _UNGATED:
        results = sums
        num_results = OUTPUTS
    else:
        rounded = sums.to(dtype).to(tl.float32)
        pairs = tl.permute(tl.reshape(rounded, (BLOCK_OUTPUTS // 2, 2, sums.shape[1])), (0, 2, 1))
        gate, up = tl.split(pairs)
        results = activated(gate, up, dtype, GATE)
        num_results = OUTPUTS // 2
    columns = tile * results.shape[0] + tl.arange(0, results.shape[0])
    place = out + tokens[:, None].to(tl.int64) * out_stride + columns[None, :]
    within = (tokens < num_tokens)[:, None] & (columns < num_results)[None, :]
    tl.store(place, tl.trans(results).to(dtype), mask=within)
