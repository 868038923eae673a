"""Top-k and top-p without a sort: find the threshold of each row that has one of them.

Owns: the stages ``survey``, ``list`` and ``threshold``. Must not know: draws.
"""

import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.dependence import await_grid, dependent_launch
from headway_kernels.gpu.sampling.memory import (
    CHUNK_WARPS,
    DRAWS_RANKED,
    SURVEYED,
    SamplingColumns,
    SamplingWorkspace,
    chunk_grid,
)
from headway_kernels.gpu.sampling.narrowing import is_narrowed, narrow_ranges
from headway_kernels.gpu.sampling.numbers import (
    LARGEST,
    NEARLY,
    PAIRS,
    WEIGHT_OF_ONE,
    WORDS,
    bits_of,
    from_bits,
    load_logits,
    probability_of,
    weight_of,
)

_OCTAVES = tl.constexpr(3)
"""The survey looks at probabilities 2^-3, 2^-6, ... 2^-24."""

_SURELY = tl.constexpr(1.00001)
"""The survey's float32 sums may be off by 3 in a million; this margin is certain to be enough."""
_SEARCH_TILE = 1024
_SEARCH_WARPS = 8
_PIVOTS = 8


@triton.jit
def _survey_kernel(
    logits_ptr,
    logits_stride,
    rows_ptr,
    top_k_ptr,
    remaining_ptr,
    row_max_ptr,
    row_scale_ptr,
    row_share_ptr,
    chunk_survey_ptr,
    vocab_size,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Measure a number of tokens (with top-k), or probability."""
    await_grid(PDL)
    i = tl.program_id(1).to(tl.int64)
    if tl.load(remaining_ptr + i) != DRAWS_RANKED:
        return
    places = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    logits = load_logits(logits_ptr + i * logits_stride, places, vocab_size)
    p = probability_of(logits, tl.load(row_max_ptr + i), tl.load(row_scale_ptr + i), tl.load(row_share_ptr + i))
    counted = tl.load(top_k_ptr + tl.load(rows_ptr + i) * WORDS) > 0
    measured = tl.where(counted, 1.0, p)
    surveyed = tl.arange(0, SURVEYED)
    found = tl.zeros((SURVEYED,), tl.float32)
    for j in tl.static_range(SURVEYED):
        reach = bits_of(p) >= ((127 - _OCTAVES * (j + 1)) << 23)
        found = tl.where(surveyed == j, tl.sum(tl.where(reach, measured, 0.0), 0), found)
    here = chunk_survey_ptr + (i * tl.num_programs(0) + tl.program_id(0)) * SURVEYED
    tl.store(here + surveyed, found)


@triton.jit
def _list_kernel(
    logits_ptr,
    logits_stride,
    rows_ptr,
    top_k_ptr,
    top_p_ptr,
    remaining_ptr,
    row_max_ptr,
    row_scale_ptr,
    row_share_ptr,
    chunk_max_ptr,
    chunk_survey_ptr,
    cutoff_ptr,
    list_length_ptr,
    words_ptr,
    vocab_size,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose the highest cutoff that surely keeps enough."""
    await_grid(PDL)
    i = tl.program_id(1).to(tl.int64)
    if tl.load(remaining_ptr + i) != DRAWS_RANKED:
        return
    row = tl.load(rows_ptr + i)
    num_chunks = tl.num_programs(0)
    chunks = tl.arange(0, CHUNKS)
    surveyed = tl.arange(0, SURVEYED)
    cells = (i * num_chunks + chunks[:, None]) * SURVEYED + surveyed[None, :]
    measure = tl.sum(tl.load(chunk_survey_ptr + cells, mask=(chunks < num_chunks)[:, None], other=0.0), 0)
    top_k = tl.load(top_k_ptr + row * WORDS)
    top_p = tl.load(top_p_ptr + row * PAIRS).to(tl.float32)
    enough = tl.where(top_k > 0, top_k.to(tl.float32), top_p * _SURELY)
    choice = tl.min(tl.where(measure >= enough, surveyed, SURVEYED), 0)
    cutoff = tl.where(choice < SURVEYED, (127 - _OCTAVES * (choice + 1)) << 23, 0)
    if tl.program_id(0) == 0:
        tl.store(cutoff_ptr + i, cutoff)
    row_max = tl.load(row_max_ptr + i)
    row_scale = tl.load(row_scale_ptr + i)
    row_share = tl.load(row_share_ptr + i)
    best = probability_of(tl.load(chunk_max_ptr + i * num_chunks + tl.program_id(0)), row_max, row_scale, row_share)
    if best * NEARLY < from_bits(cutoff):
        return
    places = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    logits = load_logits(logits_ptr + i * logits_stride, places, vocab_size)
    bits = bits_of(probability_of(logits, row_max, row_scale, row_share))
    listed = (bits >= cutoff) & (places < vocab_size)
    ones = listed.to(tl.int32)
    # Chunks append in any order; nothing depends on it.
    first = tl.atomic_add(list_length_ptr + i, tl.sum(ones, 0), sem="relaxed")
    tl.store(words_ptr + i * vocab_size + first + tl.cumsum(ones, 0) - 1, bits, mask=listed)


@triton.jit
def _search(
    list_ptr, length, low, high, above, need, BY_WEIGHT: tl.constexpr, TILE: tl.constexpr, PIVOTS: tl.constexpr
):
    """Find the highest threshold at and above which the listed tokens suffice for ``need``, a weight or a number.

    They must not suffice at ``high``, from which on tokens weigh ``above``; other lists end below ``high``. If they do not suffice at ``low`` either, all of them lie above the threshold, or
    more are needed at it than there are. Returns the threshold, and the weight and number of tokens above it.
    """
    steps = tl.arange(0, PIVOTS) + 1
    above_weight = above
    end = high
    above_count = tl.zeros((), tl.int32)
    while high - low > 1:
        pivots = low + (high - low + PIVOTS) // (PIVOTS + 1) * steps
        weights = tl.zeros((PIVOTS,), tl.int64) + above
        counts = tl.zeros((PIVOTS,), tl.int32)
        least = tl.full((TILE,), LARGEST, tl.int32)
        most = tl.full((TILE,), -1, tl.int32)
        for start in range(0, length, TILE):
            places = start + tl.arange(0, TILE)
            bits = tl.load(list_ptr + places, mask=places < length, other=LARGEST)
            held = bits < end
            weight = weight_of(from_bits(tl.where(held, bits, 0)))
            reach = held[:, None] & (bits[:, None] >= pivots[None, :])
            counts += tl.sum(reach.to(tl.int32), 0)
            weights += tl.sum(tl.where(reach, weight[:, None], 0), 0)
            inside = held & (bits >= low) & (bits < high)
            least = tl.where(inside, tl.minimum(least, bits), least)
            most = tl.where(inside, tl.maximum(most, bits), most)
        suffices = (weights if BY_WEIGHT else counts).to(tl.float64) >= need
        lowest = tl.min(least, 0)
        highest = tl.max(most, 0)
        next_high = tl.min(tl.where(suffices, high, tl.minimum(pivots, high)), 0)
        is_next = (pivots == next_high) & (next_high < high)
        above_weight = tl.where(next_high < high, tl.sum(tl.where(is_next, weights, 0), 0), above_weight)
        above_count = tl.where(next_high < high, tl.sum(tl.where(is_next, counts, 0), 0), above_count)
        # If nothing suffices (rounding may put a top-p out of reach), all tokens must end up above the threshold, so
        # the range does not shrink beyond its new end.
        low = tl.minimum(tl.maximum(tl.max(tl.where(suffices, pivots, low), 0), lowest), next_high - 1)
        high = tl.minimum(next_high, highest + 1)
    return low, above_weight, above_count


@triton.jit
def _threshold_kernel(
    rows_ptr,
    top_k_ptr,
    top_p_ptr,
    remaining_ptr,
    row_share_ptr,
    cutoff_ptr,
    list_length_ptr,
    words_ptr,
    threshold_ptr,
    ties_kept_ptr,
    narrowed_ptr,
    narrowed_weight_ptr,
    short_length_ptr,
    short_words_ptr,
    vocab_size,
    TILE: tl.constexpr,
    PIVOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Apply top-k, then top-p to the rest; then take the stricter of that and min-p."""
    await_grid(PDL)
    i = tl.program_id(0).to(tl.int64)
    if tl.load(remaining_ptr + i) != DRAWS_RANKED:
        return
    row = tl.load(rows_ptr + i)
    top_k = tl.load(top_k_ptr + row * WORDS)
    top_p = tl.load(top_p_ptr + row * PAIRS)
    list_ptr = words_ptr + i * vocab_size
    length = tl.load(list_length_ptr + i)
    above_all = bits_of(tl.load(row_share_ptr + i)) + 1
    threshold = tl.load(cutoff_ptr + i)
    ties_kept = tl.full((), LARGEST, tl.int32)
    mass = tl.full((), WEIGHT_OF_ONE, tl.float64)
    above = tl.zeros((), tl.int64)
    if is_narrowed(DRAWS_RANKED, top_k, top_p, length, CHUNK):
        threshold = tl.load(narrowed_ptr + 2 * i)
        above_all = tl.load(narrowed_ptr + 2 * i + 1)
        above = tl.load(narrowed_weight_ptr + i)
        short_length = tl.load(short_length_ptr + i)
        if short_length <= CHUNK:
            list_ptr = short_words_ptr + i * CHUNK
            length = short_length
    if top_k > 0:
        threshold, weight, count = _search(
            list_ptr, length, threshold, above_all, above, top_k.to(tl.float64), False, TILE, PIVOTS
        )
        ties_kept = top_k - count
        mass = (weight + ties_kept * weight_of(from_bits(threshold))).to(tl.float64)
    if top_p < 1.0:
        need = top_p * mass
        threshold, weight, count = _search(list_ptr, length, threshold, above_all, above, need, True, TILE, PIVOTS)
        whole = need.to(tl.int64)
        whole += (whole.to(tl.float64) < need).to(tl.int64)
        each = tl.maximum(weight_of(from_bits(threshold)), 1)
        ties_kept = tl.minimum((whole - weight + each - 1) // each, vocab_size).to(tl.int32)
    least = tl.load(threshold_ptr + i)
    tl.store(threshold_ptr + i, tl.maximum(threshold, least))
    tl.store(ties_kept_ptr + i, tl.where(least >= threshold, 0, ties_kept))


def find_thresholds(logits: Tensor, rows: Tensor, columns: SamplingColumns, work: SamplingWorkspace) -> None:
    """Find the thresholds of the rows with top-k or top-p."""
    grid = chunk_grid(rows, work)
    top_k, top_p = columns.column("top_k"), columns.column("top_p")
    _survey_kernel[grid](
        logits,
        logits.stride(0),
        rows,
        top_k,
        work.remaining,
        work.row_max,
        work.row_scale,
        work.row_share,
        work.chunk_survey,
        work.vocab_size,
        CHUNK=work.chunk,
        num_warps=CHUNK_WARPS,
        **dependent_launch(rows.device),
    )
    _list_kernel[grid](
        logits,
        logits.stride(0),
        rows,
        top_k,
        top_p,
        work.remaining,
        work.row_max,
        work.row_scale,
        work.row_share,
        work.chunk_max,
        work.chunk_survey,
        work.cutoff,
        work.list_length,
        work.words,
        work.vocab_size,
        CHUNK=work.chunk,
        CHUNKS=triton.next_power_of_2(grid[0]),
        num_warps=CHUNK_WARPS,
        **dependent_launch(rows.device),
    )
    narrow_ranges(rows, columns, work)
    _threshold_kernel[(len(rows),)](
        rows,
        top_k,
        top_p,
        work.remaining,
        work.row_share,
        work.cutoff,
        work.list_length,
        work.words,
        work.threshold,
        work.ties_kept,
        work.narrowed,
        work.narrowed_weight,
        work.short_length,
        work.short_words,
        work.vocab_size,
        TILE=_SEARCH_TILE,
        PIVOTS=_PIVOTS,
        CHUNK=work.chunk,
        num_warps=_SEARCH_WARPS,
        **dependent_launch(rows.device),
    )
