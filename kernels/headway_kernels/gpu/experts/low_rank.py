"""Low-rank additions to products of experts: of each pair of token and expert, by its token's adapter.

Owns: how pairs find their matrices, both products. Must not know: layers, files, who has which adapter.

Only the device knows which pairs there are, so a launch goes through the pairs one by one, not through tiles of them; see
``experts`` for pairs and ``low_rank`` for tables. A pair's result depends on its own numbers alone.
"""

import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.dependence import await_grid, dependent_launch
from headway_kernels.gpu.experts.grouped import ExpertPairs
from headway_kernels.gpu.linear.low_rank import BLOCK_INPUTS, BLOCK_RANK, ENTRY, NUM_WARPS, SPLIT_INPUTS, workspace_size

BLOCK_OUTPUTS = 128

_ENTRY = tl.constexpr(ENTRY)


def add_low_rank_of_pairs(
    x: Tensor,
    out: Tensor,
    tables: Tensor,
    pairs: ExpertPairs,
    workspace: Tensor,
    *,
    site: int,
    most_rank: int,
    gathers: bool,
) -> None:
    """``out += (x @ down.T) @ up.T`` of each pair whose token has an adapter, rounded once.

    ``x``, ``out``, ``pairs`` and ``gathers`` as of ``multiply_pairs``. ``tables`` int64, ``[T]``: the address of a table, or
    0. Of the site, it has the addresses of ``down`` ``[experts, rank, inputs]`` and ``up`` ``[experts, outputs, rank]``,
    float32, contiguous. ``workspace`` float32: two launches for as many pairs as it is the ``workspace_size`` of.
    """
    num_pairs, num_inputs, num_outputs = len(pairs.order), x.shape[1], out.shape[1]
    splits = triton.cdiv(num_inputs, SPLIT_INPUTS)
    at_once = workspace.numel() // workspace_size(1, num_inputs, most_rank)
    found = (tables, pairs.chosen, pairs.order, pairs.ends)
    constants = {
        "NUM_EXPERTS": len(pairs.ends),
        "NUM_CHOSEN": pairs.chosen.shape[1],
        "GATHERS": gathers,
        "RANK_STRIDE": most_rank,
        "BLOCK_RANK": BLOCK_RANK,
    }
    for first in range(0, num_pairs, at_once):
        num_launched = min(at_once, num_pairs - first)
        _shrink_pairs[(num_launched, splits)](
            *found,
            x,
            workspace,
            x.stride(0),
            first,
            at_once,
            site,
            INPUTS=num_inputs,
            SPLIT_INPUTS=SPLIT_INPUTS,
            BLOCK_INPUTS=BLOCK_INPUTS,
            **constants,
            num_warps=NUM_WARPS,
            **dependent_launch(x.device),
        )
        _expand_pairs[(num_launched, triton.cdiv(num_outputs, BLOCK_OUTPUTS))](
            *found,
            workspace,
            out,
            out.stride(0),
            first,
            at_once,
            site,
            OUTPUTS=num_outputs,
            SPLITS=splits,
            BLOCK_OUTPUTS=BLOCK_OUTPUTS,
            **constants,
            num_warps=NUM_WARPS,
            **dependent_launch(x.device),
        )


