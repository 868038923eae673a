"""Columns of rows: from a step's rows to the model's input per token, and back.

Owns: moves between columns, the stores and flat tensors. Must not know: the model.

The *token store* is int32 ``[max_rows, width]``, by position. *Block tables* are int32 ``[max_rows, max_blocks]``. A
*slot* is block times block size plus offset. A row or index of -1 is padding.
"""

import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.dependence import await_grid, dependent_launch

CHANNELS_PER_PROGRAM = 1024
"""Channels of a gathered row; 16 bytes per thread if elements have 2 bytes."""
ENTRIES_PER_PROGRAM = 128
"""Entries of a column: one per thread, since each is a chain of dependent loads."""
NUM_WARPS = 4


def gather_rows(source: Tensor, index: Tensor, out: Tensor) -> None:
    """``out[i] = source[index[i]]``; an index of -1 leaves ``out[i]``.

    ``source`` ``[T, C]`` and ``out`` ``[n, C]``, one dtype, any stride between rows; ``index`` int32 ``[n]``.
    """
    num_rows, width = out.shape
    if num_rows == 0:
        return
    _gather_rows[(num_rows, triton.cdiv(width, CHANNELS_PER_PROGRAM))](
        source,
        index,
        out,
        source.stride(0),
        out.stride(0),
        WIDTH=width,
        BLOCK=CHANNELS_PER_PROGRAM,
        num_warps=NUM_WARPS,
        **dependent_launch(out.device),
    )


def expand_rows(
    rows: Tensor,
    query_start: Tensor,
    first_position: Tensor,
    token_store: Tensor,
    block_tables: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    *,
    block_size: int,
) -> None:
    """Compute the model's input for each token of a step.

    ``rows`` and ``query_start`` as in ``AttentionRows``; ``first_position`` int32 ``[R]``. The stores may have any row
    stride. Writes ``token_ids``, ``positions`` and ``slots``, int32 ``[T]``; padding tokens get 0, 0 and -1.
    """
    num_tokens, num_rows = token_ids.shape[0], rows.shape[0]
    if num_tokens == 0:
        return
    _expand_rows[(triton.cdiv(num_tokens, ENTRIES_PER_PROGRAM),)](
        rows,
        query_start,
        first_position,
        token_store,
        block_tables,
        token_ids,
        positions,
        slots,
        token_store.stride(0),
        block_tables.stride(0),
        num_rows,
        num_tokens,
        num_rows.bit_length(),
        BLOCK_SIZE=block_size,
        BLOCK=ENTRIES_PER_PROGRAM,
        num_warps=NUM_WARPS,
        **dependent_launch(rows.device),
    )


def apply_edits(
    token_store: Tensor,
    block_tables: Tensor,
    *,
    edit_rows: Tensor,
    edit_places: Tensor,
    edit_blocks: Tensor,
    token_rows: Tensor,
    token_starts: Tensor,
    tokens: Tensor,
) -> None:
    """Update the stores: ``block_tables[row, place] = block``, and the tokens of new rows from position 0.

    ``edit_rows``, ``edit_places``, ``edit_blocks`` int32 ``[n]``, no place twice. ``token_rows`` int32 ``[m]``;
    ``token_starts`` int32 ``[m + 1]``, ascending from 0, indices into ``tokens`` int32. Never capture this.
    """
    num_edits, num_rows, num_tokens = edit_rows.shape[0], token_rows.shape[0], tokens.shape[0]
    if num_edits:
        _edit_tables[(triton.cdiv(num_edits, ENTRIES_PER_PROGRAM),)](
            edit_rows,
            edit_places,
            edit_blocks,
            block_tables,
            block_tables.stride(0),
            num_edits,
            BLOCK=ENTRIES_PER_PROGRAM,
            num_warps=NUM_WARPS,
        )
    if num_rows and num_tokens:
        _store_tokens[(triton.cdiv(num_tokens, ENTRIES_PER_PROGRAM),)](
            token_rows,
            token_starts,
            tokens,
            token_store,
            token_store.stride(0),
            num_rows,
            num_tokens,
            num_rows.bit_length(),
            BLOCK=ENTRIES_PER_PROGRAM,
            num_warps=NUM_WARPS,
        )


def store_sampled(sampled: Tensor, rows: Tensor, positions: Tensor, token_store: Tensor) -> None:
    """``token_store[rows[i], positions[i]] = max(sampled[i], 0)``, the next step's input.

    All int32 ``[n]``. A negative sample is a failure; the model must still find it in its vocabulary.
    """
    num_sampled = sampled.shape[0]
    if num_sampled == 0:
        return
    _store_sampled[(triton.cdiv(num_sampled, ENTRIES_PER_PROGRAM),)](
        sampled,
        rows,
        positions,
        token_store,
        token_store.stride(0),
        num_sampled,
        BLOCK=ENTRIES_PER_PROGRAM,
        num_warps=NUM_WARPS,
        **dependent_launch(sampled.device),
    )


