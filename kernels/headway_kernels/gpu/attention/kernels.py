"""The attention kernels: the plan of a step, its chunks, and its decodes with the joining of splits.

Owns: how a grid goes through a batch. Must not know: launches.
"""

import triton
import triton.language as tl

from headway_kernels.gpu.attention.tiles import (
    LOG2_E,
    MAX_SPLITS,
    NEVER,
    attend_tile,
    count_splits,
    cut_decode,
    find_row,
    head_in_block,
    join_splits,
    load_blocks,
    load_exponents,
    load_first,
    load_slopes,
    start_of_share,
)
from headway_kernels.gpu.dependence import await_grid

ROW_COLUMNS = ["rows", "query_start", "kv_length", "split_ends", "tile_ends", "splits_per_item"]
"""Columns of a step's rows. They may be parts of others, which are aligned or not with the number of rows: a kernel is not
compiled for either.
"""

_LEAST = tl.constexpr(-1.0e30)
"""The start of a running maximum: finite, so that a tile that a query does not see leaves no NaN (-inf - -inf)."""


@triton.jit
def _begin(sinks, slopes, head, nothing, HAS_SINKS: tl.constexpr, ALIBI: tl.constexpr, QUERY_TILE: tl.constexpr):
    """The running maximum and total before any key: a sink has a weight and no value. And the slopes, see ``load_slopes``."""
    if HAS_SINKS:
        maximum = tl.load(sinks + head) * LOG2_E
        total = tl.full([QUERY_TILE], 1.0, dtype=tl.float32)
    else:
        maximum = tl.full([QUERY_TILE], _LEAST, dtype=tl.float32)
        total = tl.zeros([QUERY_TILE], dtype=tl.float32)
    return maximum, total, load_slopes(slopes, head, nothing, ALIBI)