@triton.jit
def _entry_of(tables, order, ends, place, site, NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr):
    """Of the pair in a place: its number, and the address of its adapter's entry for the site, 0 without one."""
    is_real = place < tl.load(ends + NUM_EXPERTS - 1)
    pair = tl.load(order + place, mask=is_real, other=0)
    table = tl.load(tables + pair // NUM_CHOSEN, mask=is_real, other=0)
    return pair, tl.where(table != 0, table + site * (_ENTRY * 8), 0)


# Tables of small steps are a slice of packed memory, those of large ones are not: neither may need its own variant.
@triton.jit(do_not_specialize=["first", "at_once", "site"], do_not_specialize_on_alignment=["tables"])
def _shrink_pairs(
    tables,
    chosen,
    order,
    ends,
    x,
    workspace,
    x_stride,
    first,
    at_once,
    site,
    INPUTS: tl.constexpr,
    SPLIT_INPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    GATHERS: tl.constexpr,
    RANK_STRIDE: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A split of a pair's inputs, times ``down``: ``workspace`` ``[splits, at_once, RANK_STRIDE]``, of pairs from ``first`` on."""
    await_grid(PDL)
    own_place = tl.program_id(0).to(tl.int64)
    place = first + own_place
    split = tl.program_id(1)
    pair, address = _entry_of(tables, order, ends, place, site, NUM_EXPERTS, NUM_CHOSEN)
    if address != 0:
        entry = address.to(tl.pointer_type(tl.int64))
        rank = tl.load(entry + 2).to(tl.int32)
        if rank > 0:
            expert = tl.load(chosen + pair).to(tl.int64)
            down = tl.load(entry).to(tl.pointer_type(tl.float32)) + expert * rank * INPUTS
            row = x + (pair // NUM_CHOSEN if GATHERS else place) * x_stride
            parts = workspace + (split * at_once + own_place) * RANK_STRIDE
            for begin in range(0, rank, BLOCK_RANK):
                ranks = begin + tl.arange(0, BLOCK_RANK)
                sums = tl.zeros((BLOCK_RANK,), dtype=tl.float32)
                for start in range(split * SPLIT_INPUTS, tl.minimum((split + 1) * SPLIT_INPUTS, INPUTS), BLOCK_INPUTS):
                    inputs = start + tl.arange(0, BLOCK_INPUTS)
                    own = tl.load(row + inputs, mask=inputs < INPUTS, other=0.0).to(tl.float32)
                    weights = tl.load(
                        down + ranks[:, None].to(tl.int64) * INPUTS + inputs[None, :],
                        mask=(ranks < rank)[:, None] & (inputs < INPUTS)[None, :],
                        other=0.0,
                    )
                    sums += tl.sum(weights * own[None, :], 1)
                tl.store(parts + ranks, sums, mask=ranks < rank)


@triton.jit(do_not_specialize=["first", "at_once", "site"], do_not_specialize_on_alignment=["tables"])
def _expand_pairs(
    tables,
    chosen,
    order,
    ends,
    workspace,
    out,
    out_stride,
    first,
    at_once,
    site,
    OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    GATHERS: tl.constexpr,
    RANK_STRIDE: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    PDL: tl.constexpr,
):
    """What ``_shrink_pairs`` gave, times ``up``, added to some outputs of a pair."""
    await_grid(PDL)
    own_place = tl.program_id(0).to(tl.int64)
    place = first + own_place
    pair, address = _entry_of(tables, order, ends, place, site, NUM_EXPERTS, NUM_CHOSEN)
    if address != 0:
        entry = address.to(tl.pointer_type(tl.int64))
        rank = tl.load(entry + 2).to(tl.int32)
        if rank > 0:
            expert = tl.load(chosen + pair).to(tl.int64)
            up = tl.load(entry + 1).to(tl.pointer_type(tl.float32)) + expert * OUTPUTS * rank
            outputs = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
            sums = tl.zeros((BLOCK_OUTPUTS,), dtype=tl.float32)
            for begin in range(0, rank, BLOCK_RANK):
                ranks = begin + tl.arange(0, BLOCK_RANK)
                inner = tl.zeros((BLOCK_RANK,), dtype=tl.float32)
                for split in tl.static_range(SPLITS):
                    parts = workspace + (split * at_once + own_place) * RANK_STRIDE
                    inner += tl.load(parts + ranks, mask=ranks < rank, other=0.0)
                weights = tl.load(
                    up + outputs[:, None].to(tl.int64) * rank + ranks[None, :],
                    mask=(outputs < OUTPUTS)[:, None] & (ranks < rank)[None, :],
                    other=0.0,
                )
                sums += tl.sum(weights * inner[None, :], 1)
            row = out + (place if GATHERS else pair.to(tl.int64)) * out_stride
            before = tl.load(row + outputs, mask=outputs < OUTPUTS, other=0.0).to(tl.float32)
            tl.store(row + outputs, (before + sums).to(out.dtype.element_ty), mask=outputs < OUTPUTS)
