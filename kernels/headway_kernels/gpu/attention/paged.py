"""Attention over paged keys and values, in Triton: chunks and decodes of one batch in any mix.

Owns: a step's rows and scratch memory, the launches. Must not know: layers, requests.

A *row* is the new tokens of one sequence: one token is a *decode*, several are a *chunk*, none is *padding*. One turn
of a kernel's inner loop reads a *key tile*. One program attends with a *query tile* of a chunk, or reads a *split* of a
decode's positions.

Sources: tiles with a running softmax, Dao et al. 2022 (FlashAttention, arXiv 2205.14135), its running maximum Milakov &
Gimelshein 2018 (arXiv 1805.02867); one rescaling at the end, and masks on edge tiles only, Dao 2023 (FlashAttention-2,
arXiv 2307.08691); decodes cut along the positions, Dao, Haziza, Massa & Sizov 2023 (Flash-Decoding); blocks found
through a table, Kwon et al. 2023 (PagedAttention, arXiv 2309.06180).

A row's own tokens and ``kv_length`` alone decide its cuts and its result; sums run in the order of positions. The
device reads the lengths, so a captured launch serves other lengths.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway_kernels.gpu.attention.kernels import chunk_kernel, decode_kernel, plan_kernel
from headway_kernels.gpu.attention.tiles import BY_DISTANCE, BY_PLACE, LOG2_E, MAX_SPLITS, MIN_SPLIT
from headway_kernels.gpu.attention.tuning import (
    AttentionTuning,
    KernelTuning,
    attention_tuning,
    padded_rows,
    power_of_two,
    tile_sizes,
)
from headway_kernels.gpu.dependence import dependent_launch
from headway_kernels.gpu.float8 import has_e4m3
from headway_kernels.kv_codes import is_coded

MOST_ITEMS = 2048
"""Decode items of a step, about: five for each program of an H100 or H200."""
_ANY_NUMBER = 1 << 30
_DOT_ROWS = 16
"""The least size of a dimension of ``tl.dot``."""


@dataclass(frozen=True)
class AttentionRows:
    """The rows of one step on the device: int32, contiguous but for the row stride of ``block_tables``.

    - ``rows`` ``[R]``: rows of ``block_tables``.
    - ``query_start`` ``[R + 1]``: row i has tokens ``query_start[i]`` up to ``query_start[i + 1]``; padding has none.
    - ``kv_length`` ``[R]``: the positions after this step; 0: nothing attends with the row's tokens here.
    - ``block_tables`` ``[max_rows, max_blocks]``: those past ``kv_length`` are not read.
    - ``split_ends``, ``tile_ends`` ``[R]``: running counts of items, from ``plan_attention``.
    - ``splits_per_item`` ``[1]``: from ``plan_attention``.
    """

    rows: Tensor
    query_start: Tensor
    kv_length: Tensor
    block_tables: Tensor
    split_ends: Tensor
    tile_ends: Tensor
    splits_per_item: Tensor
    tokens_per_tile: int


class Slopes(NamedTuple):
    """By how much logits fall with the distance of a key (ALiBi: Press et al. 2021, arXiv 2108.12409), behind their scale.

    ``of_heads`` float32, ``[heads]``. If it ``is_rounded``, logits grow with the place of a key instead, before their scale;
    slopes, places and their products are rounded to bfloat16.
    """

    of_heads: Tensor
    is_rounded: bool = False


@dataclass(frozen=True)
class AttentionWorkspace:
    """Partial results of splits, float32, shared by all layers.

    ``partial`` ``[R, MAX_SPLITS, heads, head_dim]``, ``log_sum_exp`` ``[R, MAX_SPLITS, heads]`` (to base 2). ``arrived``
    int32, ``[R, heads]``: zeros between launches.
    """

    partial: Tensor
    log_sum_exp: Tensor
    arrived: Tensor

    @classmethod
    def allocate(cls, max_rows: int, num_heads: int, head_dim: int, device: torch.device) -> "AttentionWorkspace":
        """Takes 268 MB for 1024 rows of 32 heads of 128."""
        shape = (max_rows, MAX_SPLITS.value, num_heads)
        return cls(
            partial=torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
            log_sum_exp=torch.empty(shape, dtype=torch.float32, device=device),
            arrived=torch.zeros((max_rows, num_heads), dtype=torch.int32, device=device),
        )

    def of(self, num_heads: int, head_dim: int) -> "AttentionWorkspace":
        """The same memory for layers of no more heads, each of no more channels."""
        shape = (len(self.arrived), MAX_SPLITS.value, num_heads)
        return AttentionWorkspace(
            partial=_begin_of(self.partial, *shape, head_dim),
            log_sum_exp=_begin_of(self.log_sum_exp, *shape),
            arrived=_begin_of(self.arrived, len(self.arrived), num_heads),
        )


def _begin_of(memory: Tensor, *shape: int) -> Tensor:
    return memory.view(-1)[: math.prod(shape)].view(shape)


def plan_attention(rows: AttentionRows, num_kv_heads: int, *, most_tokens: int | None = None) -> None:
    """Count items and query tiles once per step; none of a row of more than ``most_tokens``, which is not attended with.

    A window may leave the last items of a row nothing to do.
    """
    (num_rows,) = rows.rows.shape
    plan_kernel[(1,)](
        rows.query_start,
        rows.kv_length,
        rows.split_ends,
        rows.tile_ends,
        rows.splits_per_item,
        num_rows,
        MOST_ITEMS=max(MOST_ITEMS // num_kv_heads, 1),
        MOST_TOKENS=most_tokens or _ANY_NUMBER,
        TOKENS_PER_TILE=rows.tokens_per_tile,
        PADDED_ROWS=padded_rows(num_rows),
        num_warps=4,
        **dependent_launch(rows.rows.device),
    )


def paged_attention(
    query: Tensor,
    pool_layer: Tensor,
    out: Tensor,
    rows: AttentionRows,
    workspace: AttentionWorkspace,
    *,
    num_kv_heads: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Slopes | None = None,
    num_shared: int = 0,
    has_decodes: bool = True,
    has_chunks: bool = True,
    tuning: AttentionTuning | None = None,
) -> None:
    """Attend with all tokens of a step over one layer's pool, which already holds their keys and values.

    ``query`` and ``out`` ``[tokens, heads * head_dim]``, any row stride; padding is not written. ``pool_layer``
    ``[num_blocks, 2 * num_kv_heads, block_size, head_dim]``, key heads first, block_size a power of two; blocks are contiguous,
    and may lie apart; unused positions may hold NaN. One dtype: float32, bfloat16 or float16; head_dim a multiple of 8. The pool may hold codes
    instead: see ``headway_kernels.kv_codes``.

    With ``num_shared``, a position has one vector, ``[num_blocks, 1, block_size, num_shared + head_dim]``, as wide as a query's
    heads: their key, and behind its first ``num_shared`` channels their value (DeepSeek-AI 2024, arXiv 2405.04434). Then
    ``num_kv_heads`` are groups of heads that programs attend with: see ``latent_groups``.

    A token sees the last ``window`` positions up to its own, or all. Logits are ``scale`` (more than 0) times the
    product, perhaps capped to ``soft_cap * tanh(logit / soft_cap)``. ``sinks`` (float32, ``[heads]``) are logits without
    values (Xiao et al. 2023, arXiv 2309.17453), neither scaled nor capped. With ``slopes`` there is no
    cap. Everything is float32, but weights are rounded to the dtype before they meet the values.
    """
    num_heads, head_dim = _check(query, pool_layer, out, rows, num_kv_heads, num_shared, scale)
    sizes = tile_sizes(head_dim, query.dtype, is_coded=is_coded(pool_layer), is_latent=num_shared > 0)
    tuning = tuning or attention_tuning(query.device, sizes)
    constants = {
        "GROUP": num_heads // num_kv_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "BLOCK_SIZE": pool_layer.shape[2],
        "BLOCK_STRIDE": pool_layer.stride(0),
        "HEAD_DIM": head_dim,
        "PADDED_HEAD_DIM": max(_DOT_ROWS, power_of_two(head_dim)),
        "SHARED": num_shared,
        "PADDED_SHARED": max(_DOT_ROWS, power_of_two(num_shared)),
        "CODED": int(is_coded(pool_layer)),
        "HAS_E4M3": has_e4m3(pool_layer.device),
        "PADDED_ROWS": padded_rows(rows.rows.shape[0]),
        "HAS_WINDOW": window is not None,
        "HAS_SOFT_CAP": soft_cap is not None,
        "HAS_SINKS": sinks is not None,
        "ALIBI": 0 if slopes is None else (BY_PLACE if slopes.is_rounded else BY_DISTANCE).value,
    }
    assert slopes is None or soft_cap is None, "no model has both"
    # The kernels' exponentials are to base 2; under a cap, tanh comes between the two factors.
    factor, cap = (scale * LOG2_E.value, 0.0) if soft_cap is None else (scale / soft_cap, soft_cap * LOG2_E.value)
    of_heads = (rows.rows if sinks is None else sinks, rows.rows if slopes is None else slopes.of_heads)
    numbers = (query.stride(0), out.stride(0), rows.block_tables.stride(0), window or 0, factor, cap)
    if has_chunks:
        _attend_chunks(query, pool_layer, of_heads, out, rows, numbers, constants, tuning.chunk)
    if has_decodes:
        _attend_decodes(query, pool_layer, of_heads, out, rows, workspace, numbers, constants, tuning.decode)


def _check(
    query: Tensor,
    pool_layer: Tensor,
    out: Tensor,
    rows: AttentionRows,
    num_kv_heads: int,
    num_shared: int,
    scale: float,
) -> tuple[int, int]:
    _, pool_heads, block_size, width = pool_layer.shape
    of_block = (block_size * width, width, 1)
    vector_dim = width - is_coded(pool_layer)
    num_heads, head_dim = query.shape[1] // vector_dim, vector_dim - num_shared
    assert pool_heads == (1 if num_shared else 2 * num_kv_heads), (
        "the pool holds key heads, then value heads, or one vector"
    )
    assert query.shape[1] == num_heads * vector_dim, "queries are whole heads"
    assert out.shape[1] == num_heads * head_dim, "outputs are whole heads"
    assert num_heads % num_kv_heads == 0, "heads come in whole groups"
    assert query.dtype == out.dtype, "one dtype"
    assert is_coded(pool_layer) or query.dtype == pool_layer.dtype, "numbers are of that dtype"
    assert query.stride(1) == out.stride(1) == rows.block_tables.stride(1) == 1, "rows may lie apart, elements not"
    assert pool_layer.stride()[1:] == of_block, "blocks may lie apart, their elements not"
    assert block_size == power_of_two(block_size), "blocks hold a power of two of positions"
    assert scale > 0, "maxima are taken before scaling"
    return num_heads, head_dim


def _attend_chunks(
    query: Tensor,
    pool_layer: Tensor,
    of_heads: tuple[Tensor, Tensor],
    out: Tensor,
    rows: AttentionRows,
    numbers: tuple[float, ...],
    constants: dict[str, Any],
    tuning: KernelTuning,
) -> None:
    # The plan's tokens decide the size of the tile, not the tuning.
    chunk_kernel[(_num_programs(query.device, tuning),)](
        query,
        pool_layer,
        *of_heads,
        out,
        rows.rows,
        rows.query_start,
        rows.kv_length,
        rows.block_tables,
        rows.tile_ends,
        rows.rows.shape[0],
        *numbers,
        **constants,
        TOKENS=rows.tokens_per_tile,
        QUERY_TILE=max(_DOT_ROWS, power_of_two(rows.tokens_per_tile * constants["GROUP"])),
        KEY_TILE=tuning.key_tile,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **dependent_launch(query.device),
    )


def _attend_decodes(
    query: Tensor,
    pool_layer: Tensor,
    of_heads: tuple[Tensor, Tensor],
    out: Tensor,
    rows: AttentionRows,
    workspace: AttentionWorkspace,
    numbers: tuple[float, ...],
    constants: dict[str, Any],
    tuning: KernelTuning,
) -> None:
    (num_rows,) = rows.rows.shape
    num_heads, head_dim = constants["GROUP"] * constants["NUM_KV_HEADS"], constants["HEAD_DIM"]
    assert workspace.partial.shape[0] >= num_rows, "the workspace holds as many rows"
    assert workspace.partial.shape[2:] == (num_heads, head_dim), "the workspace is of another model"
    assert tuning.key_tile <= MIN_SPLIT.value, "every split has a key tile"
    decode_kernel[(_num_programs(query.device, tuning),)](
        query,
        pool_layer,
        *of_heads,
        out,
        workspace.partial,
        workspace.log_sum_exp,
        workspace.arrived,
        rows.rows,
        rows.query_start,
        rows.kv_length,
        rows.block_tables,
        rows.split_ends,
        rows.splits_per_item,
        num_rows,
        *numbers,
        **constants,
        QUERY_TILE=max(_DOT_ROWS, tuning.query_tile, power_of_two(constants["GROUP"])),
        KEY_TILE=tuning.key_tile,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        maxnreg=tuning.max_registers,
        **dependent_launch(query.device),
    )


def _num_programs(device: torch.device, tuning: KernelTuning) -> int:
    return tuning.programs_per_multiprocessor * _num_multiprocessors(device)


@cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
