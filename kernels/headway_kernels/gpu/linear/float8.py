"""Products of many tokens with weights as E4M3 codes, whose inputs are rounded to such codes first (W8A8).

Owns: the rounding of inputs, the product, its tiles. Must not know: a layer's use, which weights are meant for it.

Each ``BLOCK`` inputs of a token share a power of two, as in the Microscaling formats (OCP MX specification 1.0, 2023). Tensor
cores add products of 8-bit floats with fewer bits than float32 has (DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.2),
so their sums leave them every ``BLOCK`` inputs, and are added in float32. Since a factor there costs nothing, no scale
needs to hold for a whole row, or to be known before: rounding reads its own block alone. A result is one chain of such
sums, whatever the tiles: it depends neither on other tokens nor on their number.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.dependence import await_grid, dependent_launch
from headway_kernels.gpu.float8 import NUMBERS_TOO_SMALL, code_of, exponent_of, factor_of, has_e4m3, magnitude_bits
from headway_kernels.gpu.linear.quantized import OUTPUT_TILES_PER_BAND, Tiling, tile_of
from headway_kernels.gpu.linear.weights import HALF, DeviceWeight, WeightForm, finished, tile_constants

BLOCK = 128
"""Inputs that share a power of two, and that a program takes at a time."""
FLOAT8_TILINGS = (
    Tiling(max_tokens=256, tokens=64, outputs=128, inputs=BLOCK, num_warps=4, num_stages=4),
    Tiling(max_tokens=None, tokens=128, outputs=128, inputs=BLOCK, num_warps=8, num_stages=4),
)
BLOCKS_AT_ONCE = 8
"""Blocks of a token that a program rounds."""

_BLOCK = tl.constexpr(BLOCK)
_HALF = tl.constexpr(HALF)
_TO_NUMBERS = tl.constexpr(NUMBERS_TOO_SMALL**-2)
"""Factors of inputs and stored scales of weights are of numbers that are too small, which these are not."""


def multiplies(weight: DeviceWeight) -> bool:
    """Whether these products take a weight: E4M3, with a scale for each output, or for blocks of both sides."""
    if weight.form is not WeightForm.FP8_PAIRS:
        return False
    return not weight.is_grouped or (weight.group % BLOCK == 0 and _has_blocks(weight.scales))


def _has_blocks(scales: Tensor | None) -> bool:
    """Whether each ``BLOCK`` outputs have one scale for a group: ``[..., groups, outputs]``. It waits for the device."""
    assert scales is not None
    shared = scales[..., ::BLOCK].repeat_interleave(BLOCK, -1)
    return torch.equal(scales, shared[..., : scales.shape[-1]])


def is_native(device: torch.device) -> bool:
    """Whether the processor multiplies codes; Triton's interpreter does, too."""
    return device.type != "cuda" or has_e4m3(device)


