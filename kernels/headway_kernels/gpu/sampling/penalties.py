"""Adjust logits before a draw: penalties, logit bias, and excluded stop tokens.

Owns: counters of tokens, the adjusted logits. Must not know: draws.
"""

import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.dependence import await_grid, dependent_launch
from headway_kernels.gpu.sampling.layout import PENALTIES
from headway_kernels.gpu.sampling.memory import CHUNK_WARPS, SamplingColumns, SamplingWorkspace, chunk_grid
from headway_kernels.gpu.sampling.numbers import WORDS

_SEEN = tl.constexpr(1 << 30)
_PENALTIES = tl.constexpr(PENALTIES)
_HISTORY_PARTS = 16
_HISTORY_TILE = 512
_ENTRY_TILE = 256


@triton.jit
def _clear_kernel(
    rows_ptr,
    flags_ptr,
    words_ptr,
    vocab_size,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_grid(PDL)
    i = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + i)
    if row < 0:
        return
    if tl.load(flags_ptr + row * WORDS) & _PENALTIES == 0:
        return
    places = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    tl.store(words_ptr + i * vocab_size + places, tl.zeros((CHUNK,), tl.int32), mask=places < vocab_size)


@triton.jit
def _count_kernel(
    rows_ptr,
    positions_ptr,
    flags_ptr,
    num_prompt_tokens_ptr,
    store_ptr,
    store_stride,
    words_ptr,
    vocab_size,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count each generated token, and mark each token of the prompt."""
    await_grid(PDL)
    i = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + i).to(tl.int64)
    if row < 0:
        return
    if tl.load(flags_ptr + row * WORDS) & _PENALTIES == 0:
        return
    position = tl.load(positions_ptr + i)
    num_prompt_tokens = tl.load(num_prompt_tokens_ptr + row * WORDS)
    counters = words_ptr + i * vocab_size
    for start in range(tl.program_id(0) * TILE, position, PARTS * TILE):
        places = start + tl.arange(0, TILE)
        held = places < position
        token_ids = tl.load(store_ptr + row * store_stride + places, mask=held, other=0)
        # A failed row may run once more; its stored token must not lead outside.
        token_ids = tl.minimum(tl.maximum(token_ids, 0), vocab_size - 1)
        in_prompt = places < num_prompt_tokens
        # The two commute, since the count never reaches the mark.
        tl.atomic_or(counters + token_ids, tl.full((TILE,), _SEEN, tl.int32), mask=held & in_prompt, sem="relaxed")
        tl.atomic_add(
            counters + token_ids,
            tl.full((TILE,), 1, tl.int32),
            mask=held & (places >= num_prompt_tokens),
            sem="relaxed",
        )


@triton.jit
def _adjust_kernel(
    logits_ptr,
    logits_stride,
    rows_ptr,
    flags_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    words_ptr,
    adjusted_ptr,
    vocab_size,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_grid(PDL)
    i = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + i)
    if row < 0:
        return
    places = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = places < vocab_size
    logits = tl.load(logits_ptr + i * logits_stride + places, mask=inside, other=0.0).to(tl.float32)
    if tl.load(flags_ptr + row * WORDS) & _PENALTIES != 0:
        repetition = tl.load(repetition_ptr + row * WORDS)
        presence = tl.load(presence_ptr + row * WORDS)
        frequency = tl.load(frequency_ptr + row * WORDS)
        word = tl.load(words_ptr + i * vocab_size + places, mask=inside, other=0)
        count = (word & (_SEEN - 1)).to(tl.float32)
        repeated = tl.where(logits > 0, tl.div_rn(logits, tl.zeros_like(logits) + repetition), logits * repetition)
        logits = tl.where(word != 0, repeated, logits)
        logits = logits - frequency * count
        logits = logits - tl.where(count > 0, presence, 0.0)
    tl.store(adjusted_ptr + i * vocab_size + places, logits, mask=inside)


@triton.jit
def _entries_kernel(
    rows_ptr,
    positions_ptr,
    num_prompt_tokens_ptr,
    min_tokens_ptr,
    first_entry_ptr,
    end_entry_ptr,
    entry_token_ids_ptr,
    entry_biases_ptr,
    adjusted_ptr,
    vocab_size,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    await_grid(PDL)
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + i)
    if row < 0:
        return
    num_generated = tl.load(positions_ptr + i) - tl.load(num_prompt_tokens_ptr + row * WORDS)
    too_short = num_generated < tl.load(min_tokens_ptr + row * WORDS)
    end = tl.load(end_entry_ptr + row * WORDS)
    for start in range(tl.load(first_entry_ptr + row * WORDS), end, TILE):
        entries = start + tl.arange(0, TILE)
        held = entries < end
        stored = tl.load(entry_token_ids_ptr + entries, mask=held, other=0)
        bias = tl.load(entry_biases_ptr + entries, mask=held, other=0.0)
        place = adjusted_ptr + i * vocab_size + tl.where(stored < 0, ~stored, stored)
        logits = tl.load(place, mask=held, other=0.0) + bias
        tl.store(place, tl.where((stored < 0) & too_short, float("-inf"), logits), mask=held)


def adjust_logits(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    columns: SamplingColumns,
    token_store: Tensor,
    work: SamplingWorkspace,
) -> None:
    """Fill ``adjusted`` with the logits to draw from."""
    flags, num_prompt_tokens = columns.column("flags"), columns.column("num_prompt_tokens")
    grid, dependent = chunk_grid(rows, work), dependent_launch(rows.device)
    _clear_kernel[grid](rows, flags, work.words, work.vocab_size, CHUNK=work.chunk, num_warps=CHUNK_WARPS, **dependent)
    _count_kernel[_HISTORY_PARTS, len(rows)](
        rows,
        positions,
        flags,
        num_prompt_tokens,
        token_store,
        token_store.stride(0),
        work.words,
        work.vocab_size,
        PARTS=_HISTORY_PARTS,
        TILE=_HISTORY_TILE,
        **dependent,
    )
    # Without fusion the penalties round as in every other implementation.
    _adjust_kernel[grid](
        logits,
        logits.stride(0),
        rows,
        flags,
        columns.column("repetition"),
        columns.column("presence"),
        columns.column("frequency"),
        work.words,
        work.adjusted,
        work.vocab_size,
        CHUNK=work.chunk,
        num_warps=CHUNK_WARPS,
        enable_fp_fusion=False,
        **dependent,
    )
    _entries_kernel[(len(rows),)](
        rows,
        positions,
        num_prompt_tokens,
        columns.column("min_tokens"),
        columns.column("first_entry"),
        columns.column("end_entry"),
        columns.entry_token_ids,
        columns.entry_biases,
        work.adjusted,
        work.vocab_size,
        TILE=_ENTRY_TILE,
        **dependent,
    )
