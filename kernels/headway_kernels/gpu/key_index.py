"""An index of keys on a device: the few positions that a token's queries see (DeepSeek-AI 2025, "DeepSeek-V3.2-Exp", section 1).

Owns: scores, the choice, where an index's keys are stored. Must not know: products, attention.

A token's own queries and the keys of its row alone decide what it sees. Of equal scores, the first positions are chosen.
What is chosen is a list of vectors in the order of positions, so that attention reads it as a table of blocks of one.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.attention.tiles import find_row
from headway_kernels.gpu.attention.tuning import padded_rows
from headway_kernels.gpu.dependence import await_grid, dependent_launch
from headway_kernels.gpu.rotary import load_rotation, rotated

SPLIT_INPUTS = 1024
"""The inputs of weights are cut into splits of so many, which are added first to last."""
BLOCK_INPUTS = 64
PARTS = 16
"""Programs that score the keys of one token."""
CHOICE_TILE = 1024
_DOT_ROWS = 16
NUM_WARPS, CHOICE_WARPS = 4, 8
MAX_REGISTERS = 255
"""Of a thread. Without a number, the assembler spares them and uses memory."""
_DIGITS = tl.constexpr(16)
"""A pass over the scores finds one of so many, which is four bits of a threshold."""
_INTERPRETED = tl.constexpr(not isinstance(find_row, triton.JITFunction))


@dataclass(frozen=True)
class IndexedStep:
    """The tokens of a step on the device: int32.

    ``rows`` ``[R]``, ``query_start`` ``[R + 1]`` and ``block_tables`` ``[max_rows, max_blocks]``: see ``AttentionRows``.
    ``positions`` ``[T]``: padding comes last.
    """

    rows: Tensor
    query_start: Tensor
    block_tables: Tensor
    positions: Tensor

    @property
    def arguments(self) -> tuple[Tensor | int, ...]:
        """As kernels take them."""
        return (
            self.rows,
            self.query_start,
            self.block_tables,
            self.positions,
            len(self.rows),
            self.block_tables.stride(0),
        )


@dataclass(frozen=True)
class SeenTokens:
    """How the tokens of a step attend, int32: as tokens of their rows, or each by what an index lists for it.

    ``lengths`` ``[T]`` and ``starts`` ``[T + 1]``: what each sees by its list, 0 of the others, and the tokens before it. Those of
    a row that see all positions come first; if they are several, they attend as a chunk: of ``whole_rows`` and ``whole_lengths``,
    ``[2 R]``, and ``whole_starts``, ``[2 R + 1]``, every other one is such a part of a row, and the rest have length 0.
    """

    lengths: Tensor
    starts: Tensor
    whole_rows: Tensor
    whole_lengths: Tensor
    whole_starts: Tensor


def count_seen(step: IndexedStep, seen: SeenTokens, num_chosen: int) -> None:
    """Fill ``seen``, of an index that lists ``num_chosen`` positions."""
    num_tokens, num_rows = len(step.positions), len(step.rows)
    launch: dict[str, Any] = {"num_warps": NUM_WARPS, **dependent_launch(step.positions.device)}
    _count_seen[(num_tokens,)](
        step.positions,
        step.query_start,
        seen.lengths,
        seen.starts,
        num_tokens,
        num_rows,
        NUM_CHOSEN=num_chosen,
        PADDED_ROWS=padded_rows(len(step.rows)),
        **launch,
    )
    _cut_rows[(triton.cdiv(num_rows, CHOICE_TILE),)](
        step.positions,
        step.query_start,
        step.rows,
        seen.whole_rows,
        seen.whole_lengths,
        seen.whole_starts,
        num_rows,
        NUM_CHOSEN=num_chosen,
        BLOCK=CHOICE_TILE,
        **launch,
    )


def store_index(
    queries: Tensor,
    keys: Tensor,
    positions: Tensor,
    slots: Tensor,
    cosines: Tensor,
    sines: Tensor,
    pool_layer: Tensor,
) -> None:
    """Rotate an index's ``queries``, ``[T, heads, head_dim]``, in place; store its rotated ``keys``, ``[T, head_dim]``.

    Both contiguous. ``positions``, ``slots``, ``cosines`` and ``sines``: see ``store_latent``; of the first channels of a head, i
    and i + shared / 2 are a pair. ``pool_layer`` ``[num_blocks, vectors, block_size, width]``, of numbers: the keys are the last
    vectors, whose channels behind the head's are not written.
    """
    num_tokens, num_heads, head_dim = queries.shape
    if num_tokens == 0:
        return
    _store_index[(num_tokens,)](
        queries,
        keys,
        positions,
        slots,
        cosines,
        sines,
        pool_layer,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PAIRS=cosines.shape[1],
        BLOCK_HEADS=triton.next_power_of_2(num_heads),
        BLOCK_PAIRS=triton.next_power_of_2(cosines.shape[1]),
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        **pool_constants(pool_layer),
        num_warps=NUM_WARPS,
        **dependent_launch(queries.device),
    )


def key_tile(dtype: torch.dtype) -> int:
    """Positions of a turn. float32 has no tensor cores of full precision: its operands fill registers."""
    return 16 if dtype == torch.float32 else 64


def num_splits(num_inputs: int) -> int:
    """Of the weights of heads."""
    return int(triton.cdiv(num_inputs, SPLIT_INPUTS))


def weigh_heads(inputs: Tensor, weight: Tensor, splits: Tensor) -> None:
    """The weights of an index's heads, ``inputs @ weight.T`` in float32, not added up yet.

    ``inputs`` ``[T, K]``, floating, any row stride; ``weight`` float32, ``[heads, K]``; ``splits`` float32, ``[num_splits, T, heads]``;
    both contiguous.
    """
    num_tokens, num_inputs = inputs.shape
    num_heads = len(weight)
    _weigh_heads[(triton.cdiv(num_tokens, _DOT_ROWS), len(splits))](
        inputs,
        weight,
        splits,
        inputs.stride(0),
        num_tokens,
        INPUTS=num_inputs,
        NUM_HEADS=num_heads,
        BLOCK_TOKENS=_DOT_ROWS,
        BLOCK_HEADS=max(_DOT_ROWS, triton.next_power_of_2(num_heads)),
        BLOCK_INPUTS=BLOCK_INPUTS,
        SPLIT_INPUTS=SPLIT_INPUTS,
        num_warps=NUM_WARPS,
        **dependent_launch(inputs.device),
    )


def pool_constants(pool_layer: Tensor) -> dict[str, int]:
    """Where a kernel finds an index's keys."""
    _, num_vectors, block_size, width = pool_layer.shape
    return {
        "BLOCK_SIZE": block_size,
        "BLOCK_STRIDE": pool_layer.stride(0),
        "WIDTH": width,
        "BEFORE_KEYS": (num_vectors - 1) * block_size * width,
    }


