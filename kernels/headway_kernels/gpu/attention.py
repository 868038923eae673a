"""Attention over paged keys and values, in Triton: chunks and decodes of one batch, whatever the mix.

Owns: how a batch is cut into tiles and splits, the kernels that attend, and their tile sizes. Must not know: layers,
projections, rotations, requests, or who wrote the pool.

Words: a *row* is one batch row's new tokens, all of one sequence. A row of one token is a *decode*, one of several a
*chunk*, one of none *padding*. A *key tile* is what one turn of a kernel's inner loop reads, a *query tile* the tokens
of one chunk that one program attends with, a *split* the positions of one decode that one program reads.

What comes from where: tiles with a running softmax, Dao et al. 2022 (FlashAttention, arXiv 2205.14135), its running
maximum Milakov & Gimelshein 2018 (arXiv 1805.02867); rescaling once at the end and masks on edge tiles alone, Dao 2023
(FlashAttention-2, arXiv 2307.08691); decodes cut along the positions and put together from their log-sum-exps, Dao,
Haziza, Massa & Sizov 2023 (Flash-Decoding); blocks found through a table, Kwon et al., SOSP 2023 (PagedAttention,
arXiv 2309.06180).

What a row gets depends on nothing but its own tokens, ``query_start`` differences and ``kv_length``: cuts are made from
the row's own lengths, and sums run in the order of positions. Neither the rest of the batch nor the number of programs
changes a bit. Grids are fixed on the host and how much there is to do is read on the device, so that a launch can be
captured in a CUDA graph and replayed over other lengths.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_SPLIT = tl.constexpr(256)
"""Positions that a split of a decode has at least: fewer would not pay for putting them together."""
MAX_SPLITS = tl.constexpr(16)
"""Splits that a decode has at most: 16 of each key-value head occupy a large GPU with a single sequence."""
SPLIT_MULTIPLE = tl.constexpr(128)
"""Splits start at multiples of this many positions; every key tile of the decode kernel divides it."""

_LOG2_E = tl.constexpr(math.log2(math.e))
_LEAST = tl.constexpr(-1.0e30)
"""Where a running maximum starts: finite, so that a tile that a query sees nothing of leaves no NaN (-inf - -inf)."""
_NEVER = tl.constexpr(2**31 - 1)
_DOT_ROWS = 16
"""What ``tl.dot`` asks of every dimension at least."""


@dataclass(frozen=True)
class KernelTuning:
    """How one kernel is cut: nothing of it changes results by more than rounding.

    ``query_tile``: query vectors (tokens times heads of one group) of a program, a power of two, 16 at least; the
    decode kernel takes a whole group and more only as padding. ``key_tile``: positions of one turn, a power of two
    from 16 (in the decode kernel to 128). ``num_stages``: key tiles in the pipeline, that of this turn included.
    ``programs_per_multiprocessor``: how many the grid holds for each, at best as many as fit by shared memory and
    registers.
    """

    query_tile: int
    key_tile: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int


@dataclass(frozen=True)
class AttentionTuning:
    """How the decode and the chunk kernel are cut for one device, head size and dtype."""

    decode: KernelTuning
    chunk: KernelTuning


# (compute capability's first number, padded head size, bytes of an element) -> tuning. Decodes are bound by memory:
# tiles that keep some 64 KiB on their way in each multiprocessor. Chunks are bound by the tensor cores: accumulators
# as large as registers hold (128 query vectors by 128 components for 8 warps). float32 has no tensor cores that keep
# its precision: small tiles, since each thread holds its operands in registers.
_TUNING: dict[tuple[int, int, int], AttentionTuning] = {
    (8, 64, 2): AttentionTuning(KernelTuning(16, 64, 4, 4, 3), KernelTuning(128, 64, 8, 3, 1)),
    (8, 128, 2): AttentionTuning(KernelTuning(16, 64, 4, 3, 2), KernelTuning(128, 64, 8, 3, 1)),
    (8, 256, 2): AttentionTuning(KernelTuning(16, 32, 4, 3, 2), KernelTuning(64, 32, 8, 3, 1)),
    (8, 512, 2): AttentionTuning(KernelTuning(16, 16, 4, 3, 2), KernelTuning(32, 16, 4, 3, 1)),
    (9, 64, 2): AttentionTuning(KernelTuning(16, 128, 4, 3, 3), KernelTuning(128, 128, 8, 3, 1)),
    (9, 128, 2): AttentionTuning(KernelTuning(16, 64, 4, 3, 3), KernelTuning(128, 64, 8, 3, 1)),
    (9, 256, 2): AttentionTuning(KernelTuning(16, 32, 4, 3, 2), KernelTuning(128, 32, 8, 3, 1)),
    (9, 512, 2): AttentionTuning(KernelTuning(16, 16, 4, 3, 2), KernelTuning(64, 16, 8, 2, 1)),
    (8, 64, 4): AttentionTuning(KernelTuning(16, 32, 4, 3, 3), KernelTuning(32, 32, 4, 3, 2)),
    (8, 128, 4): AttentionTuning(KernelTuning(16, 32, 4, 3, 2), KernelTuning(32, 32, 8, 3, 1)),
    (8, 256, 4): AttentionTuning(KernelTuning(16, 16, 4, 3, 2), KernelTuning(16, 16, 8, 3, 1)),
    (8, 512, 4): AttentionTuning(KernelTuning(16, 16, 8, 2, 1), KernelTuning(16, 16, 8, 2, 1)),
}
_ON_CPU = AttentionTuning(KernelTuning(16, 64, 1, 1, 2), KernelTuning(64, 64, 1, 1, 2))


def attention_tuning(device: torch.device, head_dim: int, dtype: torch.dtype) -> AttentionTuning:
    """The table's entry for ``device``, heads of ``head_dim`` components of ``dtype``: the one place to tune."""
    if device.type != "cuda":
        return _ON_CPU
    return _tuning_for(torch.cuda.get_device_capability(device)[0], head_dim, dtype.itemsize)


