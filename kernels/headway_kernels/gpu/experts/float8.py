"""Products of many pairs of tokens and experts, with inputs that are rounded to E4M3 as the experts' weights are.

Owns: which steps are rounded so, the product. Must not know: layers, which weights are meant for it.

Each row of inputs is rounded once, and its codes are gathered for all experts that it meets. A result has the bits of
``float8_linear`` with that expert alone, whatever the tiles.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.dependence import await_grid, dependent_launch
from headway_kernels.gpu.experts.grouped import ExpertPairs, grid_constants, most_tiles
from headway_kernels.gpu.experts.kernels import rows_of_pairs, tile_of_pairs
from headway_kernels.gpu.linear.float8 import (
    FLOAT8_TILINGS,
    multiplies,
    multiply_codes,
    product_constants,
    round_inputs,
    tiling_of,
)
from headway_kernels.gpu.linear.quantized import Tiling
from headway_kernels.gpu.linear.weights import DeviceWeight, finished
from headway_kernels.gpu.tunings import MOST_FEW_TOKENS


def are_many(num_pairs: int, num_experts: int) -> bool:
    """Whether an expert has so many pairs, on average, that reading its weight is not what takes the time."""
    return num_pairs > MOST_FEW_TOKENS * num_experts


def multiply_rounded_pairs(
    x: Tensor,
    weight: DeviceWeight,
    bias: Tensor | None,
    out: Tensor,
    pairs: ExpertPairs,
    workspace: Tensor,
    *,
    gathers: bool,
    tilings: tuple[Tiling, ...] = FLOAT8_TILINGS,
) -> None:
    """As ``multiply_pairs`` with rows that are rounded as ``float8_linear`` rounds them.

    ``workspace``: see ``float8_linear.workspace_size``, for the rows of ``x``. ``tilings`` by the pairs of an expert.
    """
    num_pairs, num_experts = len(pairs.order), len(pairs.ends)
    if num_pairs == 0:
        return
    assert multiplies(weight), "a form that is multiplied in 8 bits"
    # Also rows that no pair has written: nobody reads their codes.
    codes, factors = round_inputs(x, workspace)
    assert weight.scales is not None
    tiling = tiling_of(triton.cdiv(num_pairs, num_experts), tilings)
    _float8_pairs[(most_tiles(pairs, tiling), triton.cdiv(weight.num_outputs, tiling.outputs))](
        codes,
        factors,
        weight.values.view(torch.float8_e4m3fn),
        weight.scales,
        weight.scales if bias is None else bias,
        out,
        pairs.order,
        pairs.ends,
        out.stride(0),
        len(x),
        **product_constants(weight, tiling, has_bias=bias is not None),
        **grid_constants(weight, num_experts, pairs.chosen.shape[1], gathers=gathers),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **dependent_launch(x.device),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _float8_pairs(
    codes,
    factors,
    values,
    scales,
    bias,
    out,
    pair_order,
    ends,
    out_stride,
    num_rows,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROW: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPED: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    GATHERS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of an expert's pairs, of ``num_rows`` rows that were rounded; the grid is that of ``multiply_pairs_kernel``."""
    await_grid(PDL)
    expert, begin, end = tile_of_pairs(tl.program_id(0), ends, NUM_EXPERTS, BLOCK_EXPERTS, BLOCK_TOKENS)
    if begin < end:
        x_places, out_places, within = rows_of_pairs(pair_order, begin, end, NUM_CHOSEN, GATHERS, BLOCK_TOKENS)
        outputs = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
        far = expert.to(tl.int64)
        own_scales = scales + far * (GROUPS * OUTPUTS)
        sums = multiply_codes(
            codes,
            factors,
            values + far * (OUTPUTS * ROW),
            own_scales,
            x_places,
            num_rows,
            tl.program_id(1),
            OUTPUTS,
            INPUTS,
            ROW,
            GROUP,
            GROUPED,
            BLOCK_TOKENS,
            BLOCK_OUTPUTS,
        )
        results = finished(sums, own_scales, bias + far * OUTPUTS, outputs[None, :], OUTPUTS, SCALED, HAS_BIAS)
        place = out + out_places[:, None].to(tl.int64) * out_stride + outputs[None, :]
        tl.store(place, results.to(out.dtype.element_ty), mask=within[:, None] & (outputs < OUTPUTS)[None, :])
