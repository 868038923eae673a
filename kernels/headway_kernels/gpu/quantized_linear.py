"""Linear layers with weights as 8-bit codes, multiplied in the dtype of their inputs.

Owns: codes, scales, the product. Must not know: a layer's use.

Symmetric quantisation per output channel: int8 as in Jacob et al. 2018 (arXiv 1712.05877), fp8 is E4M3 of Micikevicius
et al. 2022 (arXiv 2209.05433). In registers a code becomes a number of the inputs' dtype, exactly. Scales multiply the
float32 sum.

With few tokens, narrow layers cut their inputs into *splits*, whose sums a second kernel adds in a fixed order. The
number of tokens only selects the tiling.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor


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


TILINGS = (
    Tiling(max_tokens=16, tokens=16, outputs=64, inputs=128, programs=528, num_warps=4, num_stages=5),
    Tiling(max_tokens=64, tokens=64, outputs=64, inputs=128, programs=264, num_warps=4, num_stages=4),
    Tiling(max_tokens=256, tokens=64, outputs=128, inputs=64, programs=0, num_warps=4, num_stages=4),
    Tiling(max_tokens=None, tokens=128, outputs=128, inputs=64, programs=0, num_warps=8, num_stages=4),
)
"""For 2-byte inputs. 528 programs are four per processor of an H100 or H200."""
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
SUMS_PER_PROGRAM = 512
SUM_WARPS = 4

LARGEST_CODE = {"int8": 127.0, "fp8": 448.0}
CODE_DTYPE = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
WIDE_ELEMENTS = 2**22
"""Elements of a weight that are float32 at a time while it is quantised: 16 MiB."""
FP8_SCALE = tl.constexpr(256.0)
"""An E4M3 code read as float16 has an exponent that is 15 - 7 = 8 too small."""


def quantize(weight: Tensor, kind: Literal["int8", "fp8"]) -> tuple[Tensor, Tensor]:
    """Codes and scales of a weight: ``weight[n, k]`` is about ``codes[n, k] * scales[n]``.

    ``weight`` floating, ``[N, K]``. Codes ``[N, K]``, int8 or float8_e4m3fn; positive float32 scales ``[N]``. A row's
    largest magnitude is the largest code.
    """
    num_outputs, num_inputs = weight.shape
    codes = torch.empty(num_outputs, num_inputs, dtype=CODE_DTYPE[kind], device=weight.device)
    scales = torch.empty(num_outputs, dtype=torch.float32, device=weight.device)
    step = max(WIDE_ELEMENTS // max(num_inputs, 1), 1)
    for first in range(0, num_outputs, step):
        wide = weight[first : first + step].float()
        # For a row of zeros, or of numbers too small to divide by, any finite scale is right.
        scale = (wide.abs().amax(dim=1) / LARGEST_CODE[kind]).clamp_(min=torch.finfo(torch.float32).tiny)
        ratio = (wide / scale[:, None]).clamp_(-LARGEST_CODE[kind], LARGEST_CODE[kind])
        codes[first : first + step] = ratio.round_() if kind == "int8" else ratio
        scales[first : first + step] = scale
    return codes, scales


def workspace_elements(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
    """Float32 elements of a workspace for any number of tokens."""
    sizes = [0]
    for tiling in _tilings(dtype):
        splits, _ = _split(num_outputs, num_inputs, tiling)
        if splits > 1:
            sizes.append(splits * tiling.tokens * num_outputs)
    return max(sizes)


def quantized_linear(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor, workspace: Tensor
) -> None:
    """``out = x @ (codes * scales[:, None]).T + bias``.

    ``x`` ``[T, K]`` and ``out`` ``[T, N]`` in one floating dtype, any row stride; ``codes`` and ``scales`` from
    ``quantize``, contiguous; ``bias`` ``[N]`` in that dtype or None; ``workspace`` float32, contiguous. The result is
    rounded once.
    """
    num_tokens, num_inputs = x.shape
    num_outputs = codes.shape[0]
    if num_tokens == 0:
        return
    tiling = choose_tiling(num_tokens, x.dtype)
    splits, _ = _split(num_outputs, num_inputs, tiling)
    if splits > 1 and workspace.numel() < splits * tiling.tokens * num_outputs:
        raise ValueError(
            f"workspace has {workspace.numel()} elements; {splits * tiling.tokens * num_outputs} are needed"
        )
    is_fp8 = codes.dtype == torch.float8_e4m3fn
    tiles = triton.cdiv(num_outputs, tiling.outputs) * triton.cdiv(num_tokens, tiling.tokens)
    _product[(tiles, splits)](
        x,
        codes.view(torch.uint8) if is_fp8 else codes,
        scales,
        scales if bias is None else bias,
        out,
        workspace if splits > 1 else scales,
        x.stride(0),
        out.stride(0),
        num_tokens,
        **product_constants(num_outputs, num_inputs, tiling, is_fp8=is_fp8, has_bias=bias is not None),
        # Triton's interpreter knows no bfloat16 products; those of float32 are the same.
        WIDE=x.dtype == torch.float32 or not x.is_cuda,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
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
            IS_FP8=is_fp8,
            HAS_BIAS=bias is not None,
            BLOCK=SUMS_PER_PROGRAM,
            num_warps=SUM_WARPS,
        )


def choose_tiling(num_tokens: int, dtype: torch.dtype) -> Tiling:
    """The first tiling for so many tokens."""
    return next(tiling for tiling in _tilings(dtype) if tiling.max_tokens is None or num_tokens <= tiling.max_tokens)


def product_constants(
    num_outputs: int, num_inputs: int, tiling: Tiling, *, is_fp8: bool, has_bias: bool
) -> dict[str, int | bool]:
    """The constants of the product's kernel."""
    splits, split_inputs = _split(num_outputs, num_inputs, tiling)
    return {
        "OUTPUTS": num_outputs,
        "INPUTS": num_inputs,
        "SPLIT_INPUTS": split_inputs,
        "SPLITS": splits,
        "IS_FP8": is_fp8,
        "HAS_BIAS": has_bias,
        "BLOCK_TOKENS": tiling.tokens,
        "BLOCK_OUTPUTS": tiling.outputs,
        "BLOCK_INPUTS": tiling.inputs,
        "BAND": OUTPUT_TILES_PER_BAND,
    }


