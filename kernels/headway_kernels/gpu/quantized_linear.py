"""Linear layers with weights as codes, multiplied in the dtype of their inputs.

Owns: the product, its cut. Must not know: a layer's use, how weights become codes.

With few tokens, narrow layers cut their inputs into *splits*, whose sums a second kernel adds in a fixed order. The
number of tokens only selects the tiling, and up to 64 of 16-bit numbers the cut is that of the weight's shape alone.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.dependence import await_grid, dependent_launch
from headway_kernels.gpu.float8 import has_e4m3
from headway_kernels.gpu.weights import (
    DeviceWeight,
    WeightForm,
    fetch_ahead,
    finished,
    multiply_tile,
    tile_constants,
    tile_tensors,
)


@dataclass(frozen=True, slots=True)
class Tiling:
    """The cut of a product of up to ``max_tokens`` tokens (None: any).

    A program computes ``tokens`` x ``outputs`` results and takes ``inputs`` of each dot product at a time. Splits of
    the inputs aim at ``programs``; 0 for no splits. A tiling that splits has ``tokens >= max_tokens``.
    """

    max_tokens: int | None
    tokens: int
    outputs: int
    inputs: int
    programs: int
    num_warps: int
    num_stages: int


PROGRAMS = 264
"""Two per processor of an H100 or H200, for all that are few tokens: so a token's sums are cut alike in any such step."""
TILINGS = (
    Tiling(max_tokens=16, tokens=16, outputs=64, inputs=128, programs=PROGRAMS, num_warps=4, num_stages=5),
    Tiling(max_tokens=64, tokens=64, outputs=64, inputs=128, programs=PROGRAMS, num_warps=4, num_stages=4),
    Tiling(max_tokens=256, tokens=64, outputs=128, inputs=64, programs=0, num_warps=4, num_stages=4),
    Tiling(max_tokens=None, tokens=128, outputs=128, inputs=64, programs=0, num_warps=8, num_stages=4),
)
"""For 2-byte inputs."""
FLOAT32_TILINGS = (
    Tiling(max_tokens=16, tokens=16, outputs=32, inputs=32, programs=528, num_warps=4, num_stages=3),
    Tiling(max_tokens=None, tokens=32, outputs=64, inputs=32, programs=0, num_warps=4, num_stages=3),
)
"""Without tensor cores, to be exact: registers hold whole operand tiles."""
BLOCKS_PER_SPLIT = 4
"""The fewest steps of ``Tiling.inputs`` per split: fewer would not fill the pipeline of loads."""
MOST_SPLITS = 16
OUTPUT_TILES_PER_BAND = 8
"""Output tiles whose programs are neighbours and share inputs and codes in the cache."""
_FEW_TOKENS = tl.constexpr(64)
"""Of a tile: memory then bounds the product, and programs begin with fetching weights."""
SUMS_PER_PROGRAM = 512
SUM_WARPS = 4


def workspace_elements(weight: DeviceWeight, dtype: torch.dtype) -> int:
    """Float32 elements of a workspace for any number of tokens."""
    sizes = [0]
    for tiling in _tilings(weight, dtype):
        splits, _ = _split(weight.num_outputs, weight.num_inputs, tiling)
        if splits > 1:
            sizes.append(splits * tiling.tokens * weight.num_outputs)
    return max(sizes)


def quantized_linear(
    x: Tensor,
    weight: DeviceWeight,
    bias: Tensor | None,
    out: Tensor,
    workspace: Tensor,
    tilings: tuple[Tiling, ...] | None = None,
) -> None:
    """``out = x @ weight.T + bias``.

    ``x`` ``[T, K]`` and ``out`` ``[T, N]`` in one floating dtype, any row stride; ``bias`` ``[N]`` in that dtype or None;
    ``workspace`` float32, contiguous. The result is rounded once. ``tilings``: instead of those that ship.
    """
    num_tokens = x.shape[0]
    if num_tokens == 0:
        return
    tiling = choose_tiling(num_tokens, weight, x.dtype, tilings)
    constants = product_constants(weight, tiling, has_bias=bias is not None)
    splits, num_outputs = constants["SPLITS"], weight.num_outputs
    if splits > 1 and workspace.numel() < splits * tiling.tokens * num_outputs:
        raise ValueError(
            f"workspace has {workspace.numel()} elements; {splits * tiling.tokens * num_outputs} are needed"
        )
    values, scales, minima, order = tile_tensors(weight)
    tiles = triton.cdiv(num_outputs, tiling.outputs) * triton.cdiv(num_tokens, tiling.tokens)
    _product[(tiles, splits)](
        x,
        values,
        scales,
        minima,
        order,
        scales if bias is None else bias,
        out,
        workspace if splits > 1 else scales,
        x.stride(0),
        out.stride(0),
        num_tokens,
        **constants,
        HAS_E4M3=has_e4m3(x.device),
        # Triton's interpreter knows no bfloat16 products; those of float32 are the same.
        WIDE=x.dtype == torch.float32 or not x.is_cuda,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **dependent_launch(x.device),
    )
    if splits > 1:
        _add_splits[(num_tokens, triton.cdiv(num_outputs, SUMS_PER_PROGRAM))](
            workspace,
            scales,
            scales if bias is None else bias,
            out,
            out.stride(0),
            OUTPUTS=num_outputs,
            SPLITS=splits,
            SPLIT_TOKENS=tiling.tokens,
            SCALED=constants["SCALED"],
            HAS_BIAS=bias is not None,
            BLOCK=SUMS_PER_PROGRAM,
            num_warps=SUM_WARPS,
            **dependent_launch(x.device),
        )


