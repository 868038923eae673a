"""Linear layers with weights as codes, multiplied in the dtype of their inputs; few tokens of 16 bits: see ``skinny_linear``.

Owns: the product, its tiles. Must not know: a layer's use, how weights become codes.

The number of tokens only selects the tiling.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.dependence import await_grid, dependent_launch
from headway_kernels.gpu.float8 import has_e4m3
from headway_kernels.gpu.linear.weights import DeviceWeight, finished, multiply_tile, tile_constants, tile_tensors


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiles of a product of up to ``max_tokens`` tokens (None: any).

    A program computes ``tokens`` x ``outputs`` results and takes ``inputs`` of each dot product at a time.
    """

    max_tokens: int | None
    tokens: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


TILINGS = (
    Tiling(max_tokens=256, tokens=64, outputs=128, inputs=64, num_warps=4, num_stages=4),
    Tiling(max_tokens=None, tokens=128, outputs=128, inputs=64, num_warps=8, num_stages=4),
)
"""For 2-byte inputs."""
FLOAT32_TILINGS = (
    Tiling(max_tokens=16, tokens=16, outputs=32, inputs=32, num_warps=4, num_stages=3),
    Tiling(max_tokens=None, tokens=32, outputs=64, inputs=32, num_warps=4, num_stages=3),
)
"""Without tensor cores, to be exact: registers hold whole operand tiles."""
OUTPUT_TILES_PER_BAND = 8
"""Output tiles whose programs are neighbours and share inputs and codes in the cache."""


def quantized_linear(
    x: Tensor, weight: DeviceWeight, bias: Tensor | None, out: Tensor, tilings: tuple[Tiling, ...] | None = None
) -> None:
    """``out = x @ weight.T + bias``.

    ``x`` ``[T, K]`` and ``out`` ``[T, N]`` in one floating dtype, any row stride; ``bias`` ``[N]`` in that dtype or None.
    The result is rounded once. ``tilings``: instead of those that ship.
    """
    num_tokens = x.shape[0]
    if num_tokens == 0:
        return
    tiling = choose_tiling(num_tokens, weight, x.dtype, tilings)
    values, scales, minima, order = tile_tensors(weight)
    _product[(triton.cdiv(weight.num_outputs, tiling.outputs) * triton.cdiv(num_tokens, tiling.tokens),)](
        x,
        values,
        scales,
        minima,
        order,
        scales if bias is None else bias,
        out,
        x.stride(0),
        out.stride(0),
        num_tokens,
        **product_constants(weight, tiling, has_bias=bias is not None),
        HAS_E4M3=has_e4m3(x.device),
        # Triton's interpreter knows no bfloat16 products; those of float32 are the same.
        WIDE=x.dtype == torch.float32 or not x.is_cuda,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **dependent_launch(x.device),
    )


def choose_tiling(
    num_tokens: int, weight: DeviceWeight, dtype: torch.dtype, tilings: tuple[Tiling, ...] | None = None
) -> Tiling:
    """The first tiling for so many tokens, in steps that fit the weight's groups."""
    tilings = tilings or (FLOAT32_TILINGS if dtype == torch.float32 else TILINGS)
    found = next(tiling for tiling in tilings if tiling.max_tokens is None or num_tokens <= tiling.max_tokens)
    return replace(found, inputs=weight.step(found.inputs))


def product_constants(weight: DeviceWeight, tiling: Tiling, *, has_bias: bool) -> dict[str, int | bool]:
    """The constants of the product's kernel."""
    return tile_constants(weight) | {
        "HAS_BIAS": has_bias,
        "BLOCK_TOKENS": tiling.tokens,
        "BLOCK_OUTPUTS": tiling.outputs,
        "BLOCK_INPUTS": tiling.inputs,
        "BAND": OUTPUT_TILES_PER_BAND,
    }


@triton.jit(do_not_specialize=["num_tokens"])
def _product(
    x,
    values,
    scales,
    minima,
    order,
    bias,
    out,
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
    HAS_BIAS: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    BAND: tl.constexpr,
    PDL: tl.constexpr,
):
    await_grid(PDL)
    token_tile, output_tile = tile_of(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_TOKENS), OUTPUTS, BLOCK_OUTPUTS, BAND)
    tokens = token_tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    outputs = output_tile * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    # Beyond the edge, read the last token and output again: this needs no mask in the loop, and changes no result.
    sums = multiply_tile(
        x + tl.minimum(tokens, num_tokens - 1).to(tl.int64) * x_stride,
        values,
        scales,
        minima,
        order,
        tl.minimum(outputs, OUTPUTS - 1),
        0,
        INPUTS,
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
    results = finished(tl.trans(sums), scales, bias, outputs[None, :], OUTPUTS, SCALED, HAS_BIAS)
    place = out + tokens[:, None].to(tl.int64) * out_stride + outputs[None, :]
    within = (tokens < num_tokens)[:, None] & (outputs < OUTPUTS)[None, :]
    tl.store(place, results.to(out.dtype.element_ty), mask=within)


@triton.jit
def tile_of(program, token_tiles, OUTPUTS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BAND: tl.constexpr):
    """Bands of ``BAND`` output tiles; within a band, token tile after token tile."""
    output_tiles = tl.cdiv(OUTPUTS, BLOCK_OUTPUTS)
    band = program // (BAND * token_tiles)
    within_band = program % (BAND * token_tiles)
    width = tl.minimum(output_tiles - band * BAND, BAND)
    return within_band // width, band * BAND + within_band % width