def _tilings(dtype: torch.dtype) -> tuple[Tiling, ...]:
    return FLOAT32_TILINGS if dtype == torch.float32 else TILINGS


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
    codes,
    scales,
    bias,
    out,
    workspace,
    x_stride,
    out_stride,
    num_tokens,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLIT_INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    BAND: tl.constexpr,
):
    """The weight is the left operand, which tensor cores take from registers; the long side of a tile is then outputs."""
    token_tile, output_tile = _tile_of(
        tl.program_id(0), tl.cdiv(num_tokens, BLOCK_TOKENS), OUTPUTS, BLOCK_OUTPUTS, BAND
    )
    split = tl.program_id(1)
    tokens = token_tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    outputs = output_tile * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    # Beyond the edge, read the last token and output again: this needs no mask in the loop, and changes no result.
    x_rows = x + tl.minimum(tokens, num_tokens - 1).to(tl.int64) * x_stride
    code_rows = codes + tl.minimum(outputs, OUTPUTS - 1).to(tl.int64) * INPUTS

    sums = tl.zeros((BLOCK_OUTPUTS, BLOCK_TOKENS), dtype=tl.float32)
    first = split * SPLIT_INPUTS
    for start in range(first, tl.minimum(first + SPLIT_INPUTS, INPUTS), BLOCK_INPUTS):
        inputs = start + tl.arange(0, BLOCK_INPUTS)
        if INPUTS % BLOCK_INPUTS == 0:
            tile = tl.load(code_rows[:, None] + inputs[None, :])
            x_tile = tl.load(x_rows[None, :] + inputs[:, None])
        else:
            tile = tl.load(code_rows[:, None] + inputs[None, :], mask=(inputs < INPUTS)[None, :], other=0)
            x_tile = tl.load(x_rows[None, :] + inputs[:, None], mask=(inputs < INPUTS)[:, None], other=0.0)
        if WIDE:
            x_tile = x_tile.to(tl.float32)
        sums = tl.dot(_numbers(tile, x_tile.dtype, IS_FP8), x_tile, sums, input_precision="ieee")

    sums = tl.trans(sums)
    within = (tokens < num_tokens)[:, None] & (outputs < OUTPUTS)[None, :]
    if SPLITS > 1:
        partial = workspace + (split * BLOCK_TOKENS + tokens)[:, None].to(tl.int64) * OUTPUTS + outputs[None, :]
        tl.store(partial, sums, mask=within)
    else:
        results = _scaled(sums, scales, bias, outputs[None, :], OUTPUTS, IS_FP8, HAS_BIAS)
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
    IS_FP8: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Splits are added first to last."""
    token = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = outputs < OUTPUTS
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        partial = workspace + (split * SPLIT_TOKENS + token) * OUTPUTS + outputs
        sums += tl.load(partial, mask=within, other=0.0)
    results = _scaled(sums, scales, bias, outputs, OUTPUTS, IS_FP8, HAS_BIAS)
    tl.store(out + token * out_stride + outputs, results.to(out.dtype.element_ty), mask=within)


@triton.jit
def _tile_of(program, token_tiles, OUTPUTS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BAND: tl.constexpr):
    """Bands of ``BAND`` output tiles; within a band, token tile after token tile."""
    output_tiles = tl.cdiv(OUTPUTS, BLOCK_OUTPUTS)
    band = program // (BAND * token_tiles)
    within_band = program % (BAND * token_tiles)
    width = tl.minimum(output_tiles - band * BAND, BAND)
    return within_band // width, band * BAND + within_band % width


@triton.jit
def _numbers(codes, dtype: tl.constexpr, IS_FP8: tl.constexpr):
    """Codes as numbers of ``dtype``, exactly; those of fp8 too small by ``FP8_SCALE``.

    Processors before sm_89 cannot decode E4M3: its bits are moved to float16's exponent and mantissa, which also fits
    subnormal codes. ``quantize`` makes no NaN of finite weights.
    """
    if IS_FP8:
        bits = codes.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return bits.to(tl.float16, bitcast=True).to(dtype)
    return codes.to(dtype)


@triton.jit
def _scaled(sums, scales, bias, outputs, OUTPUTS: tl.constexpr, IS_FP8: tl.constexpr, HAS_BIAS: tl.constexpr):
    within = outputs < OUTPUTS
    scale = tl.load(scales + outputs, mask=within, other=0.0)
    if IS_FP8:
        scale *= FP8_SCALE
    results = sums * scale
    if HAS_BIAS:
        results += tl.load(bias + outputs, mask=within, other=0.0).to(tl.float32)
    return results