def score_keys(
    queries: Tensor, weights: Tensor, pool_layer: Tensor, step: IndexedStep, scores: Tensor, first: int, num_chosen: int
) -> None:
    """The scores of all positions that tokens from ``first`` on see: ``sum(weight * relu(query @ key))``.

    ``queries`` ``[T, heads, head_dim]``, contiguous; ``weights``: from ``weigh_heads``; ``scores`` float32, ``[n, context]``, of
    ``n`` tokens. Of tokens that see ``num_chosen`` positions or fewer, nothing is computed.
    """
    _, num_heads, head_dim = queries.shape
    _score_keys[(len(scores), PARTS)](
        queries,
        weights,
        pool_layer,
        scores,
        *step.arguments,
        first,
        scores.stride(0),
        weights.stride(0),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        SPLITS=len(weights),
        BLOCK_HEADS=max(_DOT_ROWS, triton.next_power_of_2(num_heads)),
        BLOCK_DIM=max(_DOT_ROWS, triton.next_power_of_2(head_dim)),
        NUM_CHOSEN=num_chosen,
        PADDED_ROWS=padded_rows(len(step.rows)),
        KEY_TILE=key_tile(queries.dtype),
        **pool_constants(pool_layer),
        num_warps=NUM_WARPS,
        num_stages=3,
        maxnreg=MAX_REGISTERS,
        **dependent_launch(queries.device),
    )


