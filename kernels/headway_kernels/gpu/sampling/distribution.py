"""The distribution of each row: the largest logit, the sum of exponentials, the greedy token.

Owns: the stages ``statistics`` and ``merge``. Must not know: draws.
"""

import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.dependence import await_grid, dependent_launch
from headway_kernels.gpu.sampling.layout import RANDOM, RANKED
from headway_kernels.gpu.sampling.memory import (
    CHUNK_WARPS,
    DONE,
    DRAWS,
    DRAWS_RANKED,
    SamplingColumns,
    SamplingWorkspace,
    chunk_grid,
)
from headway_kernels.gpu.sampling.numbers import (
    LARGEST,
    PAIRS,
    WORDS,
    bits_of,
    finite_or_zero,
    fixed_point,
    load_logits,
    scale_of,
    share_beside,
    total_of,
)

_RANDOM = tl.constexpr(RANDOM)
_RANKED = tl.constexpr(RANKED)


@triton.jit
def statistics_kernel(
    logits_ptr,
    logits_stride,
    rows_ptr,
    temperature_ptr,
    chunk_max_ptr,
    chunk_place_ptr,
    chunk_sum_ptr,
    vocab_size,
    CHUNK: tl.constexpr,
    WITH_SUM: tl.constexpr,
    RAW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums are relative to the largest logit; RAW: at temperature 1."""
    await_grid(PDL)
    i = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + i)
    if row < 0:
        return
    places = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    logits = load_logits(logits_ptr + i * logits_stride, places, vocab_size)
    largest = tl.max(logits, 0)
    here = i * tl.num_programs(0) + tl.program_id(0)
    tl.store(chunk_max_ptr + here, largest)
    tl.store(chunk_place_ptr + here, tl.min(tl.where(logits == largest, places, LARGEST), 0))
    if WITH_SUM:
        scale = scale_of(tl.full((), 1.0, tl.float32) if RAW else tl.load(temperature_ptr + row * WORDS))
        # A float sum would depend on the compiler's layout, which depends on the type of the logits.
        shares = share_beside(logits, finite_or_zero(largest), scale)
        tl.store(chunk_sum_ptr + here, tl.sum(fixed_point(shares), 0))


@triton.jit
def _merge_kernel(
    rows_ptr,
    temperature_ptr,
    top_k_ptr,
    flags_ptr,
    min_p_ptr,
    chunk_max_ptr,
    chunk_place_ptr,
    chunk_sum_ptr,
    remaining_ptr,
    row_max_ptr,
    row_scale_ptr,
    row_share_ptr,
    threshold_ptr,
    ties_kept_ptr,
    list_length_ptr,
    out_token_ids_ptr,
    out_status_ptr,
    num_chunks,
    CHUNKS: tl.constexpr,
    RANDOM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge a row's chunks."""
    await_grid(PDL)
    i = tl.program_id(0)
    row = tl.load(rows_ptr + i)
    if row < 0:
        tl.store(out_token_ids_ptr + i, -1)
        tl.store(out_status_ptr + i, 0)
        tl.store(remaining_ptr + i, DONE)
        return
    chunks = tl.arange(0, CHUNKS)
    held = chunks < num_chunks
    chunk_max = tl.load(chunk_max_ptr + i * num_chunks + chunks, mask=held, other=float("-inf"))
    places = tl.load(chunk_place_ptr + i * num_chunks + chunks, mask=held, other=LARGEST)
    row_max = tl.max(chunk_max, 0)
    usable = (row_max > float("-inf")) & (row_max < float("inf"))
    place = tl.min(tl.where(chunk_max == row_max, places, LARGEST), 0)
    tl.store(out_token_ids_ptr + i, tl.where(usable, place, -1))
    tl.store(out_status_ptr + i, tl.where(usable, 0, 1))
    if RANDOM:
        flags = tl.load(flags_ptr + row * WORDS)
        temperature = tl.load(temperature_ptr + row * WORDS)
        scale = scale_of(temperature)
        sums = tl.load(chunk_sum_ptr + i * num_chunks + chunks, mask=held, other=0)
        total = total_of(chunk_max, sums, finite_or_zero(row_max), scale)
        share = tl.div_rn(tl.full((), 1.0, tl.float32), tl.where(usable, total, 1.0))
        ranked = tl.where((flags & _RANKED) != 0, DRAWS_RANKED, DRAWS)
        tl.store(remaining_ptr + i, tl.where(usable & ((flags & _RANDOM) != 0), ranked, DONE))
        tl.store(row_max_ptr + i, row_max)
        tl.store(row_scale_ptr + i, scale)
        tl.store(row_share_ptr + i, share)
        # exp2(0) is 1, so the best probability is the share itself. Min-p keeps this least, rounded up to a float32.
        least = tl.load(min_p_ptr + row * PAIRS) * share.to(tl.float64)
        rounded = least.to(tl.float32)
        bits = bits_of(rounded) + (rounded.to(tl.float64) < least).to(tl.int32)
        tl.store(threshold_ptr + i, bits - 1)
        tl.store(ties_kept_ptr + i, 0)
        tl.store(list_length_ptr + i, 0)


def launch_statistics(
    logits: Tensor, rows: Tensor, columns: SamplingColumns, work: SamplingWorkspace, *, with_sum: bool
) -> None:
    """Launch ``statistics``; ``with_sum`` if some row draws at random."""
    statistics_kernel[chunk_grid(rows, work)](
        logits,
        logits.stride(0),
        rows,
        columns.column("temperature"),
        work.chunk_max,
        work.chunk_place,
        work.chunk_sum,
        work.vocab_size,
        CHUNK=work.chunk,
        WITH_SUM=with_sum,
        RAW=False,
        num_warps=CHUNK_WARPS,
        **dependent_launch(rows.device),
    )


def launch_merge(
    rows: Tensor,
    columns: SamplingColumns,
    work: SamplingWorkspace,
    out_token_ids: Tensor,
    out_status: Tensor,
    *,
    random: bool,
) -> None:
    """Launch ``merge``; ``random`` if some row draws at random."""
    num_chunks = work.chunk_max.shape[1]
    _merge_kernel[(len(rows),)](
        rows,
        columns.column("temperature"),
        columns.column("top_k"),
        columns.column("flags"),
        columns.column("min_p"),
        work.chunk_max,
        work.chunk_place,
        work.chunk_sum,
        work.remaining,
        work.row_max,
        work.row_scale,
        work.row_share,
        work.threshold,
        work.ties_kept,
        work.list_length,
        out_token_ids,
        out_status,
        num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks),
        RANDOM=random,
        num_warps=1,
        **dependent_launch(rows.device),
    )