# Columns are slices of packed buffers, and counts change from step to step. Neither may need its own variant of a
# kernel: Triton would compile it while requests wait.


@triton.jit(do_not_specialize_on_alignment=["index"])
def _gather_rows(
    source, index, out, source_stride, out_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    await_grid(PDL)
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(index + row).to(tl.int64)
    # Not "& (chosen >= 0)": Triton's interpreter cannot broadcast what comparing a scalar gives.
    within = tl.where(channels < WIDTH, chosen, -1) >= 0
    values = tl.load(source + chosen * source_stride + channels, mask=within)
    tl.store(out + row * out_stride + channels, values, mask=within)


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "search_steps"],
    do_not_specialize_on_alignment=["rows", "query_start", "first_position", "token_ids", "positions", "slots"],
)
def _expand_rows(
    rows,
    query_start,
    first_position,
    token_store,
    block_tables,
    token_ids,
    positions,
    slots,
    store_stride,
    table_stride,
    num_rows,
    num_tokens,
    search_steps,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_grid(PDL)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = tokens < num_tokens
    live = within & (tokens < tl.load(query_start + num_rows))
    entry = _entry_of(tokens, query_start, num_rows, live, search_steps)
    row = tl.load(rows + entry, mask=live, other=0).to(tl.int64)
    offset = tokens - tl.load(query_start + entry, mask=live, other=0)
    position = tl.load(first_position + entry, mask=live, other=0) + offset
    token = tl.load(token_store + row * store_stride + position, mask=live, other=0)
    block = tl.load(block_tables + row * table_stride + position // BLOCK_SIZE, mask=live, other=0)
    tl.store(token_ids + tokens, token, mask=within)
    tl.store(positions + tokens, tl.where(live, position, 0), mask=within)
    tl.store(slots + tokens, tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, -1), mask=within)


@triton.jit(do_not_specialize=["num_edits"], do_not_specialize_on_alignment=["edit_rows", "edit_places", "edit_blocks"])
def _edit_tables(edit_rows, edit_places, edit_blocks, block_tables, table_stride, num_edits, BLOCK: tl.constexpr):
    edits = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = edits < num_edits
    row = tl.load(edit_rows + edits, mask=within, other=-1).to(tl.int64)
    place = tl.load(edit_places + edits, mask=within, other=0)
    block = tl.load(edit_blocks + edits, mask=within, other=0)
    tl.store(block_tables + row * table_stride + place, block, mask=row >= 0)


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "search_steps"],
    do_not_specialize_on_alignment=["token_rows", "token_starts", "tokens"],
)
def _store_tokens(
    token_rows,
    token_starts,
    tokens,
    token_store,
    store_stride,
    num_rows,
    num_tokens,
    search_steps,
    BLOCK: tl.constexpr,
):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = (places < num_tokens) & (places < tl.load(token_starts + num_rows))
    entry = _entry_of(places, token_starts, num_rows, live, search_steps)
    row = tl.load(token_rows + entry, mask=live, other=-1).to(tl.int64)
    position = places - tl.load(token_starts + entry, mask=live, other=0)
    token = tl.load(tokens + places, mask=live, other=0)
    tl.store(token_store + row * store_stride + position, token, mask=row >= 0)


@triton.jit(do_not_specialize=["num_sampled"], do_not_specialize_on_alignment=["sampled", "rows", "positions"])
def _store_sampled(
    sampled, rows, positions, token_store, store_stride, num_sampled, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    await_grid(PDL)
    samples = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = samples < num_sampled
    row = tl.load(rows + samples, mask=within, other=-1).to(tl.int64)
    position = tl.load(positions + samples, mask=within, other=0)
    token = tl.load(sampled + samples, mask=within, other=0)
    tl.store(token_store + row * store_stride + position, tl.maximum(token, 0), mask=row >= 0)


@triton.jit
def _entry_of(places, starts, count, live, search_steps):
    """Find the last entry that starts at or before each place, by bisection; -1 if it is not ``live``.

    ``starts`` ascend, ``[count + 1]``; ``search_steps`` is the bit length of ``count``.
    """
    low = tl.zeros_like(places)
    high = low + count
    for _ in range(search_steps):
        middle = (low + high) // 2
        searching = live & (low < high)
        passed = searching & (tl.load(starts + middle, mask=searching, other=0) <= places)
        low = tl.where(passed, middle + 1, low)
        high = tl.where(searching & (passed == 0), middle, high)
    return low - 1