def choose_keys(
    scores: Tensor,
    num_tokens: int,
    step: IndexedStep,
    lengths: Tensor,
    chosen: Tensor,
    first: int,
    pool_layer: Tensor,
) -> None:
    """List the vectors that so many tokens from ``first`` on see, in the order of positions, of those with ``lengths``.

    ``chosen`` int32, ``[T, num_chosen]``: numbers of vectors of the layer, as if each were a block. ``scores``: see
    ``score_keys``; none are read of tokens that see all.
    """
    _choose_keys[(num_tokens,)](
        scores,
        lengths,
        chosen,
        *step.arguments,
        first,
        scores.stride(0),
        NUM_CHOSEN=chosen.shape[1],
        PADDED_ROWS=padded_rows(len(step.rows)),
        BLOCK_SIZE=pool_layer.shape[2],
        VECTORS_PER_BLOCK=pool_layer.shape[1] * pool_layer.shape[2],
        TILE=CHOICE_TILE,
        num_warps=CHOICE_WARPS,
        maxnreg=MAX_REGISTERS,
        **dependent_launch(chosen.device),
    )


def as_blocks_of_one(pool_layer: Tensor) -> Tensor:
    """A layer whose vectors are blocks of one position, as lists of ``choose_keys`` count them."""
    return pool_layer.view(-1, 1, 1, pool_layer.shape[3])