def workspace_size(num_tokens: int, num_inputs: int) -> int:
    """Elements of ``workspace`` for inputs of this shape."""
    blocks: int = triton.cdiv(num_inputs, BLOCK)
    return num_tokens * blocks * (1 + BLOCK // 4)


def float8_linear(
    x: Tensor,
    weight: DeviceWeight,
    bias: Tensor | None,
    out: Tensor,
    workspace: Tensor,
    tilings: tuple[Tiling, ...] = FLOAT8_TILINGS,
) -> None:
    """``out = rounded(x) @ weight.T + bias``.

    ``x`` ``[T, K]`` and ``out`` ``[T, N]`` in one floating dtype, any row stride; ``bias`` ``[N]`` in that dtype or None;
    ``workspace`` float32, see ``workspace_size``. ``rounded`` is ``kv_codes.encode`` and ``decode`` of each ``BLOCK``
    inputs; sums are float32, and rounded once.
    """
    num_tokens = len(x)
    if num_tokens == 0:
        return
    assert multiplies(weight), "a form that is multiplied in 8 bits"
    codes, factors = round_inputs(x, workspace)
    assert weight.scales is not None
    tiling = tiling_of(num_tokens, tilings)
    _float8_product[(triton.cdiv(weight.num_outputs, tiling.outputs) * triton.cdiv(num_tokens, tiling.tokens),)](
        codes,
        factors,
        weight.values.view(torch.float8_e4m3fn),
        weight.scales,
        weight.scales if bias is None else bias,
        out,
        out.stride(0),
        num_tokens,
        **product_constants(weight, tiling, has_bias=bias is not None),
        BAND=OUTPUT_TILES_PER_BAND,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **dependent_launch(x.device),
    )


def tiling_of(num_tokens: int, tilings: tuple[Tiling, ...]) -> Tiling:
    """The first for so many tokens."""
    return next(tiling for tiling in tilings if tiling.max_tokens is None or num_tokens <= tiling.max_tokens)


def round_inputs(x: Tensor, workspace: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of ``x`` ``[T, K]``, E4M3, as a weight's lie, and float32 factors, ``[blocks, T]``, flat: in ``workspace``."""
    num_tokens, num_inputs = x.shape
    blocks = triton.cdiv(num_inputs, BLOCK)
    size = workspace_size(num_tokens, num_inputs)
    assert workspace.numel() >= size, "the workspace holds all codes and factors"
    # Codes first: behind them, factors are as aligned with any number of tokens.
    codes, factors = workspace[: size - num_tokens * blocks], workspace[size - num_tokens * blocks : size]
    _round_inputs[(num_tokens, triton.cdiv(blocks, BLOCKS_AT_ONCE))](
        x,
        codes.view(torch.int16),
        factors,
        x.stride(0),
        num_tokens,
        INPUTS=num_inputs,
        BLOCKS_AT_ONCE=BLOCKS_AT_ONCE,
        **dependent_launch(x.device),
    )
    return codes.view(torch.float8_e4m3fn), factors


def product_constants(weight: DeviceWeight, tiling: Tiling, *, has_bias: bool) -> dict[str, int | bool]:
    """The constants of a product's kernel that weight and tiles decide."""
    assert tiling.outputs <= BLOCK, "the outputs of a tile share a scale"
    of_weight = tile_constants(weight)
    return {name: of_weight[name] for name in ("OUTPUTS", "INPUTS", "GROUP", "GROUPED", "SCALED")} | {
        "ROW": weight.values.shape[-1] * weight.values.element_size(),
        "HAS_BIAS": has_bias,
        "BLOCK_TOKENS": tiling.tokens,
        "BLOCK_OUTPUTS": tiling.outputs,
    }


@triton.jit(do_not_specialize=["num_tokens"])
def _round_inputs(
    x, codes, factors, x_stride, num_tokens, INPUTS: tl.constexpr, BLOCKS_AT_ONCE: tl.constexpr, PDL: tl.constexpr
):
    """Some blocks of a token; codes lie in pairs, as those of weights do, whole blocks, with zeros behind the last input."""
    await_grid(PDL)
    token = tl.program_id(0)
    block = tl.program_id(1) * BLOCKS_AT_ONCE + tl.arange(0, BLOCKS_AT_ONCE)
    num_blocks: tl.constexpr = (INPUTS + _BLOCK - 1) // _BLOCK
    word = tl.arange(0, _BLOCK // 2)
    low = block[:, None] * _BLOCK + (word // _HALF * (2 * _HALF) + word % _HALF)[None, :]
    row = x + token.to(tl.int64) * x_stride
    x_low = tl.load(row + low, mask=low < INPUTS, other=0.0).to(tl.float32)
    x_high = tl.load(row + low + _HALF, mask=low + _HALF < INPUTS, other=0.0).to(tl.float32)
    exponent = exponent_of(tl.max(tl.maximum(magnitude_bits(x_low), magnitude_bits(x_high)), axis=1))
    codes_low = code_of(x_low, exponent[:, None]).to(tl.uint16)
    codes_high = code_of(x_high, exponent[:, None]).to(tl.uint16)
    pairs = (codes_low | (codes_high << 8)).to(tl.int16, bitcast=True)
    within = block < num_blocks
    places = token.to(tl.int64) * (num_blocks * (_BLOCK // 2)) + block[:, None] * (_BLOCK // 2) + word[None, :]
    tl.store(codes + places, pairs, mask=within[:, None])
    # Neighbouring tokens lie side by side.
    tl.store(factors + block.to(tl.int64) * num_tokens + token, factor_of(exponent) * _TO_NUMBERS, mask=within)


@triton.jit(do_not_specialize=["num_tokens"])
def _float8_product(
    codes,
    factors,
    values,
    scales,
    bias,
    out,
    out_stride,
    num_tokens,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROW: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPED: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BAND: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of results."""
    await_grid(PDL)
    token_tile, output_tile = tile_of(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_TOKENS), OUTPUTS, BLOCK_OUTPUTS, BAND)
    tokens = token_tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    outputs = output_tile * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    # Beyond the edge, read the last token again: this needs no mask in the loop, and changes no result.
    own_tokens = tl.minimum(tokens, num_tokens - 1)
    sums = multiply_codes(
        codes,
        factors,
        values,
        scales,
        own_tokens,
        num_tokens,
        output_tile,
        OUTPUTS,
        INPUTS,
        ROW,
        GROUP,
        GROUPED,
        BLOCK_TOKENS,
        BLOCK_OUTPUTS,
    )
    results = finished(sums, scales, bias, outputs[None, :], OUTPUTS, SCALED, HAS_BIAS)
    place = out + tokens[:, None].to(tl.int64) * out_stride + outputs[None, :]
    within = (tokens < num_tokens)[:, None] & (outputs < OUTPUTS)[None, :]
    tl.store(place, results.to(out.dtype.element_ty), mask=within)


@triton.jit
def multiply_codes(
    codes,
    factors,
    values,
    scales,
    tokens,
    num_tokens,
    output_tile,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROW: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
):
    """Sums, float32, ``[BLOCK_TOKENS, BLOCK_OUTPUTS]``, of ``tokens`` of the ``num_tokens`` that were rounded; only GROUPED ones
    are scaled. ``ROW`` bytes are a row of the weight.

    The loop has the form of ``multiply_tile``'s, and its reasons.
    """
    # Beyond the edge, read the last output again.
    outputs = tl.minimum(output_tile * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS), OUTPUTS - 1)
    num_blocks: tl.constexpr = (INPUTS + _BLOCK - 1) // _BLOCK
    rows = codes + tokens.to(tl.int64) * (num_blocks * _BLOCK)
    weight_rows = values + outputs.to(tl.int64) * ROW
    sums = tl.zeros((BLOCK_TOKENS, BLOCK_OUTPUTS), dtype=tl.float32)
    first_output = output_tile * BLOCK_OUTPUTS
    factor = _factor(factors, scales, 0, tokens, num_tokens, first_output, OUTPUTS, GROUP, GROUPED)
    for block in range(num_blocks):
        following = tl.minimum(block + 1, num_blocks - 1)
        next_factor = _factor(factors, scales, following, tokens, num_tokens, first_output, OUTPUTS, GROUP, GROUPED)
        places = block * _BLOCK + tl.arange(0, _BLOCK)
        inputs = tl.load(rows[:, None] + places[None, :])
        if num_blocks * _BLOCK > ROW:
            weights = tl.load(weight_rows[None, :] + places[:, None], mask=(places < ROW)[:, None], other=0.0)
        else:
            weights = tl.load(weight_rows[None, :] + places[:, None])
        part = tl.dot(inputs, weights)
        sums += part * factor[:, None]
        factor = next_factor
    return sums


@triton.jit
def _factor(
    factors,
    scales,
    block,
    tokens,
    num_tokens,
    output,
    OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """Of the sums of a block: each token's, with the scale of the weight's group, which all outputs of a tile share."""
    factor = tl.load(factors + block * num_tokens + tokens)
    if GROUPED:
        factor *= tl.load(scales + block * _BLOCK // GROUP * OUTPUTS + output)
    return factor
