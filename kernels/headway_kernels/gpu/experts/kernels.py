"""The kernels of experts: the choice of a token, the order of pairs, one product with many weights, the sum of a token.

Owns: how a grid goes through tokens, experts and tiles. Must not know: launches.
"""

import triton
import triton.language as tl

from headway_kernels.gpu.dependence import await_grid
from headway_kernels.gpu.linear.weights import finished, multiply_tile

_GONE = tl.constexpr(float("-inf"))
_HUGE = tl.constexpr(1.0e30)


@triton.jit(do_not_specialize=["scaling"])
def choose_kernel(
    logits,
    slots,
    correction,
    factors,
    chosen,
    weights,
    logits_stride,
    scaling,
    NUM_CHOSEN: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    OPEN_GROUPS: tl.constexpr,
    SCORES_PER_GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SIGMOID: tl.constexpr,
    NEAR: tl.constexpr,
    TOLERANCE: tl.constexpr,
    NORMALISED: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    CORRECTS_OUTPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program chooses for a token. Experts lie ``[groups, size]``; row after row is their order."""
    await_grid(PDL)
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_GROUPS)
    member = tl.arange(0, BLOCK_SIZE)
    exists = (group < NUM_GROUPS)[:, None] & (member < GROUP_SIZE)[None, :]
    expert = group[:, None] * GROUP_SIZE + member[None, :]
    logit = tl.load(logits + token * logits_stride + expert, mask=exists, other=0.0).to(tl.float32)
    # What is no number would be chosen never, and infinities give what is no number.
    logit = tl.where(tl.abs(logit) >= 0, logit, 0.0)
    logit = tl.where(exists, tl.minimum(tl.maximum(logit, -_HUGE), _HUGE), -_HUGE)
    if SIGMOID:
        scores = _sigmoid(logit)
    elif NEAR:
        scores = _near_shares(logit, exists, expert, NUM_CHOSEN, TOLERANCE)
    else:
        powers = tl.where(exists, tl.exp(logit - _largest(logit)), 0.0)
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    ranked = scores
    if CORRECTS_OUTPUTS:
        ranked = logit
    if HAS_CORRECTION:
        ranked += tl.load(correction + expert, mask=exists, other=0.0)
    ranked = tl.where(exists, ranked, _GONE)
    if NUM_GROUPS > 1:
        is_open = _are_open(ranked, group, member, NUM_GROUPS, OPEN_GROUPS, SCORES_PER_GROUP, BLOCK_GROUPS, BLOCK_SIZE)
        ranked = tl.where(is_open[:, None], ranked, _GONE)

    beyond = NUM_GROUPS * GROUP_SIZE
    is_chosen = expert < 0
    for _ in tl.static_range(NUM_CHOSEN):
        left = tl.where(is_chosen, _GONE, ranked)
        found = tl.where((left == _largest(left)) & exists, expert, beyond)
        is_chosen = is_chosen | (expert == tl.min(tl.min(found, 1), 0))
    is_chosen = is_chosen & exists
    total = 1.0
    if NORMALISED:
        total = tl.sum(tl.sum(tl.where(is_chosen, scores, 0.0), 1), 0) + 1e-20
    counts = is_chosen.to(tl.int32)
    before = tl.cumsum(tl.sum(counts, 1), 0) - tl.sum(counts, 1)
    place = token * NUM_CHOSEN + before[:, None] + tl.cumsum(counts, 1) - 1
    is_real = tl.load(slots + token) >= 0
    tl.store(chosen + place, tl.where(is_real, expert, beyond), mask=is_chosen)
    weight = scores / total * scaling
    if HAS_FACTORS:
        weight *= tl.load(factors + expert, mask=exists, other=0.0)
    tl.store(weights + place, weight, mask=is_chosen)


@triton.jit
def _are_open(
    ranked,
    group,
    member,
    NUM_GROUPS: tl.constexpr,
    OPEN_GROUPS: tl.constexpr,
    SCORES_PER_GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Whether each group, ``[BLOCK_GROUPS]``, is among the best, by the sum of its best scores."""
    rest = ranked
    of_groups = tl.zeros((BLOCK_GROUPS,), dtype=tl.float32)
    for _ in tl.static_range(SCORES_PER_GROUP):
        best = tl.max(rest, 1)
        of_groups += best
        first = tl.min(tl.where(rest == best[:, None], member[None, :], BLOCK_SIZE), 1)
        rest = tl.where(member[None, :] == first[:, None], _GONE, rest)
    is_open = group < 0
    for _ in tl.static_range(OPEN_GROUPS):
        left = tl.where(is_open | (group >= NUM_GROUPS), _GONE, of_groups)
        first = tl.min(tl.where(left == tl.max(left, 0), group, BLOCK_GROUPS), 0)
        is_open = is_open | (group == first)
    return is_open


@triton.jit
def _sigmoid(values):
    """Without an exponential that overflows."""
    decayed = tl.exp(-tl.abs(values))
    return tl.where(values >= 0, 1.0, decayed) / (1.0 + decayed)


@triton.jit
def _near_shares(logit, exists, expert, NUM_CHOSEN: tl.constexpr, TOLERANCE: tl.constexpr):
    """As ``Scoring.NEAR`` has them; -1 where an expert is not among the best."""
    shares = tl.full(logit.shape, -1.0, dtype=tl.float32)
    left = tl.where(exists, logit, _GONE)
    for _ in tl.static_range(NUM_CHOSEN):
        largest = _largest(left)
        best = tl.min(tl.min(tl.where((left == largest) & exists, expert, 1 << 30), 1), 0)
        is_far = (largest - logit) / tl.maximum(tl.abs(logit), largest) > TOLERANCE
        near = tl.where(is_far, 0.0, tl.exp(left - largest))
        shares = tl.where((expert == best) & exists, 1.0 / tl.sum(tl.sum(near, 1), 0), shares)
        left = tl.where((expert == best) & exists, _GONE, left)
    return shares


@triton.jit
def _largest(values):
    return tl.max(tl.max(values, 1), 0)


@triton.jit(do_not_specialize=["num_pairs"])
def sort_pairs_kernel(chosen, order, ends, num_pairs, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program finds the places of an expert's pairs: behind those of lower experts, in their own order."""
    await_grid(PDL)
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, num_pairs, BLOCK):
        experts = tl.load(chosen + start + lane, mask=start + lane < num_pairs, other=expert)
        before += (experts < expert).to(tl.int32)
    place = tl.sum(before, 0)
    for start in range(0, num_pairs, BLOCK):
        within = start + lane < num_pairs
        mine = tl.load(chosen + start + lane, mask=within, other=-1) == expert
        counts = mine.to(tl.int32)
        tl.store(order + place + tl.cumsum(counts, 0) - 1, start + lane, mask=mine)
        place += tl.sum(counts, 0)
    tl.store(ends + expert, place)


@triton.jit
def multiply_pairs_kernel(
    x,
    values,
    scales,
    minima,
    order,
    bias,
    out,
    pair_order,
    ends,
    x_stride,
    out_stride,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROW: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPED: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    GROUPS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    GATHERS: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs that run together have all tiles of one span of outputs, so an expert's weights are read once.

    Which weights a program needs, only the grid before says.
    """
    await_grid(PDL)
    expert, begin, end = tile_of_pairs(tl.program_id(0), ends, NUM_EXPERTS, BLOCK_EXPERTS, BLOCK_TOKENS)
    if begin < end:
        x_places, out_places, within = rows_of_pairs(pair_order, begin, end, NUM_CHOSEN, GATHERS, BLOCK_TOKENS)
        # Beyond the edge, read the last output again.
        outputs = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
        far = expert.to(tl.int64)
        sums = multiply_tile(
            x + x_places.to(tl.int64) * x_stride,
            values + far * (OUTPUTS * ROW),
            scales + far * (GROUPS * OUTPUTS),
            minima + far * (GROUPS * OUTPUTS),
            order + far * INPUTS,
            tl.minimum(outputs, OUTPUTS - 1),
            0,
            INPUTS,
            OUTPUTS,
            INPUTS,
            ROW,
            FORM,
            GROUP,
            GROUPED,
            HAS_MINIMA,
            HAS_ORDER,
            HAS_E4M3,
            WIDE,
            BLOCK_TOKENS,
            BLOCK_OUTPUTS,
            BLOCK_INPUTS,
        )
        results = finished(
            tl.trans(sums),
            scales + far * OUTPUTS,
            bias + far * OUTPUTS,
            outputs[None, :],
            OUTPUTS,
            SCALED,
            HAS_BIAS,
        )
        place = out + out_places[:, None].to(tl.int64) * out_stride + outputs[None, :]
        tl.store(place, results.to(out.dtype.element_ty), mask=within[:, None] & (outputs < OUTPUTS)[None, :])


@triton.jit
def rows_of_pairs(pair_order, begin, end, NUM_CHOSEN: tl.constexpr, GATHERS: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Where the pairs of a tile have their inputs and their results, and which of them there are."""
    places = begin + tl.arange(0, BLOCK_TOKENS)
    within = places < end
    # Beyond the edge, read the last row again.
    places = tl.minimum(places, end - 1)
    numbers = tl.load(pair_order + places)
    x_places = places
    out_places = numbers
    if GATHERS:
        x_places = numbers // NUM_CHOSEN
        out_places = places
    return x_places, out_places, within


@triton.jit
def tile_of_pairs(ordinal, ends, NUM_EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """The expert of a tile, its first pair, and the end of the expert's pairs; a tile that is not there is empty."""
    expert = tl.arange(0, BLOCK_EXPERTS)
    exists = expert < NUM_EXPERTS
    end = tl.load(ends + expert, mask=exists, other=0)
    begin = tl.load(ends + expert - 1, mask=exists & (expert > 0), other=0)
    tiles = tl.cdiv(end - begin, BLOCK_TOKENS)
    tiles_up_to = tl.cumsum(tiles, 0)
    is_its = (tiles_up_to > ordinal) & (tiles_up_to - tiles <= ordinal)
    first = tl.sum(tl.where(is_its, begin + (ordinal - tiles_up_to + tiles) * BLOCK_TOKENS, 0), 0)
    return tl.sum(tl.where(is_its, expert, 0), 0), first, tl.sum(tl.where(is_its, end, 0), 0)


@triton.jit
def weigh_pairs_kernel(
    rows,
    order,
    weights,
    stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has some channels of a pair. A row of padding is multiplied by anything: nobody reads it."""
    await_grid(PDL)
    place = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = channels < WIDTH
    pointers = rows + place * stride + channels
    weighed = tl.load(pointers, mask=within, other=0.0).to(tl.float32) * tl.load(weights + tl.load(order + place))
    tl.store(pointers, weighed.to(rows.dtype.element_ty), mask=within)


@triton.jit
def add_pairs_kernel(
    given,
    chosen,
    weights,
    shared,
    gates,
    out,
    given_stride,
    shared_stride,
    gate_stride,
    out_stride,
    WIDTH: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    WEIGHS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has some channels of a token."""
    await_grid(PDL)
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = channels < WIDTH
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in tl.static_range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + i
        # Not "& (expert < NUM_EXPERTS)": Triton's interpreter cannot broadcast what comparing a scalar gives.
        is_there = tl.where(within, tl.load(chosen + pair), NUM_EXPERTS) < NUM_EXPERTS
        row = tl.load(given + pair * given_stride + channels, mask=is_there, other=0.0).to(tl.float32)
        if WEIGHS:
            row *= tl.load(weights + pair)
        sums += row
    if HAS_SHARED:
        row = tl.load(shared + token * shared_stride + channels, mask=within, other=0.0).to(tl.float32)
        if HAS_GATE:
            row *= _sigmoid(tl.load(gates + token * gate_stride).to(tl.float32))
        sums += row
    tl.store(out + token * out_stride + channels, sums.to(out.dtype.element_ty), mask=within)