@triton.jit
def _num_whole(first_position, num_tokens, NUM_CHOSEN: tl.constexpr):
    """The first tokens of a row that see all positions, if they are several."""
    whole = tl.minimum(tl.maximum(NUM_CHOSEN - first_position, 0), num_tokens)
    return tl.where(whole > 1, whole, 0)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _count_seen(
    positions,
    query_start,
    lengths,
    starts,
    num_tokens,
    num_rows,
    NUM_CHOSEN: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has one token."""
    await_grid(PDL)
    token = tl.program_id(0)
    real = tl.load(query_start + num_rows)
    seen = 0
    if token < real:
        _, start, end = find_row(query_start + 1, token, num_rows, PADDED_ROWS)
        position = tl.load(positions + token)
        whole = _num_whole(position - (token - start), end - start, NUM_CHOSEN)
        seen = tl.where(token - start < whole, 0, tl.minimum(position + 1, NUM_CHOSEN))
    tl.store(lengths + token, seen)
    tl.store(starts + token, tl.minimum(token, real))
    if token == num_tokens - 1:
        tl.store(starts + num_tokens, real)


@triton.jit(do_not_specialize=["num_rows"])
def _cut_rows(
    positions,
    query_start,
    rows,
    whole_rows,
    whole_lengths,
    whole_starts,
    num_rows,
    NUM_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Cut each row behind its tokens that see all positions."""
    await_grid(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = row < num_rows
    start = tl.load(query_start + row, mask=within, other=0)
    end = tl.load(query_start + row + 1, mask=within, other=0)
    first = tl.load(positions + start, mask=within & (end > start), other=0)
    whole = _num_whole(first, end - start, NUM_CHOSEN)
    own = tl.load(rows + row, mask=within, other=0)
    tl.store(whole_rows + 2 * row, own, mask=within)
    tl.store(whole_rows + 2 * row + 1, own, mask=within)
    tl.store(whole_lengths + 2 * row, tl.where(whole > 0, first + whole, 0), mask=within)
    tl.store(whole_lengths + 2 * row + 1, tl.zeros_like(own), mask=within)
    tl.store(whole_starts + 2 * row, start, mask=within)
    tl.store(whole_starts + 2 * row + 1, start + whole, mask=within)
    tl.store(whole_starts + 2 * row + 2, end, mask=row == num_rows - 1)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _store_index(
    queries,
    keys,
    positions,
    slots,
    cosines,
    sines,
    pool_layer,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BEFORE_KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    await_grid(PDL)
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK_PAIRS)
    is_pair = pair < PAIRS
    _, cosine, sine = load_rotation(positions, cosines, sines, token, pair, PAIRS)
    dtype = queries.dtype.element_ty

    head = tl.arange(0, BLOCK_HEADS)
    source = queries + token * (NUM_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + pair[None, :]
    within = (head < NUM_HEADS)[:, None] & is_pair[None, :]
    first = tl.load(source, mask=within, other=0.0).to(tl.float32)
    second = tl.load(source + PAIRS, mask=within, other=0.0).to(tl.float32)
    first, second = rotated(first, second, cosine[None, :], sine[None, :])
    tl.store(source, first.to(dtype), mask=within)
    tl.store(source + PAIRS, second.to(dtype), mask=within)

    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        key = keys + token * HEAD_DIM
        target = pool_layer + slot // BLOCK_SIZE * BLOCK_STRIDE + BEFORE_KEYS + slot % BLOCK_SIZE * WIDTH
        left = tl.load(key + pair, mask=is_pair, other=0.0).to(tl.float32)
        right = tl.load(key + PAIRS + pair, mask=is_pair, other=0.0).to(tl.float32)
        left, right = rotated(left, right, cosine, sine)
        tl.store(target + pair, left.to(dtype), mask=is_pair)
        tl.store(target + PAIRS + pair, right.to(dtype), mask=is_pair)
        channel = tl.arange(0, BLOCK_DIM)
        behind = (channel >= 2 * PAIRS) & (channel < HEAD_DIM)
        tl.store(target + channel, tl.load(key + channel, mask=behind, other=0.0), mask=behind)


@triton.jit(do_not_specialize=["num_tokens"])
def _weigh_heads(
    inputs,
    weight,
    splits,
    inputs_stride,
    num_tokens,
    INPUTS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    SPLIT_INPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A split of the inputs of some tokens."""
    await_grid(PDL)
    split = tl.program_id(1)
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    head = tl.arange(0, BLOCK_HEADS)
    sums = tl.zeros((BLOCK_TOKENS, BLOCK_HEADS), dtype=tl.float32)
    for start in range(split * SPLIT_INPUTS, tl.minimum((split + 1) * SPLIT_INPUTS, INPUTS), BLOCK_INPUTS):
        place = start + tl.arange(0, BLOCK_INPUTS)
        within = place < INPUTS
        rows = inputs + token.to(tl.int64)[:, None] * inputs_stride + place[None, :]
        own = tl.load(rows, mask=(token < num_tokens)[:, None] & within[None, :], other=0.0).to(tl.float32)
        columns = weight + head[None, :] * INPUTS + place[:, None]
        numbers = tl.load(columns, mask=(head < NUM_HEADS)[None, :] & within[:, None], other=0.0)
        sums = tl.dot(own, numbers, sums, input_precision="ieee")
    target = splits + (split * num_tokens + token).to(tl.int64)[:, None] * NUM_HEADS + head[None, :]
    tl.store(target, sums, mask=(token < num_tokens)[:, None] & (head < NUM_HEADS)[None, :])


@triton.jit
def _table_of(rows, query_start, block_tables, token, num_rows, table_stride, PADDED_ROWS: tl.constexpr):
    """A token's block table."""
    row, _, _ = find_row(query_start + 1, token, num_rows, PADDED_ROWS)
    return block_tables + tl.load(rows + row).to(tl.int64) * table_stride


@triton.jit(do_not_specialize=["num_rows", "first_token"])
def _score_keys(
    queries,
    weights,
    pool_layer,
    scores,
    rows,
    query_start,
    block_tables,
    positions,
    num_rows,
    table_stride,
    first_token,
    scores_stride,
    split_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BEFORE_KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The programs of a token score its key tiles in turn."""
    await_grid(PDL)
    token = first_token + tl.program_id(0)
    length = 0
    if token < tl.load(query_start + num_rows):
        length = tl.load(positions + token) + 1
    if length > NUM_CHOSEN:
        table = _table_of(rows, query_start, block_tables, token, num_rows, table_stride, PADDED_ROWS)
        head = tl.arange(0, BLOCK_HEADS)
        channel = tl.arange(0, BLOCK_DIM)
        in_head = channel < HEAD_DIM
        line = token.to(tl.int64) * NUM_HEADS + head
        own = tl.load(
            queries + line[:, None] * HEAD_DIM + channel[None, :],
            mask=(head < NUM_HEADS)[:, None] & in_head[None, :],
            other=0.0,
        )
        weight = tl.zeros((BLOCK_HEADS,), dtype=tl.float32)
        for split in tl.static_range(SPLITS):
            weight += tl.load(weights + split * split_stride + line, mask=head < NUM_HEADS, other=0.0)
        if _INTERPRETED:
            own = own.to(tl.float32)
        for tile in range(tl.program_id(1), tl.cdiv(length, KEY_TILE), tl.num_programs(1)):
            position = tile * KEY_TILE + tl.arange(0, KEY_TILE)
            wanted = position < length
            block = tl.load(table + position // BLOCK_SIZE, mask=wanted, other=0).to(tl.int64)
            place = block * BLOCK_STRIDE + BEFORE_KEYS + position % BLOCK_SIZE * WIDTH
            pointers = pool_layer + place[:, None] + channel[None, :]
            keys = tl.load(pointers, mask=wanted[:, None] & in_head[None, :], other=0.0)
            if _INTERPRETED:
                keys = keys.to(tl.float32)
            met = tl.dot(own, tl.trans(keys), input_precision="ieee")
            score = tl.sum(tl.maximum(met, 0.0) * weight[:, None], 0)
            tl.store(scores + tl.program_id(0).to(tl.int64) * scores_stride + position, score, mask=wanted)


@triton.jit
def _ordered(scores):
    """int32 in the order of float32 scores; both zeros are one."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _threshold(scores, length, NUM_CHOSEN: tl.constexpr, TILE: tl.constexpr):
    """The largest ordered number that at least ``NUM_CHOSEN`` scores reach, and how many are above it."""
    digits = tl.arange(0, _DIGITS)
    # Counted from the least int32, so that digits are found from the highest on.
    found = tl.zeros((), dtype=tl.int64)
    above = tl.zeros((), dtype=tl.int32)
    worth = tl.full((), 1 << 28, dtype=tl.int64)
    for _ in tl.static_range(8):
        candidates = (found + digits.to(tl.int64) * worth - 0x80000000).to(tl.int32)
        counts = tl.zeros((_DIGITS,), dtype=tl.int32)
        for start in range(0, length, TILE):
            place = start + tl.arange(0, TILE)
            order = _ordered(tl.load(scores + place, mask=place < length, other=float("-inf")))
            reach = (order[:, None] >= candidates[None, :]) & (place < length)[:, None]
            counts += tl.sum(reach.to(tl.int32), 0)
        # The count of a digit is no more than that of the one before, and the first suffices.
        suffices = counts >= NUM_CHOSEN
        digit = tl.sum(suffices.to(tl.int32), 0) - 1
        above = tl.where(digit < _DIGITS - 1, tl.sum(tl.where(digits == digit + 1, counts, 0), 0), above)
        found += digit.to(tl.int64) * worth
        worth = worth // _DIGITS
    return (found - 0x80000000).to(tl.int32), above


@triton.jit(do_not_specialize=["num_rows", "first_token"])
def _choose_keys(
    scores,
    lengths,
    chosen,
    rows,
    query_start,
    block_tables,
    positions,
    num_rows,
    table_stride,
    first_token,
    scores_stride,
    NUM_CHOSEN: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VECTORS_PER_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program lists what one token sees."""
    await_grid(PDL)
    token = first_token + tl.program_id(0)
    if tl.load(lengths + token) > 0:
        length = tl.load(positions + token) + 1
        table = _table_of(rows, query_start, block_tables, token, num_rows, table_stride, PADDED_ROWS)
        own = scores + tl.program_id(0).to(tl.int64) * scores_stride
        target = chosen + token.to(tl.int64) * NUM_CHOSEN
        least = tl.full((), -0x80000000, dtype=tl.int32)
        above = tl.zeros((), dtype=tl.int32)
        if length > NUM_CHOSEN:
            least, above = _threshold(own, length, NUM_CHOSEN, TILE)
        listed = tl.zeros((), dtype=tl.int32)
        left = NUM_CHOSEN - above
        for start in range(0, length, TILE):
            position = start + tl.arange(0, TILE)
            within = position < length
            is_seen = within
            if length > NUM_CHOSEN:
                order = _ordered(tl.load(own + position, mask=within, other=float("-inf")))
                level = ((order == least) & within).to(tl.int32)
                is_seen = within & ((order > least) | ((level != 0) & (tl.cumsum(level, 0) <= left)))
                left -= tl.sum(level, 0)
            ones = is_seen.to(tl.int32)
            block = tl.load(table + position // BLOCK_SIZE, mask=within, other=0)
            vector = block * VECTORS_PER_BLOCK + position % BLOCK_SIZE
            tl.store(target + listed + tl.cumsum(ones, 0) - 1, vector, mask=is_seen)
            listed += tl.sum(ones, 0)
