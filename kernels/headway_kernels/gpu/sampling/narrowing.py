"""Long lists of a top-p without top-k: all processors narrow the range of the threshold, before one block searches it.

Owns: the stages ``narrow`` and ``gather``. Must not know: the search, draws.

A list is long if it has more than a chunk. In each round a program weighs its part of the list above a few pivots; the
next launch adds the parts, which are integers, and goes on between two pivots. What lies there at last is gathered; if
even that is long, the search takes the whole list, from the narrowed range.
"""

import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.dependence import await_grid, dependent_launch
from headway_kernels.gpu.sampling.memory import (
    CHUNK_WARPS,
    DRAWS_RANKED,
    NARROWING_PIVOTS,
    NARROWING_ROUNDS,
    SamplingColumns,
    SamplingWorkspace,
    chunk_grid,
)
from headway_kernels.gpu.sampling.numbers import PAIRS, WEIGHT_OF_ONE, WORDS, bits_of, from_bits, weight_of


@triton.jit
def is_narrowed(remaining, top_k, top_p, length, CHUNK: tl.constexpr):
    """Whether these stages are for a row."""
    return (remaining == DRAWS_RANKED) & (top_k == 0) & (top_p < 1.0) & (length > CHUNK)


@triton.jit
def _pivots(low, high):
    step = (high - low + NARROWING_PIVOTS) // (NARROWING_PIVOTS + 1)
    return low + step * (tl.arange(0, NARROWING_PIVOTS) + 1)


