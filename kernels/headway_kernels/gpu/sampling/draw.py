"""Draw a token: invert the cumulative weights of the kept tokens at the row's uniform number.

Owns: the stages ``weigh`` and ``draw``. Must not know: truncation.
"""

import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.dependence import await_grid, dependent_launch
from headway_kernels.gpu.sampling.memory import CHUNK_WARPS, DONE, SamplingColumns, SamplingWorkspace, chunk_grid
from headway_kernels.gpu.sampling.numbers import (
    NEARLY,
    PAIRS,
    bits_of,
    from_bits,
    load_logits,
    probability_of,
    weight_of,
)

_RNG_ROUNDS = tl.constexpr(10)


@triton.jit
def _uniform(seed, position):
    """53 random bits in [0, 1): Philox4x32-10 under the key ``seed`` (Salmon et al., 2011)."""
    low = tl.full((), 0xFFFFFFFF, tl.uint64)
    k0 = seed & low
    k1 = seed >> 32
    c0 = position & low
    c1 = position >> 32
    c2 = tl.zeros((), tl.uint64)
    c3 = tl.zeros((), tl.uint64)
    for _ in range(_RNG_ROUNDS):
        product0 = c0 * tl.full((), 0xD2511F53, tl.uint64)
        product1 = c2 * tl.full((), 0xCD9E8D57, tl.uint64)
        c0 = (product1 >> 32) ^ c1 ^ k0
        c2 = (product0 >> 32) ^ c3 ^ k1
        c1 = product1 & low
        c3 = product0 & low
        k0 = (k0 + tl.full((), 0x9E3779B9, tl.uint64)) & low
        k1 = (k1 + tl.full((), 0xBB67AE85, tl.uint64)) & low
    return (((c1 << 32) | c0) >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _weigh_kernel(
    logits_ptr,
    logits_stride,
    remaining_ptr,
    row_max_ptr,
    row_scale_ptr,
    row_share_ptr,
    threshold_ptr,
    chunk_max_ptr,
    chunk_weight_ptr,
    chunk_ties_ptr,
    vocab_size,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_grid(PDL)
    i = tl.program_id(1).to(tl.int64)
    if tl.load(remaining_ptr + i) == DONE:
        return
    row_max = tl.load(row_max_ptr + i)
    row_scale = tl.load(row_scale_ptr + i)
    row_share = tl.load(row_share_ptr + i)
    threshold = tl.load(threshold_ptr + i)
    here = i * tl.num_programs(0) + tl.program_id(0)
    best = probability_of(tl.load(chunk_max_ptr + here), row_max, row_scale, row_share)
    if best * NEARLY < from_bits(tl.maximum(threshold, 0)):
        tl.store(chunk_weight_ptr + here, tl.zeros((), tl.int64))
        tl.store(chunk_ties_ptr + here, 0)
        return
    places = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    p = probability_of(load_logits(logits_ptr + i * logits_stride, places, vocab_size), row_max, row_scale, row_share)
    tl.store(chunk_weight_ptr + here, tl.sum(tl.where(bits_of(p) > threshold, weight_of(p), 0), 0))
    at_threshold = (bits_of(p) == threshold) & (places < vocab_size)
    tl.store(chunk_ties_ptr + here, tl.sum(at_threshold.to(tl.int32), 0))


@triton.jit
def _draw_kernel(
    logits_ptr,
    logits_stride,
    rows_ptr,
    positions_ptr,
    seed_ptr,
    remaining_ptr,
    row_max_ptr,
    row_scale_ptr,
    row_share_ptr,
    threshold_ptr,
    ties_kept_ptr,
    chunk_weight_ptr,
    chunk_ties_ptr,
    out_token_ids_ptr,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    await_grid(PDL)
    i = tl.program_id(0).to(tl.int64)
    if tl.load(remaining_ptr + i) == DONE:
        return
    row = tl.load(rows_ptr + i)
    threshold = tl.load(threshold_ptr + i)
    ties_kept = tl.load(ties_kept_ptr + i)
    chunks = tl.arange(0, CHUNKS)
    held = chunks < num_chunks
    weights = tl.load(chunk_weight_ptr + i * num_chunks + chunks, mask=held, other=0)
    ties = tl.load(chunk_ties_ptr + i * num_chunks + chunks, mask=held, other=0)
    ties_before = tl.cumsum(ties, 0) - ties
    kept = tl.minimum(tl.maximum(ties_kept - ties_before, 0), ties)
    weights += kept * weight_of(from_bits(tl.maximum(threshold, 0)))
    cumulative = tl.cumsum(weights, 0)
    total = tl.sum(weights, 0)

    seed = tl.load(seed_ptr + row * PAIRS).to(tl.uint64, bitcast=True)
    uniform = _uniform(seed, tl.load(positions_ptr + i).to(tl.uint64))
    target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    chunk = tl.sum((cumulative <= target).to(tl.int32), 0)
    target -= tl.sum(tl.where(chunks < chunk, weights, 0), 0)
    ties_kept -= tl.sum(tl.where(chunks < chunk, ties, 0), 0)

    places = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = load_logits(logits_ptr + i * logits_stride, places, vocab_size)
    p = probability_of(logits, tl.load(row_max_ptr + i), tl.load(row_scale_ptr + i), tl.load(row_share_ptr + i))
    bits = bits_of(p)
    at_threshold = (bits == threshold) & (places < vocab_size)
    rank = tl.cumsum(at_threshold.to(tl.int32), 0)
    weight = tl.where((bits > threshold) | (at_threshold & (rank <= ties_kept)), weight_of(p), 0)
    place = tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
    tl.store(out_token_ids_ptr + i, chunk * CHUNK + place)


def draw_tokens(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    columns: SamplingColumns,
    work: SamplingWorkspace,
    out_token_ids: Tensor,
) -> None:
    """Invert the kept weights of unfinished rows."""
    grid = chunk_grid(rows, work)
    _weigh_kernel[grid](
        logits,
        logits.stride(0),
        work.remaining,
        work.row_max,
        work.row_scale,
        work.row_share,
        work.threshold,
        work.chunk_max,
        work.chunk_weight,
        work.chunk_ties,
        work.vocab_size,
        CHUNK=work.chunk,
        num_warps=CHUNK_WARPS,
        **dependent_launch(rows.device),
    )
    _draw_kernel[(len(rows),)](
        logits,
        logits.stride(0),
        rows,
        positions,
        columns.column("seed"),
        work.remaining,
        work.row_max,
        work.row_scale,
        work.row_share,
        work.threshold,
        work.ties_kept,
        work.chunk_weight,
        work.chunk_ties,
        out_token_ids,
        work.vocab_size,
        grid[0],
        CHUNK=work.chunk,
        CHUNKS=triton.next_power_of_2(grid[0]),
        num_warps=CHUNK_WARPS,
        **dependent_launch(rows.device),
    )