def _tuning_for(major: int, head_dim: int, element_bytes: int) -> AttentionTuning:
    """The nearest entry: that of the newest generation not after ``major``, of the next padded head size."""
    padded = min(512, max(64, _power_of_two(head_dim)))
    known = [entry for entry in _TUNING if entry[0] <= major and entry[1:] == (padded, element_bytes)]
    if not known:
        raise ValueError(f"no attention kernel for elements of {element_bytes} bytes on compute capability {major}.x")
    return _TUNING[max(known)]


def tokens_per_tile(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    tuning: AttentionTuning | None = None,
) -> int:
    """Tokens of a chunk that one program attends with: what the query tile holds with all heads of a group."""
    tuning = tuning or attention_tuning(device, head_dim, dtype)
    return max(1, tuning.chunk.query_tile // (num_heads // num_kv_heads))


@dataclass(frozen=True)
class AttentionRows:
    """The rows of one step, on the device; all int32 and contiguous but for ``block_tables``' row stride.

    - ``rows`` ``[R]``: which row of ``block_tables`` each batch row uses.
    - ``query_start`` ``[R + 1]``: the tokens of batch row i are ``query_start[i]`` up to ``query_start[i + 1]``; none
      is a padding row, of which nothing else is read.
    - ``kv_length`` ``[R]``: the positions of the row's sequence after this step, of which its tokens are the last.
    - ``block_tables`` ``[max_rows, max_blocks]``: ids of blocks; those past ``kv_length`` are not read.
    - ``split_ends``, ``tile_ends`` ``[R]``: what ``plan_attention`` writes: how many splits (of decodes) and query
      tiles (of chunks) there are up to and with each row.
    - ``tokens_per_tile``: as the function of that name says, the same for plan and kernels.
    """

    rows: Tensor
    query_start: Tensor
    kv_length: Tensor
    block_tables: Tensor
    split_ends: Tensor
    tile_ends: Tensor
    tokens_per_tile: int


@dataclass(frozen=True)
class AttentionWorkspace:
    """What the splits of decodes leave for one another, in float32: ``partial`` ``[R, MAX_SPLITS, heads, head_dim]``
    and ``log_sum_exp`` ``[R, MAX_SPLITS, heads]`` (to base 2), for as many rows as a step can have. All layers share
    it.
    """

    partial: Tensor
    log_sum_exp: Tensor

    @classmethod
    def allocate(cls, max_rows: int, num_heads: int, head_dim: int, device: torch.device) -> "AttentionWorkspace":
        """``64 * max_rows * num_heads * (head_dim + 1)`` bytes: 268 MB for 1024 rows of 32 heads of 128."""
        shape = (max_rows, MAX_SPLITS.value, num_heads)
        return cls(
            partial=torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
            log_sum_exp=torch.empty(shape, dtype=torch.float32, device=device),
        )


def plan_attention(rows: AttentionRows) -> None:
    """Count splits and query tiles into ``rows.split_ends`` and ``rows.tile_ends``: once per step, before any layer.

    One program; moves 20 bytes per row. Splits are counted from ``kv_length`` alone; layers with a window make them
    shorter and may leave the last ones empty.
    """
    (num_rows,) = rows.rows.shape
    _plan_kernel[(1,)](
        rows.query_start,
        rows.kv_length,
        rows.split_ends,
        rows.tile_ends,
        num_rows,
        TOKENS_PER_TILE=rows.tokens_per_tile,
        PADDED_ROWS=_padded_rows(num_rows),
        num_warps=4,
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
    has_decodes: bool = True,
    has_chunks: bool = True,
    tuning: AttentionTuning | None = None,
) -> None:
    """Attend with all tokens of a step over one layer's pool, which already holds their keys and values.

    ``query``: shape ``[tokens, heads * head_dim]``, any row stride (the leading columns of the fused projection),
    rotated. ``pool_layer``: shape ``[num_blocks, 2 * num_kv_heads, block_size, head_dim]``, contiguous, key heads
    before value heads, block_size a power of two; positions that no row has may hold anything, NaN included. ``out``:
    shape ``[tokens, heads * head_dim]``, any row stride; tokens past the last row's are left alone. All of one dtype:
    float32, bfloat16 or float16; head_dim a multiple of 8. Query head h belongs to key-value head ``h // group``,
    where group is heads / num_kv_heads.

    A token at position p sees positions up to p, of these the last ``window`` if that is given. Logits are ``scale``
    (more than 0) times the product, capped to ``soft_cap * tanh(logit / soft_cap)`` if that is given. Products,
    softmax and sums are in float32; weights are rounded to the dtype before they meet the values.

    ``has_decodes`` and ``has_chunks`` tell whether the step may have rows of one token and of several: a kernel that
    has nothing to do is not launched, and rows of a kind that was denied get no result. ``rows`` must have been
    planned.

    Moves, per decode of n visible positions: ``2 * n * num_kv_heads * head_dim`` elements of the pool, once, for
    ``4 * n * heads * head_dim`` FLOPs, so that memory sets the pace; each of several splits also writes and reads
    ``8 * heads * (head_dim + 1)`` bytes of the workspace in all. Per chunk: as many FLOPs for each token, and the
    pool's elements once for each query tile, mostly from the L2 cache.
    """
    num_heads, head_dim = _check(query, pool_layer, out, rows, num_kv_heads, scale)
    tuning = tuning or attention_tuning(query.device, head_dim, query.dtype)
    constants = {
        "GROUP": num_heads // num_kv_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "BLOCK_SIZE": pool_layer.shape[2],
        "HEAD_DIM": head_dim,
        "PADDED_HEAD_DIM": max(_DOT_ROWS, _power_of_two(head_dim)),
        "PADDED_ROWS": _padded_rows(rows.rows.shape[0]),
        "HAS_WINDOW": window is not None,
        "HAS_SOFT_CAP": soft_cap is not None,
    }
    # The kernels' exponentials are to base 2; under a cap, tanh comes between the two factors.
    factor, cap = (scale * _LOG2_E.value, 0.0) if soft_cap is None else (scale / soft_cap, soft_cap * _LOG2_E.value)
    numbers = (query.stride(0), out.stride(0), rows.block_tables.stride(0), window or 0, factor, cap)
    if has_chunks:
        _attend_chunks(query, pool_layer, out, rows, numbers, constants, tuning.chunk)
    if has_decodes:
        _attend_decodes(query, pool_layer, out, rows, workspace, numbers, constants, tuning.decode)


def _check(
    query: Tensor, pool_layer: Tensor, out: Tensor, rows: AttentionRows, num_kv_heads: int, scale: float
) -> tuple[int, int]:
    """Assert what the kernels rely on; query heads and head size."""
    _, pool_heads, block_size, head_dim = pool_layer.shape
    num_heads = query.shape[1] // head_dim
    assert pool_heads == 2 * num_kv_heads, "the pool holds key heads, then value heads"
    assert query.shape[1] == out.shape[1] == num_heads * head_dim, "queries are whole heads"
    assert num_heads % num_kv_heads == 0, "heads come in whole groups"
    assert query.dtype == out.dtype == pool_layer.dtype, "one dtype"
    assert query.stride(1) == out.stride(1) == rows.block_tables.stride(1) == 1, "rows may lie apart, elements not"
    assert pool_layer.is_contiguous(), "the pool is contiguous"
    assert block_size == _power_of_two(block_size), "blocks hold a power of two of positions"
    assert scale > 0, "maxima are taken before scaling"
    return num_heads, head_dim


def _attend_chunks(
    query: Tensor,
    pool_layer: Tensor,
    out: Tensor,
    rows: AttentionRows,
    numbers: tuple[float, ...],
    constants: dict[str, Any],
    tuning: KernelTuning,
) -> None:
    # The tile is as large as the plan's tokens need, whatever the tuning says now.
    _chunk_kernel[(_num_programs(query.device, tuning),)](
        query,
        pool_layer,
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
        QUERY_TILE=max(_DOT_ROWS, _power_of_two(rows.tokens_per_tile * constants["GROUP"])),
        KEY_TILE=tuning.key_tile,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )


def _attend_decodes(
    query: Tensor,
    pool_layer: Tensor,
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
    assert SPLIT_MULTIPLE.value % tuning.key_tile == 0, "splits are whole key tiles"
    _decode_kernel[(_num_programs(query.device, tuning),)](
        query,
        pool_layer,
        out,
        workspace.partial,
        workspace.log_sum_exp,
        rows.rows,
        rows.query_start,
        rows.kv_length,
        rows.block_tables,
        rows.split_ends,
        num_rows,
        *numbers,
        **constants,
        QUERY_TILE=max(_DOT_ROWS, tuning.query_tile, _power_of_two(constants["GROUP"])),
        KEY_TILE=tuning.key_tile,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    _, out_stride, _, window, _, _ = numbers
    _reduce_kernel[(num_rows, num_heads)](
        out,
        workspace.partial,
        workspace.log_sum_exp,
        rows.query_start,
        rows.kv_length,
        out_stride,
        window,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PADDED_HEAD_DIM=constants["PADDED_HEAD_DIM"],
        HAS_WINDOW=constants["HAS_WINDOW"],
        num_warps=2,
    )


def _power_of_two(number: int) -> int:
    """The least power of two that is not below ``number``."""
    return 1 << max(0, number - 1).bit_length()


def _padded_rows(num_rows: int) -> int:
    """Rows as tiles hold them; small batches share one variant, which costs a thread's one element."""
    return max(128, _power_of_two(num_rows))


def _num_programs(device: torch.device, tuning: KernelTuning) -> int:
    return tuning.programs_per_multiprocessor * _num_multiprocessors(device)


@cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _cut(kv_length, window, HAS_WINDOW: tl.constexpr):
    """How a decode's positions are cut: where the first split starts, positions of a split, and splits in use.

    As many splits as the plan counted from ``kv_length`` alone share what the window leaves; rounding may leave the
    last of them nothing.
    """
    size = tl.maximum(MIN_SPLIT, _round_up(tl.cdiv(kv_length, MAX_SPLITS)))
    first = kv_length * 0
    if HAS_WINDOW:
        planned = tl.cdiv(kv_length, size)
        first = tl.maximum(0, kv_length - window) // SPLIT_MULTIPLE * SPLIT_MULTIPLE
        size = tl.maximum(MIN_SPLIT, _round_up(tl.cdiv(kv_length - first, planned)))
    return first, size, tl.cdiv(kv_length - first, size)


@triton.jit
def _round_up(positions):
    return tl.cdiv(positions, SPLIT_MULTIPLE) * SPLIT_MULTIPLE


_INTERPRETED = tl.constexpr(not isinstance(_round_up, triton.JITFunction))


@triton.jit(do_not_specialize=["num_rows"])
def _plan_kernel(
    query_start,
    kv_length,
    split_ends,
    tile_ends,
    num_rows,
    TOKENS_PER_TILE: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
):
    row = tl.arange(0, PADDED_ROWS)
    real = row < num_rows
    start = tl.load(query_start + row, mask=real, other=0)
    num_tokens = tl.load(query_start + row + 1, mask=real, other=0) - start
    length = tl.load(kv_length + row, mask=real, other=0)
    _, _, num_splits = _cut(length, 0, False)
    splits = tl.where(num_tokens == 1, num_splits, 0)
    tiles = tl.where(num_tokens > 1, tl.cdiv(num_tokens, TOKENS_PER_TILE), 0)
    tl.store(split_ends + row, tl.cumsum(splits, 0), mask=real)
    tl.store(tile_ends + row, tl.cumsum(tiles, 0), mask=real)


@triton.jit
def _find_row(ends, ordinal, num_rows, PADDED_ROWS: tl.constexpr):
    """The row that item ``ordinal`` belongs to, the ordinal of that row's first item, and of the first one after it.

    By counting the rows that end before it: all of ``ends`` in one read, where a binary search would wait for as many
    reads, one after another, as the number of rows has digits.
    """
    row = tl.arange(0, PADDED_ROWS)
    end = tl.load(ends + row, mask=row < num_rows, other=_NEVER)
    before = end <= ordinal
    found = tl.sum(before.to(tl.int32), 0)
    first = tl.max(tl.where(before, end, 0), 0)
    after = tl.min(tl.where(before, _NEVER, end), 0)
    return found, first, after


@triton.jit
def _load_blocks(table, tile, begin, end, BLOCK_SIZE: tl.constexpr, KEY_TILE: tl.constexpr):
    """The ids of the blocks that hold a key tile's positions: one for each position, or one where a block holds them
    all.

    0, which every pool has, for what is not from ``begin`` to ``end``. Loops ask for a tile's ids one turn ahead and
    carry them in registers: were they read in the turn that uses them, Triton's pipeliner would have to spend its
    stages on the chain from id to vector, and keep fewer vectors on their way.
    """
    start = tile * KEY_TILE
    if BLOCK_SIZE % KEY_TILE == 0:
        block = tl.load(table + start // BLOCK_SIZE, mask=start < end, other=0)
    else:
        position = start + tl.arange(0, KEY_TILE)
        block = tl.load(table + position // BLOCK_SIZE, mask=(position >= begin) & (position < end), other=0)
    return block


@triton.jit
def _load_vectors(pointers, wanted, in_head, SOME: tl.constexpr, PADDED: tl.constexpr):
    """A tile of vectors, one per row of ``pointers``: zeros where not ``wanted`` (if SOME) and past the head (if
    PADDED).

    What is not wanted is not read: a zero weight would not hide a NaN there.
    """
    if SOME:
        vectors = tl.load(pointers, mask=wanted[:, None] & in_head[None, :], other=0.0)
    elif PADDED:
        vectors = tl.load(pointers, mask=in_head[None, :], other=0.0)
    else:
        vectors = tl.load(pointers)
    return vectors


@triton.jit
def _dot(left, right, added):
    """``left @ right + added`` in float32; float32 operands keep their precision."""
    if _INTERPRETED:
        # The interpreter takes a bfloat16's bits for an integer here; products of 16-bit floats are exact in float32.
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, added, input_precision="ieee")


@triton.jit
def _capped(logit, cap):
    """``cap * tanh(logit)``, with a series where 1 - exp(-2x) would lose what a float32 holds of x."""
    size = tl.abs(logit)
    decay = tl.exp2(size * (-2.0 * _LOG2_E))
    large = (1.0 - decay) / (1.0 + decay)
    square = logit * logit
    series = 62.0 / 2835.0 * square - 17.0 / 315.0
    series = series * square + 2.0 / 15.0
    series = series * square - 1.0 / 3.0
    small = logit + logit * square * series
    return cap * tl.where(size < 0.25, small, tl.where(logit < 0, -large, large))


@triton.jit
def _attend_tile(
    query,
    query_position,
    weighted,
    maximum,
    total,
    keys,
    block,
    tile,
    begin,
    end,
    window,
    factor,
    cap,
    MASKED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    """Let each query attend to key tile ``tile``: positions from ``tile * KEY_TILE``, of these ``begin`` up to ``end``.

    ``keys`` points to the key head in block 0. The state is FlashAttention's: weighted values, and of the logits to
    base 2 the maximum and the sum of exponentials. Not MASKED: all queries see the whole tile. Keys and values are
    read first, by addresses that need no other turn's result, so that Triton's pipeliner keeps ``num_stages`` - 1
    tiles on their way.
    """
    position = tile * KEY_TILE + tl.arange(0, KEY_TILE)
    wanted = (position >= begin) & (position < end)
    # int64: pools have more elements than an int32 counts.
    place = block.to(tl.int64) * (2 * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM) + position % BLOCK_SIZE * HEAD_DIM
    component = tl.arange(0, PADDED_HEAD_DIM)
    in_head = component < HEAD_DIM
    pointers = keys + place[:, None] + component[None, :]
    key = _load_vectors(pointers, wanted, in_head, MASKED, HEAD_DIM != PADDED_HEAD_DIM)
    pointers += NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    value = _load_vectors(pointers, wanted, in_head, MASKED, HEAD_DIM != PADDED_HEAD_DIM)

    logit = _dot(query, tl.trans(key), tl.zeros([query.shape[0], KEY_TILE], dtype=tl.float32))
    if HAS_SOFT_CAP:
        logit = _capped(logit * factor, cap)
    if MASKED:
        seen = wanted[None, :] & (position[None, :] <= query_position[:, None])
        if HAS_WINDOW:
            seen &= position[None, :] > query_position[:, None] - window
        logit = tl.where(seen, logit, float("-inf"))
    # Without a cap the factor meets the logit in the same instruction as the maximum.
    if HAS_SOFT_CAP:
        highest = tl.maximum(maximum, tl.max(logit, 1))
        weight = tl.exp2(logit - highest[:, None])
    else:
        highest = tl.maximum(maximum, tl.max(logit, 1) * factor)
        weight = tl.exp2(logit * factor - highest[:, None])
    decay = tl.exp2(maximum - highest)
    total = total * decay + tl.sum(weight, 1)
    weighted = _dot(weight.to(value.dtype), value, weighted * decay[:, None])
    return weighted, highest, total


@triton.jit(do_not_specialize=["num_rows", "window"])
def _chunk_kernel(
    query,
    pool,
    out,
    rows,
    query_start,
    kv_length,
    block_tables,
    tile_ends,
    num_rows,
    query_stride,
    out_stride,
    table_stride,
    window,
    factor,
    cap,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    TOKENS: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """Chunks: one item is a query tile of a row and a key-value head, with all query heads of its group.

    The tile's vectors are token after token, so that its tokens, and with them the diagonal, stay close together.
    """
    num_items = tl.load(tile_ends + num_rows - 1) * NUM_KV_HEADS
    vector = tl.arange(0, QUERY_TILE)
    component = tl.arange(0, PADDED_HEAD_DIM)
    in_head = component < HEAD_DIM
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        kv_head = item % NUM_KV_HEADS
        ordinal = item // NUM_KV_HEADS
        row, _, after = _find_row(tile_ends, ordinal, num_rows, PADDED_ROWS)
        # The last tile of a row sees most: from the back, so that no program is left with a long one at the end.
        first_token = (after - 1 - ordinal) * TOKENS
        start = tl.load(query_start + row)
        num_tokens = tl.load(query_start + row + 1) - start
        past = tl.load(kv_length + row) - num_tokens
        table = block_tables + tl.load(rows + row).to(tl.int64) * table_stride
        token = first_token + vector // GROUP
        real = (token < num_tokens) & (vector < TOKENS * GROUP)
        column = (kv_head * GROUP + vector % GROUP) * HEAD_DIM
        line = (start + token).to(tl.int64)
        pointers = query + (line * query_stride + column)[:, None] + component[None, :]
        queries = tl.load(pointers, mask=real[:, None] & in_head[None, :], other=0.0)

        # Tiles [low, full_low) and [full_high, high) are seen in part: the window's edge and the diagonal.
        lowest = past + first_token
        end = past + tl.minimum(first_token + TOKENS, num_tokens)
        # A vector that is not real attends as the last token does, and is not stored: so that each sees something.
        query_position = tl.minimum(past + token, end - 1)
        begin = start * 0
        full_low = start * 0
        if HAS_WINDOW:
            begin = tl.maximum(0, lowest + 1 - window)
            full_low = tl.cdiv(tl.maximum(0, end - window), KEY_TILE)
        low = begin // KEY_TILE
        full_high = tl.maximum(full_low, (lowest + 1) // KEY_TILE)
        num_masked = full_low - low + tl.cdiv(end, KEY_TILE) - full_high

        weighted = tl.zeros([QUERY_TILE, PADDED_HEAD_DIM], dtype=tl.float32)
        maximum = tl.full([QUERY_TILE], _LEAST, dtype=tl.float32)
        total = tl.zeros([QUERY_TILE], dtype=tl.float32)
        keys = pool + kv_head * (BLOCK_SIZE * HEAD_DIM)
        block = _load_blocks(table, full_low, begin, end, BLOCK_SIZE, KEY_TILE)
        for tile in range(full_low, full_high):
            following = _load_blocks(table, tile + 1, begin, end, BLOCK_SIZE, KEY_TILE)
            weighted, maximum, total = _attend_tile(
                queries,
                query_position,
                weighted,
                maximum,
                total,
                keys,
                block,
                tile,
                begin,
                end,
                window,
                factor,
                cap,
                False,
                NUM_KV_HEADS,
                BLOCK_SIZE,
                HEAD_DIM,
                PADDED_HEAD_DIM,
                KEY_TILE,
                HAS_WINDOW,
                HAS_SOFT_CAP,
            )
            block = following
        tile = tl.where(low < full_low, low, full_high)
        block = _load_blocks(table, tile, begin, end, BLOCK_SIZE, KEY_TILE)
        for _ in range(num_masked):
            next_tile = tl.where(tile + 1 == full_low, full_high, tile + 1)
            following = _load_blocks(table, next_tile, begin, end, BLOCK_SIZE, KEY_TILE)
            weighted, maximum, total = _attend_tile(
                queries,
                query_position,
                weighted,
                maximum,
                total,
                keys,
                block,
                tile,
                begin,
                end,
                window,
                factor,
                cap,
                True,
                NUM_KV_HEADS,
                BLOCK_SIZE,
                HEAD_DIM,
                PADDED_HEAD_DIM,
                KEY_TILE,
                HAS_WINDOW,
                HAS_SOFT_CAP,
            )
            tile = next_tile
            block = following
        pointers = out + (line * out_stride + column)[:, None] + component[None, :]
        result = (weighted / total[:, None]).to(out.dtype.element_ty)
        tl.store(pointers, result, mask=real[:, None] & in_head[None, :])


@triton.jit(do_not_specialize=["num_rows", "window"])
def _decode_kernel(
    query,
    pool,
    out,
    partial,
    log_sum_exp,
    rows,
    query_start,
    kv_length,
    block_tables,
    split_ends,
    num_rows,
    query_stride,
    out_stride,
    table_stride,
    window,
    factor,
    cap,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """Decodes: one item is a split of a row and a key-value head, with all query heads of its group.

    The group's keys and values are read once. A row with one split gets its result here, others leave a part each.
    """
    num_items = tl.load(split_ends + num_rows - 1) * NUM_KV_HEADS
    member = tl.arange(0, QUERY_TILE)
    component = tl.arange(0, PADDED_HEAD_DIM)
    real = (member < GROUP)[:, None] & (component < HEAD_DIM)[None, :]
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        kv_head = item % NUM_KV_HEADS
        ordinal = item // NUM_KV_HEADS
        row, first_ordinal, _ = _find_row(split_ends, ordinal, num_rows, PADDED_ROWS)
        split = ordinal - first_ordinal
        length = tl.load(kv_length + row)
        first, size, num_splits = _cut(length, window, HAS_WINDOW)
        begin = first + split * size
        end = tl.minimum(begin + size, length)
        if begin < end:
            if HAS_WINDOW:
                begin = tl.maximum(begin, length - window)
            token = tl.load(query_start + row).to(tl.int64)
            table = block_tables + tl.load(rows + row).to(tl.int64) * table_stride
            head = kv_head * GROUP + member
            columns = head[:, None] * HEAD_DIM + component[None, :]
            queries = tl.load(query + token * query_stride + columns, mask=real, other=0.0)
            query_position = member * 0 + length - 1
            weighted = tl.zeros([QUERY_TILE, PADDED_HEAD_DIM], dtype=tl.float32)
            maximum = tl.full([QUERY_TILE], _LEAST, dtype=tl.float32)
            total = tl.zeros([QUERY_TILE], dtype=tl.float32)
            keys = pool + kv_head * (BLOCK_SIZE * HEAD_DIM)
            # Always masked: the memory does not notice.
            low = begin // KEY_TILE
            block = _load_blocks(table, low, begin, end, BLOCK_SIZE, KEY_TILE)
            for tile in range(low, tl.cdiv(end, KEY_TILE)):
                following = _load_blocks(table, tile + 1, begin, end, BLOCK_SIZE, KEY_TILE)
                weighted, maximum, total = _attend_tile(
                    queries,
                    query_position,
                    weighted,
                    maximum,
                    total,
                    keys,
                    block,
                    tile,
                    begin,
                    end,
                    window,
                    factor,
                    cap,
                    True,
                    NUM_KV_HEADS,
                    BLOCK_SIZE,
                    HEAD_DIM,
                    PADDED_HEAD_DIM,
                    KEY_TILE,
                    HAS_WINDOW,
                    HAS_SOFT_CAP,
                )
                block = following
            weighted /= total[:, None]
            if num_splits == 1:
                tl.store(out + token * out_stride + columns, weighted.to(out.dtype.element_ty), mask=real)
            else:
                place = (row.to(tl.int64) * MAX_SPLITS + split) * (NUM_KV_HEADS * GROUP)
                tl.store(partial + place * HEAD_DIM + columns, weighted, mask=real)
                tl.store(log_sum_exp + place + head, maximum + tl.log2(total), mask=member < GROUP)


@triton.jit(do_not_specialize=["window"])
def _reduce_kernel(
    out,
    partial,
    log_sum_exp,
    query_start,
    kv_length,
    out_stride,
    window,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Put the splits of one decode and head together, weighed by their sums of exponentials."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(query_start + row)
    if tl.load(query_start + row + 1) - token == 1:
        _, _, num_splits = _cut(tl.load(kv_length + row), window, HAS_WINDOW)
        if num_splits > 1:
            split = tl.arange(0, MAX_SPLITS)
            component = tl.arange(0, PADDED_HEAD_DIM)
            in_head = component < HEAD_DIM
            place = (row.to(tl.int64) * MAX_SPLITS + split) * NUM_HEADS + head
            sums = tl.load(log_sum_exp + place, mask=split < num_splits, other=float("-inf"))
            pointers = partial + place[:, None] * HEAD_DIM + component[None, :]
            parts = tl.load(pointers, mask=(split < num_splits)[:, None] & in_head[None, :], other=0.0)
            weight = tl.exp2(sums - tl.max(sums, 0))
            result = tl.sum(parts * weight[:, None], 0) / tl.sum(weight, 0)
            pointers = out + token.to(tl.int64) * out_stride + head * HEAD_DIM + component
            tl.store(pointers, result.to(out.dtype.element_ty), mask=in_head)