@triton.jit
def _range_after(
    i,
    need,
    range_ptr,
    range_weight_ptr,
    pivot_weight_ptr,
    cutoff_ptr,
    row_share_ptr,
    num_chunks,
    ROUND: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """After so many rounds: the bounds of the threshold, from ``low`` up to below ``high``, and the weight from ``high`` on."""
    if ROUND == 0:
        low = tl.load(cutoff_ptr + i)
        high = bits_of(tl.load(row_share_ptr + i)) + 1
        above = tl.zeros((), tl.int64)
    else:
        before = i * NARROWING_ROUNDS + ROUND - 1
        low = tl.load(range_ptr + 2 * before)
        high = tl.load(range_ptr + 2 * before + 1)
        above = tl.load(range_weight_ptr + before)
        pivots = _pivots(low, high)
        chunks = tl.arange(0, CHUNKS)
        cells = (before * num_chunks + chunks[:, None]) * NARROWING_PIVOTS + tl.arange(0, NARROWING_PIVOTS)[None, :]
        parts = tl.load(pivot_weight_ptr + cells, mask=(chunks < num_chunks)[:, None], other=0)
        weights = tl.sum(parts, 0) + above
        suffices = weights.to(tl.float64) >= need
        low = tl.max(tl.where(suffices, pivots, low), 0)
        next_high = tl.min(tl.where(suffices, high, tl.minimum(pivots, high)), 0)
        at_next = tl.sum(tl.where(pivots == next_high, weights, 0), 0)
        above = tl.where(next_high < high, at_next, above)
        high = next_high
    return low, high, above


@triton.jit
def _narrow_kernel(
    rows_ptr,
    top_k_ptr,
    top_p_ptr,
    remaining_ptr,
    row_share_ptr,
    cutoff_ptr,
    list_length_ptr,
    words_ptr,
    range_ptr,
    range_weight_ptr,
    pivot_weight_ptr,
    short_length_ptr,
    vocab_size,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROUND: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weigh a part of the list from each pivot on. Parts beyond the list weigh nothing."""
    await_grid(PDL)
    i = tl.program_id(1).to(tl.int64)
    row = tl.maximum(tl.load(rows_ptr + i), 0)
    length = tl.load(list_length_ptr + i)
    top_p = tl.load(top_p_ptr + row * PAIRS)
    if is_narrowed(tl.load(remaining_ptr + i), tl.load(top_k_ptr + row * WORDS), top_p, length, CHUNK):
        num_chunks = tl.num_programs(0)
        low, high, above = _range_after(
            i,
            top_p * WEIGHT_OF_ONE,
            range_ptr,
            range_weight_ptr,
            pivot_weight_ptr,
            cutoff_ptr,
            row_share_ptr,
            num_chunks,
            ROUND,
            CHUNKS,
        )
        here = i * NARROWING_ROUNDS + ROUND
        if tl.program_id(0) == 0:
            tl.store(range_ptr + 2 * here, low)
            tl.store(range_ptr + 2 * here + 1, high)
            tl.store(range_weight_ptr + here, above)
            tl.store(short_length_ptr + i, 0)
        places = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
        bits = tl.load(words_ptr + i * vocab_size + places, mask=places < length, other=-1)
        weight = tl.where((bits >= low) & (bits < high), weight_of(from_bits(tl.maximum(bits, 0))), 0)
        step = (high - low + NARROWING_PIVOTS) // (NARROWING_PIVOTS + 1)
        numbers = tl.arange(0, NARROWING_PIVOTS)
        found = tl.zeros((NARROWING_PIVOTS,), tl.int64)
        for j in tl.static_range(NARROWING_PIVOTS):
            found = tl.where(numbers == j, tl.sum(tl.where(bits >= low + step * (j + 1), weight, 0), 0), found)
        tl.store(pivot_weight_ptr + (here * num_chunks + tl.program_id(0)) * NARROWING_PIVOTS + numbers, found)


@triton.jit
def _gather_kernel(
    rows_ptr,
    top_k_ptr,
    top_p_ptr,
    remaining_ptr,
    row_share_ptr,
    cutoff_ptr,
    list_length_ptr,
    words_ptr,
    range_ptr,
    range_weight_ptr,
    pivot_weight_ptr,
    short_length_ptr,
    short_words_ptr,
    narrowed_ptr,
    narrowed_weight_ptr,
    vocab_size,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy what is in the range; count all of it, also beyond the room for it."""
    await_grid(PDL)
    i = tl.program_id(1).to(tl.int64)
    row = tl.maximum(tl.load(rows_ptr + i), 0)
    length = tl.load(list_length_ptr + i)
    top_p = tl.load(top_p_ptr + row * PAIRS)
    if is_narrowed(tl.load(remaining_ptr + i), tl.load(top_k_ptr + row * WORDS), top_p, length, CHUNK):
        low, high, above = _range_after(
            i,
            top_p * WEIGHT_OF_ONE,
            range_ptr,
            range_weight_ptr,
            pivot_weight_ptr,
            cutoff_ptr,
            row_share_ptr,
            tl.num_programs(0),
            NARROWING_ROUNDS,
            CHUNKS,
        )
        if tl.program_id(0) == 0:
            tl.store(narrowed_ptr + 2 * i, low)
            tl.store(narrowed_ptr + 2 * i + 1, high)
            tl.store(narrowed_weight_ptr + i, above)
        places = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
        bits = tl.load(words_ptr + i * vocab_size + places, mask=places < length, other=-1)
        inside = (bits >= low) & (bits < high)
        ones = inside.to(tl.int32)
        # Parts append in any order; nothing depends on it.
        target = tl.atomic_add(short_length_ptr + i, tl.sum(ones, 0), sem="relaxed") + tl.cumsum(ones, 0) - 1
        tl.store(short_words_ptr + i * CHUNK + target, bits, mask=inside & (target < CHUNK))


def narrow_ranges(rows: Tensor, columns: SamplingColumns, work: SamplingWorkspace) -> None:
    """Launch both stages; without work in a vocabulary of one chunk, which no list exceeds."""
    grid = chunk_grid(rows, work)
    if grid[0] == 1:
        return
    arguments = (
        rows,
        columns.column("top_k"),
        columns.column("top_p"),
        work.remaining,
        work.row_share,
        work.cutoff,
        work.list_length,
        work.words,
        work.ranges,
        work.range_weight,
        work.pivot_weight,
        work.short_length,
    )
    constants = {
        "CHUNK": work.chunk,
        "CHUNKS": triton.next_power_of_2(grid[0]),
        "num_warps": CHUNK_WARPS,
    } | dependent_launch(rows.device)
    for number in range(NARROWING_ROUNDS.value):
        _narrow_kernel[grid](*arguments, work.vocab_size, ROUND=number, **constants)
    _gather_kernel[grid](
        *arguments, work.short_words, work.narrowed, work.narrowed_weight, work.vocab_size, **constants
    )