@triton.jit
def _load_queries(
    vectors,
    real,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    SHARED: tl.constexpr,
    PADDED_SHARED: tl.constexpr,
):
    """The ``real`` ones, and what meets the channels that all heads share, the first of each; without any, anything."""
    component = tl.arange(0, PADDED_HEAD_DIM)
    wanted = real[:, None] & (component < HEAD_DIM)[None, :]
    queries = tl.load(vectors[:, None] + (SHARED + component)[None, :], mask=wanted, other=0.0)
    shared = queries
    if SHARED:
        channel = tl.arange(0, PADDED_SHARED)
        wanted = real[:, None] & (channel < SHARED)[None, :]
        shared = tl.load(vectors[:, None] + channel[None, :], mask=wanted, other=0.0)
    return queries, shared


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=ROW_COLUMNS)
def plan_kernel(
    query_start,
    kv_length,
    split_ends,
    tile_ends,
    splits_per_item,
    num_rows,
    MOST_ITEMS: tl.constexpr,
    MOST_TOKENS: tl.constexpr,
    TOKENS_PER_TILE: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program counts the items and query tiles of all rows of up to ``MOST_TOKENS``.

    Beyond ``MOST_ITEMS``, an item is several splits. With a row of length 0, nothing attends.
    """
    await_grid(PDL)
    row = tl.arange(0, PADDED_ROWS)
    real = row < num_rows
    start = tl.load(query_start + row, mask=real, other=0)
    num_tokens = tl.load(query_start + row + 1, mask=real, other=0) - start
    length = tl.load(kv_length + row, mask=real, other=0)
    splits = tl.where((num_tokens == 1) & (length > 0), count_splits(length), 0)
    together = tl.maximum(tl.cdiv(tl.sum(splits, 0), MOST_ITEMS), 1)
    is_chunk = (num_tokens > 1) & (num_tokens <= MOST_TOKENS) & (length > 0)
    tiles = tl.where(is_chunk, tl.cdiv(num_tokens, TOKENS_PER_TILE), 0)
    tl.store(splits_per_item, together)
    tl.store(split_ends + row, tl.cumsum(tl.cdiv(splits, together), 0), mask=real)
    tl.store(tile_ends + row, tl.cumsum(tiles, 0), mask=real)


@triton.jit(do_not_specialize=["num_rows", "window"], do_not_specialize_on_alignment=ROW_COLUMNS)
def chunk_kernel(
    query,
    pool,
    sinks,
    slopes,
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
    BLOCK_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    SHARED: tl.constexpr,
    PADDED_SHARED: tl.constexpr,
    CODED: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    TOKENS: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """An item is a query tile of a row and a key-value head, with all its query heads.

    Tokens are consecutive, so that they and the diagonal stay close together.
    """
    await_grid(PDL)
    num_items = tl.load(tile_ends + num_rows - 1) * NUM_KV_HEADS
    vector = tl.arange(0, QUERY_TILE)
    component = tl.arange(0, PADDED_HEAD_DIM)
    in_head = component < HEAD_DIM
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        kv_head = item % NUM_KV_HEADS
        ordinal = item // NUM_KV_HEADS
        row, _, after = find_row(tile_ends, ordinal, num_rows, PADDED_ROWS)
        # The last tile of a row sees most, so it comes first: no program then ends with a long one.
        first_token = (after - 1 - ordinal) * TOKENS
        start = tl.load(query_start + row)
        num_tokens = tl.load(query_start + row + 1) - start
        past = tl.load(kv_length + row) - num_tokens
        table = block_tables + tl.load(rows + row).to(tl.int64) * table_stride
        token = first_token + vector // GROUP
        real = (token < num_tokens) & (vector < TOKENS * GROUP)
        head = kv_head * GROUP + vector % GROUP
        line = (start + token).to(tl.int64)
        vectors = query + line * query_stride + head * (SHARED + HEAD_DIM)
        queries, shared_queries = _load_queries(vectors, real, HEAD_DIM, PADDED_HEAD_DIM, SHARED, PADDED_SHARED)

        # Queries see tiles [low, full_low) and [full_high, high) in part: the window's edge and the diagonal.
        lowest = past + first_token
        end = past + tl.minimum(first_token + TOKENS, num_tokens)
        # A padding vector attends as the last token does, so that it sees something; it is not stored.
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
        maximum, total, of_heads = _begin(sinks, slopes, head, window, HAS_SINKS, ALIBI, QUERY_TILE)
        keys, exponents = head_in_block(pool, kv_head, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, SHARED)
        block, of_keys, of_values = load_first(
            table, exponents, full_low, begin, end, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, CODED, SHARED, KEY_TILE
        )
        for tile in range(full_low, full_high):
            following = load_blocks(table, tile + 1, begin, end, BLOCK_SIZE, KEY_TILE)
            weighted, maximum, total = attend_tile(
                queries,
                shared_queries,
                query_position,
                weighted,
                maximum,
                total,
                keys,
                block,
                of_keys,
                of_values,
                tile,
                begin,
                end,
                window,
                of_heads,
                factor,
                cap,
                False,
                NUM_KV_HEADS,
                BLOCK_SIZE,
                BLOCK_STRIDE,
                HEAD_DIM,
                PADDED_HEAD_DIM,
                SHARED,
                PADDED_SHARED,
                CODED,
                HAS_E4M3,
                KEY_TILE,
                HAS_WINDOW,
                HAS_SOFT_CAP,
                ALIBI,
            )
            block = following
            of_keys, of_values = load_exponents(
                exponents, block, tile + 1, begin, end, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, CODED, SHARED, KEY_TILE
            )
        tile = tl.where(low < full_low, low, full_high)
        block, of_keys, of_values = load_first(
            table, exponents, tile, begin, end, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, CODED, SHARED, KEY_TILE
        )
        for _ in range(num_masked):
            next_tile = tl.where(tile + 1 == full_low, full_high, tile + 1)
            following = load_blocks(table, next_tile, begin, end, BLOCK_SIZE, KEY_TILE)
            weighted, maximum, total = attend_tile(
                queries,
                shared_queries,
                query_position,
                weighted,
                maximum,
                total,
                keys,
                block,
                of_keys,
                of_values,
                tile,
                begin,
                end,
                window,
                of_heads,
                factor,
                cap,
                True,
                NUM_KV_HEADS,
                BLOCK_SIZE,
                BLOCK_STRIDE,
                HEAD_DIM,
                PADDED_HEAD_DIM,
                SHARED,
                PADDED_SHARED,
                CODED,
                HAS_E4M3,
                KEY_TILE,
                HAS_WINDOW,
                HAS_SOFT_CAP,
                ALIBI,
            )
            tile = next_tile
            block = following
            of_keys, of_values = load_exponents(
                exponents, block, tile, begin, end, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, CODED, SHARED, KEY_TILE
            )
        pointers = out + (line * out_stride + head * HEAD_DIM)[:, None] + component[None, :]
        result = (weighted / total[:, None]).to(out.dtype.element_ty)
        tl.store(pointers, result, mask=real[:, None] & in_head[None, :])


@triton.jit(do_not_specialize=["num_rows", "window"], do_not_specialize_on_alignment=ROW_COLUMNS)
def decode_kernel(
    query,
    pool,
    sinks,
    slopes,
    out,
    partial,
    log_sum_exp,
    arrived,
    rows,
    query_start,
    kv_length,
    block_tables,
    split_ends,
    splits_per_item,
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
    BLOCK_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    SHARED: tl.constexpr,
    PADDED_SHARED: tl.constexpr,
    CODED: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """An item is some splits of a row and a key-value head, with all its query heads. A row's last item joins them.

    The number of items of a row changes no split and not the order in which they are joined.
    """
    await_grid(PDL)
    num_items = tl.load(split_ends + num_rows - 1) * NUM_KV_HEADS
    member = tl.arange(0, QUERY_TILE)
    component = tl.arange(0, PADDED_HEAD_DIM)
    real = (member < GROUP)[:, None] & (component < HEAD_DIM)[None, :]
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        kv_head = item % NUM_KV_HEADS
        ordinal = item // NUM_KV_HEADS
        row, first_ordinal, _ = find_row(split_ends, ordinal, num_rows, PADDED_ROWS)
        number = ordinal - first_ordinal
        length = tl.load(kv_length + row)
        first_tile, num_tiles, num_splits = cut_decode(length, window, KEY_TILE, HAS_WINDOW)
        # With a window there may be fewer than planned.
        row_items = tl.cdiv(num_splits, tl.load(splits_per_item))
        if number < row_items:
            token = tl.load(query_start + row).to(tl.int64)
            table = block_tables + tl.load(rows + row).to(tl.int64) * table_stride
            head = kv_head * GROUP + member
            last_head = kv_head * GROUP + GROUP - 1
            columns = head[:, None] * HEAD_DIM + component[None, :]
            vectors = query + token * query_stride + head * (SHARED + HEAD_DIM)
            queries, shared_queries = _load_queries(
                vectors, member < GROUP, HEAD_DIM, PADDED_HEAD_DIM, SHARED, PADDED_SHARED
            )
            keys, exponents = head_in_block(pool, kv_head, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, SHARED)
            for split in range(
                start_of_share(number, num_splits, row_items), start_of_share(number + 1, num_splits, row_items)
            ):
                low = first_tile + start_of_share(split, num_tiles, num_splits)
                high = first_tile + start_of_share(split + 1, num_tiles, num_splits)
                begin = low * KEY_TILE
                end = tl.minimum(high * KEY_TILE, length)
                if HAS_WINDOW:
                    begin = tl.maximum(begin, length - window)
                maximum, total, of_heads = _begin(
                    sinks, slopes, tl.minimum(head, last_head), window, HAS_SINKS, ALIBI, QUERY_TILE
                )
                if HAS_SINKS:
                    # A sink belongs to the first split.
                    maximum = tl.where(split == 0, maximum, _LEAST)
                    total = tl.where(split == 0, total, 0.0)
                weighted, maximum, total = _attend_split(
                    queries,
                    shared_queries,
                    maximum,
                    total,
                    keys,
                    exponents,
                    table,
                    low,
                    high,
                    begin,
                    end,
                    window,
                    length,
                    of_heads,
                    factor,
                    cap,
                    NUM_KV_HEADS,
                    BLOCK_SIZE,
                    BLOCK_STRIDE,
                    HEAD_DIM,
                    PADDED_HEAD_DIM,
                    SHARED,
                    PADDED_SHARED,
                    CODED,
                    HAS_E4M3,
                    KEY_TILE,
                    HAS_SOFT_CAP,
                    ALIBI,
                )
                # The loop over tiles leaves few registers: what comes behind it is read again.
                if num_splits == 1:
                    token = tl.load(query_start + row).to(tl.int64)
                    tl.store(out + token * out_stride + columns, weighted.to(out.dtype.element_ty), mask=real)
                else:
                    place = (row.to(tl.int64) * MAX_SPLITS + split) * (NUM_KV_HEADS * GROUP)
                    tl.store(partial + place * HEAD_DIM + columns, weighted, mask=real)
                    tl.store(log_sum_exp + place + head, maximum + tl.log2(total), mask=member < GROUP)
            _, _, num_splits = cut_decode(tl.load(kv_length + row), window, KEY_TILE, HAS_WINDOW)
            if num_splits > 1:
                # All threads have stored before one of them tells.
                tl.debug_barrier()
                counter = arrived + row * NUM_KV_HEADS + kv_head
                row_items = tl.cdiv(num_splits, tl.load(splits_per_item))
                if tl.atomic_add(counter, 1, sem="acq_rel") == row_items - 1:
                    places = row.to(tl.int64) * (MAX_SPLITS * NUM_KV_HEADS * GROUP) + kv_head * GROUP
                    token = tl.load(query_start + row).to(tl.int64)
                    join_splits(
                        out + token * out_stride + kv_head * (GROUP * HEAD_DIM),
                        partial + places * HEAD_DIM,
                        log_sum_exp + places,
                        num_splits,
                        GROUP,
                        NUM_KV_HEADS * GROUP,
                        HEAD_DIM,
                        PADDED_HEAD_DIM,
                    )
                    tl.store(counter, 0)


@triton.jit
def _attend_split(
    queries,
    shared_queries,
    maximum,
    total,
    keys,
    exponents,
    table,
    low,
    high,
    begin,
    end,
    window,
    length,
    of_heads,
    factor,
    cap,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    SHARED: tl.constexpr,
    PADDED_SHARED: tl.constexpr,
    CODED: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    KEY_TILE: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """Attend to the positions from ``begin`` to ``end``, which are in the tiles from ``low`` to ``high``, of so many in all."""
    weighted = tl.zeros([queries.shape[0], PADDED_HEAD_DIM], dtype=tl.float32)
    # A decode sees every position from begin on.
    query_position = tl.full([queries.shape[0]], NEVER, dtype=tl.int32)
    if ALIBI:
        query_position = tl.full([queries.shape[0]], length - 1, dtype=tl.int32)
    block, of_keys, of_values = load_first(
        table, exponents, low, begin, end, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, CODED, SHARED, KEY_TILE
    )
    for tile in range(low, high):
        following = load_blocks(table, tile + 1, begin, end, BLOCK_SIZE, KEY_TILE)
        # Always masked: memory bounds the kernel anyway.
        weighted, maximum, total = attend_tile(
            queries,
            shared_queries,
            query_position,
            weighted,
            maximum,
            total,
            keys,
            block,
            of_keys,
            of_values,
            tile,
            begin,
            end,
            window,
            of_heads,
            factor,
            cap,
            True,
            NUM_KV_HEADS,
            BLOCK_SIZE,
            BLOCK_STRIDE,
            HEAD_DIM,
            PADDED_HEAD_DIM,
            SHARED,
            PADDED_SHARED,
            CODED,
            HAS_E4M3,
            KEY_TILE,
            False,
            HAS_SOFT_CAP,
            ALIBI,
        )
        block = following
        of_keys, of_values = load_exponents(
            exponents, block, tile + 1, begin, end, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, CODED, SHARED, KEY_TILE
        )
    return weighted / total[:, None], maximum, total