def choose_tiling(
    num_tokens: int, weight: DeviceWeight, dtype: torch.dtype, tilings: tuple[Tiling, ...] | None = None
) -> Tiling:
    """The first tiling for so many tokens, in steps that fit the weight's groups."""
    fitting = _tilings(weight, dtype, tilings)
    return next(tiling for tiling in fitting if tiling.max_tokens is None or num_tokens <= tiling.max_tokens)


def product_constants(weight: DeviceWeight, tiling: Tiling, *, has_bias: bool) -> dict[str, int | bool]:
    """The constants of the product's kernel."""
    splits, split_inputs = _split(weight.num_outputs, weight.num_inputs, tiling)
    return tile_constants(weight) | {
        "SPLIT_INPUTS": split_inputs,
        "SPLITS": splits,
        "SCALED": weight.form is not WeightForm.DENSE and not weight.is_grouped,
        "HAS_BIAS": has_bias,
        "BLOCK_TOKENS": tiling.tokens,
        "BLOCK_OUTPUTS": tiling.outputs,
        "BLOCK_INPUTS": tiling.inputs,
        "BAND": OUTPUT_TILES_PER_BAND,
    }


def _tilings(weight: DeviceWeight, dtype: torch.dtype, tilings: tuple[Tiling, ...] | None = None) -> list[Tiling]:
    tilings = tilings or (FLOAT32_TILINGS if dtype == torch.float32 else TILINGS)
    return [replace(tiling, inputs=weight.step(tiling.inputs)) for tiling in tilings]


def _split(num_outputs: int, num_inputs: int, tiling: Tiling) -> tuple[int, int]:
    """The number of splits, none of them empty, and the inputs of each."""
    blocks = max(triton.cdiv(num_inputs, tiling.inputs), 1)
    wanted = tiling.programs // triton.cdiv(num_outputs, tiling.outputs)
    splits = max(min(wanted, blocks // BLOCKS_PER_SPLIT, MOST_SPLITS), 1)
    split_blocks = triton.cdiv(blocks, splits)
    return triton.cdiv(blocks, split_blocks), split_blocks * tiling.inputs


@triton.jit(do_not_specialize=["num_tokens"])
def _product(
    x,
    values,
    scales,
    minima,
    order,
    bias,
    out,
    workspace,
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
    SPLIT_INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    BAND: tl.constexpr,
    PDL: tl.constexpr,
):
    token_tile, output_tile = _tile_of(
        tl.program_id(0), tl.cdiv(num_tokens, BLOCK_TOKENS), OUTPUTS, BLOCK_OUTPUTS, BAND
    )
    split = tl.program_id(1)
    tokens = token_tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    outputs = output_tile * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    # Beyond the edge, read the last token and output again: this needs no mask in the loop, and changes no result.
    rows = tl.minimum(outputs, OUTPUTS - 1)
    first = split * SPLIT_INPUTS
    if PDL and BLOCK_TOKENS <= _FEW_TOKENS:
        fetch_ahead(values, rows, first, ROW, FORM)
    await_grid(PDL)
    x_rows = x + tl.minimum(tokens, num_tokens - 1).to(tl.int64) * x_stride
    sums = multiply_tile(
        x_rows,
        values,
        scales,
        minima,
        order,
        rows,
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
    sums = tl.trans(sums)
    within = (tokens < num_tokens)[:, None] & (outputs < OUTPUTS)[None, :]
    if SPLITS > 1:
        partial = workspace + (split * BLOCK_TOKENS + tokens)[:, None].to(tl.int64) * OUTPUTS + outputs[None, :]
        tl.store(partial, sums, mask=within)
    else:
        results = finished(sums, scales, bias, outputs[None, :], OUTPUTS, SCALED, HAS_BIAS)
        place = out + tokens[:, None].to(tl.int64) * out_stride + outputs[None, :]
        tl.store(place, results.to(out.dtype.element_ty), mask=within)


@triton.jit
def _add_splits(
    workspace,
    scales,
    bias,
    out,
    out_stride,
    OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Splits are added first to last."""
    await_grid(PDL)
    token = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = outputs < OUTPUTS
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        partial = workspace + (split * SPLIT_TOKENS + token) * OUTPUTS + outputs
        sums += tl.load(partial, mask=within, other=0.0)
    results = finished(sums, scales, bias, outputs, OUTPUTS, SCALED, HAS_BIAS)
    tl.store(out + token * out_stride + outputs, results.to(out.dtype.element_ty), mask=within)


@triton.jit
def _tile_of(program, token_tiles, OUTPUTS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BAND: tl.constexpr):
    """Bands of ``BAND`` output tiles; within a band, token tile after token tile."""
    output_tiles = tl.cdiv(OUTPUTS, BLOCK_OUTPUTS)
    band = program // (BAND * token_tiles)
    within_band = program % (BAND * token_tiles)
    width = tl.minimum(output_tiles - band * BAND, BAND)
    return within_band // width, band * BAND + within_band % width
