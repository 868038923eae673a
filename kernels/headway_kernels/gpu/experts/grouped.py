"""The kernels of experts: each token chooses some, pairs of token and expert are sorted, and results are added.

Owns: a step's pairs, the launches. Must not know: layers.

A *pair* is a token and one of its experts: number ``token * num_chosen + i``. Sorted, the pairs of an expert lie side by
side, tokens in order, so that a launch goes through tiles of pairs with one expert each, and none is padded in memory
(Gale et al. 2022, MegaBlocks, arXiv 2211.15841). The device knows the counts; the host only bounds the number of tiles.

Nothing is added in an order that chance decides, and one tiling serves any number of tokens: a token's result depends on
its own numbers alone.
"""

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from headway_kernels.gpu.dependence import dependent_launch
from headway_kernels.gpu.experts.kernels import (
    add_pairs_kernel,
    choose_kernel,
    multiply_pairs_kernel,
    sort_pairs_kernel,
    weigh_pairs_kernel,
)
from headway_kernels.gpu.float8 import has_e4m3
from headway_kernels.gpu.linear.quantized import Tiling
from headway_kernels.gpu.linear.weights import DeviceWeight, tile_constants, tile_tensors
from headway_kernels.gpu.tunings import shipped_pair_tiling
from headway_kernels.routing import Routing, Scoring

PAIRS_PER_TURN = 1024
CHANNELS_PER_PROGRAM = 1024
NUM_WARPS = 4


@dataclass(frozen=True, slots=True)
class ExpertPairs:
    """The pairs of a step, for up to ``[T]`` tokens; see ``choose`` and ``sort_pairs``.

    ``chosen`` int32 and ``weights`` float32, ``[T, num_chosen]``; ``order`` int32, ``[T * num_chosen]``; ``ends`` int32,
    ``[num_experts]``.
    """

    chosen: Tensor
    weights: Tensor
    order: Tensor
    ends: Tensor

    @classmethod
    def allocate(cls, max_num_tokens: int, routing: Routing, device: torch.device) -> "ExpertPairs":
        """For as many tokens."""
        shape = (max_num_tokens, routing.num_chosen)
        # Zeros: whatever scores a model gives, numbers here name an expert and a pair.
        return cls(
            chosen=torch.zeros(shape, dtype=torch.int32, device=device),
            weights=torch.zeros(shape, dtype=torch.float32, device=device),
            order=torch.zeros(max_num_tokens * routing.num_chosen, dtype=torch.int32, device=device),
            ends=torch.zeros(routing.num_experts, dtype=torch.int32, device=device),
        )

    def of(self, num_tokens: int) -> "ExpertPairs":
        """Views of the first tokens."""
        num_pairs = num_tokens * self.chosen.shape[1]
        return ExpertPairs(self.chosen[:num_tokens], self.weights[:num_tokens], self.order[:num_pairs], self.ends)


def choose(
    logits: Tensor,
    slots: Tensor,
    correction: Tensor | None,
    pairs: ExpertPairs,
    routing: Routing,
    factors: Tensor | None = None,
) -> None:
    """As ``choose_experts`` of ``headway_kernels.experts``, into ``pairs``; equal scores go to the lower expert.

    ``logits`` floating, ``[T, num_experts or more]``, any row stride; ``slots`` int32, ``[T]``: a token with -1 is padding
    and gets the expert ``num_experts``, which does not exist. ``correction`` and ``factors`` float32, ``[num_experts]``, or None;
    the latter multiply the weights of experts.
    """
    num_tokens = len(logits)
    if num_tokens == 0:
        return
    choose_kernel[(num_tokens,)](
        logits,
        slots,
        logits if correction is None else correction,
        logits if factors is None else factors,
        pairs.chosen,
        pairs.weights,
        logits.stride(0),
        routing.scaling,
        **choice_constants(routing, has_correction=correction is not None, has_factors=factors is not None),
        num_warps=1,
        **dependent_launch(logits.device),
    )


def choice_constants(
    routing: Routing, *, has_correction: bool, has_factors: bool = False
) -> dict[str, int | bool | float]:
    """The constants of the kernel that chooses."""
    size = routing.num_experts // routing.num_groups
    return {
        "NUM_CHOSEN": routing.num_chosen,
        "NUM_GROUPS": routing.num_groups,
        "GROUP_SIZE": size,
        "OPEN_GROUPS": routing.num_open_groups,
        "SCORES_PER_GROUP": routing.scores_per_group,
        "BLOCK_GROUPS": triton.next_power_of_2(routing.num_groups),
        "BLOCK_SIZE": triton.next_power_of_2(size),
        "SIGMOID": routing.scoring is Scoring.SIGMOID,
        "NEAR": routing.scoring is Scoring.NEAR,
        "TOLERANCE": routing.tolerance,
        "NORMALISED": routing.is_normalised,
        "HAS_CORRECTION": has_correction,
        "HAS_FACTORS": has_factors,
        "CORRECTS_OUTPUTS": routing.corrects_outputs,
    }


def sort_pairs(pairs: ExpertPairs) -> None:
    """Write ``pairs.order``: the pairs expert after expert; and ``pairs.ends``: behind each expert's last."""
    sort_pairs_kernel[(len(pairs.ends),)](
        pairs.chosen,
        pairs.order,
        pairs.ends,
        pairs.chosen.numel(),
        BLOCK=PAIRS_PER_TURN,
        num_warps=NUM_WARPS,
        **dependent_launch(pairs.chosen.device),
    )


