"""Low-rank additions to products, of which each token has its own (LoRA, Hu et al. 2021, arXiv 2106.09685).

Owns: how tokens find their matrices, both products. Must not know: layers, files, who has which adapter.

As in Punica (Chen et al. 2023, arXiv 2310.18547), one launch serves all adapters of a step. Tokens of one adapter stand
in *tiles*. A tile has the address of its adapter's *table*, which has the addresses of the matrices: so a recorded
launch reads whichever adapters a step has. All is float32. The inputs' width alone decides how sums are cut into
splits, which are added first to last: a token's result does not depend on its company.
"""

import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.dependence import await_grid, dependent_launch

TILE = 16
"""Tokens of a tile."""
ENTRY = 3
"""Numbers of a site in a table: the addresses of ``down`` and ``up``, and the rank; 0: nothing is added."""
SPLIT_INPUTS = 1024
BLOCK_INPUTS = 64
BLOCK_RANK = 16
BLOCK_OUTPUTS = 128
NUM_WARPS = 4

_TILE = tl.constexpr(TILE)
_ENTRY = tl.constexpr(ENTRY)


def most_tiles(num_tokens: int, num_adapters: int) -> int:
    """The tiles of so many tokens with so many adapters, at most."""
    return min(num_tokens, num_tokens // TILE + num_adapters)


def workspace_size(num_tokens: int, num_inputs: int, rank: int) -> int:
    """Elements of ``workspace`` for additions of up to ``rank``."""
    splits: int = triton.cdiv(num_inputs, SPLIT_INPUTS)
    return splits * num_tokens * rank


def add_low_rank(
    x: Tensor, out: Tensor, tables: Tensor, tokens: Tensor, workspace: Tensor, *, site: int, most_rank: int
) -> None:
    """``out += (x @ down.T) @ up.T`` of each token that a tile has, rounded once.

    ``x`` ``[T, K]`` and ``out`` ``[T, N]``, floating, any row stride. ``tables`` int64, ``[tiles]``: the address of a
    table, int64, ``[sites, ENTRY]``; 0: the tile is empty. ``tokens`` int32, ``[tiles, TILE]``, -1 for none; no token
    occurs twice. ``down`` ``[rank, K]`` and ``up`` ``[N, rank]`` float32, contiguous, with ranks up to ``most_rank``.
    ``workspace`` float32: see ``workspace_size``.
    """
    _add(x[:, None], out[:, None], tables, tokens, workspace, site, most_rank, own_downs=False, own_ups=False)


def add_low_rank_of_heads(
    x: Tensor,
    out: Tensor,
    tables: Tensor,
    tokens: Tensor,
    workspace: Tensor,
    *,
    site: int,
    most_rank: int,
    own_downs: bool,
) -> None:
    """The same of each head: ``x`` ``[T, heads, K]`` and ``out`` ``[T, heads, N]``, any strides of tokens and heads.

    With ``own_downs``, each head has a ``down``, ``[heads, rank, K]``, and all share ``up``; else it is the other way round. The
    ``workspace`` is that of ``T * heads`` tokens.
    """
    _add(x, out, tables, tokens, workspace, site, most_rank, own_downs=own_downs, own_ups=not own_downs)


def _add(
    x: Tensor,
    out: Tensor,
    tables: Tensor,
    tokens: Tensor,
    workspace: Tensor,
    site: int,
    most_rank: int,
    *,
    own_downs: bool,
    own_ups: bool,
) -> None:
    (num_tokens, num_heads, num_inputs), num_outputs = x.shape, out.shape[2]
    assert workspace.numel() >= workspace_size(num_tokens * num_heads, num_inputs, most_rank), "it holds all splits"
    assert x.stride(2) == out.stride(2) == 1, "rows may lie apart, elements not"
    splits = triton.cdiv(num_inputs, SPLIT_INPUTS)
    constants = {"RANK_STRIDE": most_rank, "BLOCK_RANK": BLOCK_RANK, "NUM_HEADS": num_heads}
    _shrink[(len(tables), splits, num_heads)](
        tables,
        tokens,
        x,
        workspace,
        x.stride(0),
        x.stride(1),
        num_tokens,
        site,
        INPUTS=num_inputs,
        SPLIT_INPUTS=SPLIT_INPUTS,
        BLOCK_INPUTS=BLOCK_INPUTS,
        OWN_DOWNS=own_downs,
        **constants,
        num_warps=NUM_WARPS,
        **dependent_launch(x.device),
    )
    _expand[(len(tables), triton.cdiv(num_outputs, BLOCK_OUTPUTS), num_heads)](
        tables,
        tokens,
        workspace,
        out,
        out.stride(0),
        out.stride(1),
        num_tokens,
        site,
        OUTPUTS=num_outputs,
        SPLITS=splits,
        BLOCK_OUTPUTS=BLOCK_OUTPUTS,
        OWN_UPS=own_ups,
        **constants,
        num_warps=NUM_WARPS,
        **dependent_launch(x.device),
    )


@triton.jit(do_not_specialize=["num_tokens", "site"])
def _shrink(
    tables,
    tokens,
    x,
    workspace,
    x_stride,
    x_head_stride,
    num_tokens,
    site,
    INPUTS: tl.constexpr,
    SPLIT_INPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    OWN_DOWNS: tl.constexpr,
    RANK_STRIDE: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A split of a tile's inputs, times ``down``: ``workspace`` ``[splits, tokens, heads, RANK_STRIDE]``."""
    await_grid(PDL)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    head = tl.program_id(2)
    table = tl.load(tables + tile)
    if table != 0:
        entry = table.to(tl.pointer_type(tl.int64)) + site * _ENTRY
        down = tl.load(entry).to(tl.pointer_type(tl.float32))
        rank = tl.load(entry + 2).to(tl.int32)
        if OWN_DOWNS:
            down += head.to(tl.int64) * rank * INPUTS
        token = tl.load(tokens + tile * _TILE + tl.arange(0, _TILE)).to(tl.int64)
        rows = x + token * x_stride + head * x_head_stride
        parts = workspace + ((split * num_tokens + token) * NUM_HEADS + head) * RANK_STRIDE
        for first in range(0, rank, BLOCK_RANK):
            ranks = first + tl.arange(0, BLOCK_RANK)
            sums = tl.zeros((_TILE, BLOCK_RANK), dtype=tl.float32)
            for start in range(split * SPLIT_INPUTS, tl.minimum((split + 1) * SPLIT_INPUTS, INPUTS), BLOCK_INPUTS):
                inputs = start + tl.arange(0, BLOCK_INPUTS)
                within = inputs < INPUTS
                own = tl.load(rows[:, None] + inputs[None, :], mask=(token >= 0)[:, None] & within[None, :], other=0.0)
                weights = tl.load(
                    down + ranks[None, :].to(tl.int64) * INPUTS + inputs[:, None],
                    mask=(ranks < rank)[None, :] & within[:, None],
                    other=0.0,
                )
                sums = tl.dot(own.to(tl.float32), weights, sums, input_precision="ieee")
            tl.store(parts[:, None] + ranks[None, :], sums, mask=(token >= 0)[:, None] & (ranks < rank)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "site"])
def _expand(
    tables,
    tokens,
    workspace,
    out,
    out_stride,
    out_head_stride,
    num_tokens,
    site,
    OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    OWN_UPS: tl.constexpr,
    RANK_STRIDE: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """What ``_shrink`` gave, times ``up``, added to some outputs of a tile."""
    await_grid(PDL)
    tile = tl.program_id(0)
    head = tl.program_id(2)
    table = tl.load(tables + tile)
    if table != 0:
        entry = table.to(tl.pointer_type(tl.int64)) + site * _ENTRY
        up = tl.load(entry + 1).to(tl.pointer_type(tl.float32))
        rank = tl.load(entry + 2).to(tl.int32)
        token = tl.load(tokens + tile * _TILE + tl.arange(0, _TILE)).to(tl.int64)
        outputs = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
        if OWN_UPS:
            up += head.to(tl.int64) * rank * OUTPUTS
        if rank > 0:
            sums = tl.zeros((_TILE, BLOCK_OUTPUTS), dtype=tl.float32)
            for first in range(0, rank, BLOCK_RANK):
                ranks = first + tl.arange(0, BLOCK_RANK)
                own = (token >= 0)[:, None] & (ranks < rank)[None, :]
                inner = tl.zeros((_TILE, BLOCK_RANK), dtype=tl.float32)
                for split in tl.static_range(SPLITS):
                    parts = workspace + ((split * num_tokens + token) * NUM_HEADS + head) * RANK_STRIDE
                    inner += tl.load(parts[:, None] + ranks[None, :], mask=own, other=0.0)
                weights = tl.load(
                    up + outputs[None, :].to(tl.int64) * rank + ranks[:, None],
                    mask=(ranks < rank)[:, None] & (outputs < OUTPUTS)[None, :],
                    other=0.0,
                )
                sums = tl.dot(inner, weights, sums, input_precision="ieee")
            place = out + (token * out_stride + head * out_head_stride)[:, None] + outputs[None, :]
            within = (token >= 0)[:, None] & (outputs < OUTPUTS)[None, :]
            before = tl.load(place, mask=within, other=0.0).to(tl.float32)
            tl.store(place, (before + sums).to(out.dtype.element_ty), mask=within)
