"""The device functions of the attention kernels: how a row is cut and joined, how a tile is read and attended to.

Owns: cuts of a decode, key tiles, the joining of splits. Must not know: grids.
"""

import math

import triton
import triton.language as tl

from headway_kernels.gpu.float8 import factor_of, numbers_of

MIN_SPLIT = tl.constexpr(256)
"""The fewest positions of each of several splits; joining fewer would cost more than it saves."""
MAX_SPLITS = tl.constexpr(16)
"""The most splits of a decode: 16 per key-value head occupy a large GPU with a single sequence."""
LOG2_E = tl.constexpr(math.log2(math.e))
NEVER = tl.constexpr(2**31 - 1)
BY_DISTANCE = tl.constexpr(1)
"""ALiBi as it is."""
BY_PLACE = tl.constexpr(2)
"""ALiBi whose slopes, places and biases are rounded to bfloat16, before they are scaled as logits are."""


@triton.jit
def count_splits(positions):
    """The splits of a decode over so many positions."""
    return tl.minimum(tl.maximum(positions // MIN_SPLIT, 1), MAX_SPLITS)


@triton.jit
def cut_decode(kv_length, window, KEY_TILE: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Return a decode's first key tile, its key tiles, and its splits: with a window, no more than without.

    There are at least as many tiles as splits.
    """
    first = kv_length * 0
    positions = kv_length
    if HAS_WINDOW:
        first = tl.maximum(0, kv_length - window) // KEY_TILE
        positions = tl.minimum(kv_length, window)
    return first, tl.cdiv(kv_length, KEY_TILE) - first, count_splits(positions)


@triton.jit
def start_of_share(number, total, parts):
    """Where share ``number`` of so many parts begins; the last ones are longer by one."""
    return number * (total // parts) + tl.maximum(number - parts + total % parts, 0)


_INTERPRETED = tl.constexpr(not isinstance(count_splits, triton.JITFunction))


@triton.jit
def find_row(ends, ordinal, num_rows, PADDED_ROWS: tl.constexpr):
    """Return the row of item ``ordinal``, and the first items of this row and of the next.

    A binary search would wait for several reads in turn.
    """
    row = tl.arange(0, PADDED_ROWS)
    end = tl.load(ends + row, mask=row < num_rows, other=NEVER)
    before = end <= ordinal
    found = tl.sum(before.to(tl.int32), 0)
    first = tl.max(tl.where(before, end, 0), 0)
    after = tl.min(tl.where(before, NEVER, end), 0)
    return found, first, after


@triton.jit
def load_blocks(table, tile, begin, end, BLOCK_SIZE: tl.constexpr, KEY_TILE: tl.constexpr):
    """The block ids of a key tile's positions: one each, or one for all; block 0 outside ``begin`` to ``end``.

    Loops load ids one turn ahead: otherwise Triton's pipeliner spends its stages on the chain from id to vector.
    """
    start = tile * KEY_TILE
    if BLOCK_SIZE % KEY_TILE == 0:
        block = tl.load(table + start // BLOCK_SIZE, mask=start < end, other=0)
    else:
        position = start + tl.arange(0, KEY_TILE)
        block = tl.load(table + position // BLOCK_SIZE, mask=(position >= begin) & (position < end), other=0)
    return block


@triton.jit
def head_in_block(
    pool,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Pointers to a head's keys in block 0, and to their exponents, if there are any."""
    if SHARED:
        keys = pool
        exponents = pool + BLOCK_SIZE * (SHARED + HEAD_DIM)
    else:
        keys = pool + kv_head * (BLOCK_SIZE * HEAD_DIM)
        exponents = pool + 2 * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM + kv_head * BLOCK_SIZE
    return keys, exponents


@triton.jit
def load_exponents(
    exponents,
    block,
    tile,
    begin,
    end,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    CODED: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """The exponents of a tile's keys and values, 0 outside ``begin`` to ``end``; of a pool of numbers, anything.

    ``exponents`` points to the head's in block 0. They are too narrow for Triton's pipeliner: loops load them a turn ahead.
    """
    of_keys = tile
    of_values = tile
    if CODED:
        position = tile * KEY_TILE + tl.arange(0, KEY_TILE)
        wanted = (position >= begin) & (position < end)
        place = block.to(tl.int64) * BLOCK_STRIDE + position % BLOCK_SIZE
        of_keys = tl.load(exponents + place, mask=wanted, other=0)
        of_values = of_keys
        if not SHARED:
            of_values = tl.load(exponents + NUM_KV_HEADS * BLOCK_SIZE + place, mask=wanted, other=0)
    return of_keys, of_values


@triton.jit
def load_first(
    table,
    exponents,
    tile,
    begin,
    end,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    CODED: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """The block ids and the exponents of the tile with which a loop begins."""
    block = load_blocks(table, tile, begin, end, BLOCK_SIZE, KEY_TILE)
    of_keys, of_values = load_exponents(
        exponents, block, tile, begin, end, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, CODED, SHARED, KEY_TILE
    )
    return block, of_keys, of_values


@triton.jit
def _load_vectors(pointers, wanted, in_head, SOME: tl.constexpr, PADDED: tl.constexpr):
    """Unwanted vectors are not read: a zero weight would not hide a NaN."""
    if SOME:
        vectors = tl.load(pointers, mask=wanted[:, None] & in_head[None, :], other=0.0)
    elif PADDED:
        vectors = tl.load(pointers, mask=in_head[None, :], other=0.0)
    else:
        vectors = tl.load(pointers)
    return vectors


@triton.jit
def _dot(left, right, added):
    """``left @ right + added`` in float32."""
    if _INTERPRETED:
        # The interpreter takes a bfloat16's bits for an integer; products of 16-bit floats are exact in float32.
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, added, input_precision="ieee")


@triton.jit
def _capped(logit, cap):
    """``cap * tanh(logit)``, with a series where 1 - exp(-2x) would lose precision."""
    size = tl.abs(logit)
    decay = tl.exp2(size * (-2.0 * LOG2_E))
    large = (1.0 - decay) / (1.0 + decay)
    square = logit * logit
    series = 62.0 / 2835.0 * square - 17.0 / 315.0
    series = series * square + 2.0 / 15.0
    series = series * square - 1.0 / 3.0
    small = logit + logit * square * series
    return cap * tl.where(size < 0.25, small, tl.where(logit < 0, -large, large))


@triton.jit
def load_slopes(slopes, head, nothing, ALIBI: tl.constexpr):
    """By how much the logits of each head fall from key to key, to base 2, or what is rounded; ``nothing`` without ALiBi."""
    found = nothing
    if ALIBI == BY_DISTANCE:
        found = tl.load(slopes + head) * LOG2_E
    if ALIBI == BY_PLACE:
        found = _rounded(tl.load(slopes + head))
    return found


@triton.jit
def _rounded(values):
    return values.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _load_tile(
    keys,
    place,
    wanted,
    MASKED: tl.constexpr,
    TO_VALUES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    SHARED: tl.constexpr,
    PADDED_SHARED: tl.constexpr,
):
    """A tile's keys, and its values, ``TO_VALUES`` elements behind them; or of one vector for all, both in turn its last channels
    and its first.
    """
    component = tl.arange(0, PADDED_HEAD_DIM)
    in_head = component < HEAD_DIM
    pointers = keys + place[:, None] + (SHARED + component)[None, :]
    key = _load_vectors(pointers, wanted, in_head, MASKED, HEAD_DIM != PADDED_HEAD_DIM)
    if SHARED:
        channel = tl.arange(0, PADDED_SHARED)
        pointers = keys + place[:, None] + channel[None, :]
        other = _load_vectors(pointers, wanted, channel < SHARED, MASKED, SHARED != PADDED_SHARED)
    else:
        other = _load_vectors(pointers + TO_VALUES, wanted, in_head, MASKED, HEAD_DIM != PADDED_HEAD_DIM)
    return key, other


@triton.jit
def _met(query, shared_query, key, other, SHARED: tl.constexpr):
    """The logits of what ``_load_tile`` gave, and the values."""
    logit = tl.zeros([query.shape[0], key.shape[0]], dtype=tl.float32)
    value = other
    if SHARED:
        logit = _dot(shared_query, tl.trans(other), logit)
        value = key
    return _dot(query, tl.trans(key), logit), value


@triton.jit
def attend_tile(
    query,
    shared_query,
    query_position,
    weighted,
    maximum,
    total,
    keys,
    block,
    key_exponents,
    value_exponents,
    tile,
    begin,
    end,
    window,
    slopes,
    factor,
    cap,
    MASKED: tl.constexpr,
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
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """Let each query attend to the positions of a key tile from ``begin`` up to ``end``.

    ``keys`` points to the key head in block 0; blocks are ``BLOCK_STRIDE`` elements apart. The state is FlashAttention's, with logits to base 2. Keys and values
    are read first, so that Triton's pipeliner keeps ``num_stages`` - 1 tiles on their way. If they are ``CODED``, their
    exponents multiply logits and weights, which rounds nothing: see ``headway_kernels.kv_codes``. ``slopes``: of each query,
    from ``load_slopes``. With ``SHARED`` channels, a position has one vector for all heads: those, which ``shared_query``
    meets, and behind them what is key and value at once.
    """
    position = tile * KEY_TILE + tl.arange(0, KEY_TILE)
    wanted = (position >= begin) & (position < end)
    # int64: pools have more elements than an int32 counts.
    place = block.to(tl.int64) * BLOCK_STRIDE + position % BLOCK_SIZE * (SHARED + HEAD_DIM)
    key, other = _load_tile(
        keys,
        place,
        wanted,
        MASKED,
        NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM,
        HEAD_DIM,
        PADDED_HEAD_DIM,
        SHARED,
        PADDED_SHARED,
    )
    if CODED:
        key = numbers_of(key, query.dtype, HAS_E4M3)
        other = numbers_of(other, query.dtype, HAS_E4M3)
    logit, value = _met(query, shared_query, key, other, SHARED)
    if CODED:
        logit *= factor_of(key_exponents)[None, :]
    if HAS_SOFT_CAP:
        logit = _capped(logit * factor, cap)
    if ALIBI == BY_DISTANCE:
        distance = (query_position[:, None] - position[None, :]).to(tl.float32)
        logit = logit * factor - slopes[:, None] * distance
    if ALIBI == BY_PLACE:
        logit = (logit + _rounded(slopes[:, None] * _rounded(position.to(tl.float32))[None, :])) * factor
    if MASKED:
        seen = wanted[None, :] & (position[None, :] <= query_position[:, None])
        if HAS_WINDOW:
            seen &= position[None, :] > query_position[:, None] - window
        logit = tl.where(seen, logit, float("-inf"))
    # Without a cap the factor meets the logit in the same instruction as the maximum.
    if HAS_SOFT_CAP or ALIBI:
        highest = tl.maximum(maximum, tl.max(logit, 1))
        weight = tl.exp2(logit - highest[:, None])
    else:
        highest = tl.maximum(maximum, tl.max(logit, 1) * factor)
        weight = tl.exp2(logit * factor - highest[:, None])
    decay = tl.exp2(maximum - highest)
    total = total * decay + tl.sum(weight, 1)
    if CODED:
        weight *= factor_of(value_exponents)[None, :]
    weighted = _dot(weight.to(value.dtype), value, weighted * decay[:, None])
    return weighted, highest, total


@triton.jit
def join_splits(
    out,
    partial,
    log_sum_exp,
    num_splits,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
):
    """Weigh each head's splits by their sums of exponentials. Loads pass the first cache, which may be out of date."""
    split = tl.arange(0, MAX_SPLITS)
    component = tl.arange(0, PADDED_HEAD_DIM)
    held = split < num_splits
    in_head = component < HEAD_DIM
    for head in range(GROUP):
        place = split * NUM_HEADS + head
        sums = tl.load(log_sum_exp + place, mask=held, other=float("-inf"), cache_modifier=".cg")
        pointers = partial + place[:, None] * HEAD_DIM + component[None, :]
        parts = tl.load(pointers, mask=held[:, None] & in_head[None, :], other=0.0, cache_modifier=".cg")
        weight = tl.exp2(sums - tl.max(sums, 0))
        result = tl.sum(parts * weight[:, None], 0) / tl.sum(weight, 0)
        tl.store(out + head * HEAD_DIM + component, result.to(out.dtype.element_ty), mask=in_head)