def multiply_pairs(
    x: Tensor,
    weight: DeviceWeight,
    bias: Tensor | None,
    out: Tensor,
    pairs: ExpertPairs,
    *,
    gathers: bool,
    tiling: Tiling | None = None,
) -> None:
    """Multiply the row of each pair with its expert's weight, and add its bias; ``tiling``: instead of the one that ships.

    ``weight`` has a first dimension of experts; ``bias`` ``[experts, outputs]``, contiguous, or None. If it ``gathers``:
    ``x`` ``[T, inputs]`` has a row for each token, ``out`` ``[pairs, outputs]`` its results in sorted order. Else ``x``
    ``[pairs, inputs]`` is sorted, and ``out`` is in the order of pairs' numbers. One floating dtype, any row stride. Rows
    of padding are not written.
    """
    num_pairs = len(pairs.order)
    if num_pairs == 0:
        return
    tiling = pair_tiling(weight, x.dtype, tiling)
    tiles = most_tiles(pairs, tiling)
    values, scales, minima, order = tile_tensors(weight)
    multiply_pairs_kernel[(tiles, triton.cdiv(weight.num_outputs, tiling.outputs))](
        x,
        values,
        scales,
        minima,
        order,
        scales if bias is None else bias,
        out,
        pairs.order,
        pairs.ends,
        x.stride(0),
        out.stride(0),
        **pair_constants(
            weight, tiling, len(pairs.ends), pairs.chosen.shape[1], has_bias=bias is not None, gathers=gathers
        ),
        HAS_E4M3=has_e4m3(x.device),
        WIDE=x.dtype == torch.float32 or not x.is_cuda,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **dependent_launch(x.device),
    )


def pair_tiling(weight: DeviceWeight, dtype: torch.dtype, tiling: Tiling | None = None) -> Tiling:
    """One for any number of pairs, in steps that fit the weight's groups."""
    tiling = tiling or shipped_pair_tiling(dtype)
    return replace(tiling, inputs=weight.step(tiling.inputs))


def pair_constants(
    weight: DeviceWeight, tiling: Tiling, num_experts: int, num_chosen: int, *, has_bias: bool, gathers: bool
) -> dict[str, int | bool]:
    """The constants of the product's kernel."""
    return {
        **tile_constants(weight),
        **grid_constants(weight, num_experts, num_chosen, gathers=gathers),
        "HAS_BIAS": has_bias,
        "BLOCK_TOKENS": tiling.tokens,
        "BLOCK_OUTPUTS": tiling.outputs,
        "BLOCK_INPUTS": tiling.inputs,
    }


def grid_constants(weight: DeviceWeight, num_experts: int, num_chosen: int, *, gathers: bool) -> dict[str, int | bool]:
    """The constants by which a grid goes through experts."""
    return {
        "GROUPS": weight.num_groups,
        "NUM_EXPERTS": num_experts,
        "BLOCK_EXPERTS": triton.next_power_of_2(num_experts),
        "NUM_CHOSEN": num_chosen,
        "GATHERS": gathers,
    }


def most_tiles(pairs: ExpertPairs, tiling: Tiling) -> int:
    """The tiles that the pairs of all experts may need."""
    num_pairs = len(pairs.order)
    return num_pairs // tiling.tokens + min(len(pairs.ends), num_pairs)


def weigh_pairs(rows: Tensor, pairs: ExpertPairs) -> None:
    """Multiply the row of each pair by its weight, in place: ``rows`` floating, ``[pairs, C]``, sorted, any row stride."""
    num_pairs, width = rows.shape
    if num_pairs == 0:
        return
    weigh_pairs_kernel[(num_pairs, triton.cdiv(width, CHANNELS_PER_PROGRAM))](
        rows,
        pairs.order,
        pairs.weights,
        rows.stride(0),
        WIDTH=width,
        BLOCK=CHANNELS_PER_PROGRAM,
        num_warps=NUM_WARPS,
        **dependent_launch(rows.device),
    )


def add_pairs(
    given: Tensor,
    pairs: ExpertPairs,
    out: Tensor,
    *,
    shared: Tensor | None,
    gates: Tensor | None,
    weighs: bool = True,
) -> None:
    """``out`` = the results of each token's pairs, first to last, then ``shared`` times the sigmoid of ``gates``.

    ``given`` ``[T * num_chosen, C]``, ``out`` and ``shared`` (or None) ``[T, C]``, one dtype, any row stride; ``gates``
    floating, ``[T]``, any stride, or None: 1. If it ``weighs``, results are multiplied by the weights of their pairs. Sums
    are float32, rounded once. Padding gets zeros, and what is shared.
    """
    num_tokens, width = out.shape
    if num_tokens == 0:
        return
    add_pairs_kernel[(num_tokens, triton.cdiv(width, CHANNELS_PER_PROGRAM))](
        given,
        pairs.chosen,
        pairs.weights,
        out if shared is None else shared,
        out if gates is None else gates,
        out,
        given.stride(0),
        0 if shared is None else shared.stride(0),
        0 if gates is None else gates.stride(0),
        out.stride(0),
        WIDTH=width,
        NUM_EXPERTS=len(pairs.ends),
        NUM_CHOSEN=pairs.chosen.shape[1],
        WEIGHS=weighs,
        HAS_SHARED=shared is not None,
        HAS_GATE=gates is not None,
        BLOCK=CHANNELS_PER_PROGRAM,
        num_warps=NUM_WARPS,
        **dependent_launch(out.device),
    )
