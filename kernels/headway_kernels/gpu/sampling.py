"""Draw the next token of each row, in Triton: penalties, bias, temperature, top-k, top-p and min-p, without a sort.

Owns: the kernels, their scratch memory, and the parameters of every row on the device.
Must not know: requests, steps, or how parameters get here.

The rule, which ``headway_kernels.reference.sample`` writes out: ``p`` is the float32 softmax of the adjusted logits over
the temperature, and a token's weight ``floor(p * 2^52)``. Tokens rank by ``p``, equals by lower id; top-k, top-p and
min-p each keep a beginning of the ranking. The draw inverts the cumulative weights of the kept tokens, in the order of
their ids, at the row's Philox uniform. Weights are integers and their sums exact, so neither the order in which
programs add nor what shares the batch can change a token.

What is kept is told by two numbers: a **threshold**, the bits of a float32 (which order as the floats do, where these
are not negative), and how many of the tokens exactly at it are kept, lowest ids first. A row goes through

1. ``statistics``, per chunk of the vocabulary: largest logit, its first place, sum of exponentials;
2. ``merge``, per row: the distribution's scale; greedy rows end here;
3. ``survey``, per chunk, and from here to 5 for rows with top-k or top-p: what lies above each of a few fixed
   probabilities, to choose a cutoff that surely keeps enough;
4. ``list``, per chunk: the bits of all probabilities from the cutoff upward, in any order;
5. ``threshold``, per row: the threshold, by a search with several pivots at once over that list;
6. ``weigh``, per chunk: weight above the threshold and number of tokens at it;
7. ``draw``, per row: the chunk in which the uniform falls, then the token.

Every step that turns a logit into a probability does so by ``_probability`` from the numbers that ``merge`` stored:
comparing bits between kernels is sound only as long as all of them get the same bits.

All grids are fixed by the shapes, and all that depends on a row's parameters is read on the device, so a captured graph
serves any batch of its size. What the host does choose is the variant: it knows which steps no row of a batch needs.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.sampling_layout import PENALTIES, RANDOM, RANKED, ROW_LAYOUT, ROW_WORDS

Variant = Literal["greedy", "random", "truncated"]

_ROW_WORDS = tl.constexpr(ROW_WORDS)
_ROW_PAIRS = tl.constexpr(ROW_WORDS // 2)
"""From one row's parameter to the next's, for numbers of 4 bytes and of 8."""

_LOG2E = tl.constexpr(1.4426950408889634)
_WEIGHT_OF_ONE = tl.constexpr(4503599627370496.0)
_FIXED_ONE = tl.constexpr(float(1 << 42))
_FIXED_STEP = tl.constexpr(1.0 / (1 << 42))
_LARGEST = tl.constexpr(0x7FFFFFFF)
_SEEN = tl.constexpr(1 << 30)
_PENALTIES = tl.constexpr(PENALTIES)
_RANDOM = tl.constexpr(RANDOM)
_RANKED = tl.constexpr(RANKED)

_DONE = tl.constexpr(0)
_DRAWS = tl.constexpr(1)
_DRAWS_RANKED = tl.constexpr(2)
"""What is left to do for a row after ``merge``."""

_SURVEYED = tl.constexpr(8)
_OCTAVES = tl.constexpr(3)
"""The survey looks at probabilities 2^-3, 2^-6, ... 2^-24."""

_SURELY = tl.constexpr(1.00001)
"""The survey adds float32 probabilities, whose sum may be off by 3 in a million; this much is certain to be enough."""

_NEARLY = tl.constexpr(1.001)
"""A chunk's best probability, computed from its largest logit, bounds all of the chunk's but for rounding."""

_CHUNK_WARPS = 8
_HISTORY_PARTS = 16
_HISTORY_TILE = 512
_ENTRY_TILE = 256
_SEARCH_TILE = 1024
_SEARCH_WARPS = 8
_PIVOTS = 8

_RNG_ROUNDS = tl.constexpr(10)


@dataclass(frozen=True)
class SamplingColumns:
    """The sampling parameters of every row, on the device; each tensor is a view of ``words``, but for the entries.

    ``words`` int32, shape ``[rows, ROW_WORDS]``, laid out as ``ROW_LAYOUT`` says. ``entry_token_ids`` int32 and
    ``entry_biases`` float32, shape ``[capacity]``: what to add to which logit; no token twice in a row. A token id is
    stored as its complement (``~id``) where the token is also excluded while the row is shorter than ``min_tokens``.
    """

    words: Tensor
    entry_token_ids: Tensor
    entry_biases: Tensor

    @classmethod
    def allocate(cls, *, num_rows: int, entry_capacity: int, device: torch.device) -> "SamplingColumns":
        """Columns of ``num_rows`` rows that all are greedy."""
        return cls(
            torch.zeros((num_rows, ROW_WORDS), dtype=torch.int32, device=device),
            torch.zeros(entry_capacity, dtype=torch.int32, device=device),
            torch.zeros(entry_capacity, dtype=torch.float32, device=device),
        )

    def column(self, name: str) -> Tensor:
        """The named parameter of every row, shape ``[rows]``, strided; a seed as the int64 of the same bits."""
        kind, offset = ROW_LAYOUT.fields[name][:2]  # type: ignore[index]
        dtype = {"u8": torch.int64, "f8": torch.float64, "f4": torch.float32, "i4": torch.int32}[kind.str[1:]]
        return self.words.view(dtype)[:, offset // kind.itemsize]

    def write_rows(self, rows: Tensor, words: Tensor) -> None:
        """Set ``rows`` (int64, shape ``[k]``) to ``words`` (int32, shape ``[k, ROW_WORDS]``), both on the device."""
        self.words.index_copy_(0, rows, words)

    def write_entries(self, first: int, token_ids: Tensor, biases: Tensor) -> None:
        """Set the entries from ``first`` on; both tensors of shape ``[k]``, on the device or in pinned memory."""
        end = first + len(token_ids)
        self.entry_token_ids[first:end].copy_(token_ids, non_blocking=True)
        self.entry_biases[first:end].copy_(biases, non_blocking=True)


@dataclass(frozen=True)
class SamplingWorkspace:
    """Scratch memory for batches of up to ``max_batch`` rows; holds nothing between two calls.

    ``adjusted`` and ``words`` have one number per logit; the others are small. ``chunk`` is the number of logits that a
    program looks at, a power of two. Sums are rounded once for each chunk, so all batches must share it.
    """

    chunk: int
    vocab_size: int
    adjusted: Tensor
    words: Tensor
    chunk_max: Tensor
    chunk_place: Tensor
    chunk_sum: Tensor
    chunk_survey: Tensor
    chunk_weight: Tensor
    chunk_ties: Tensor
    remaining: Tensor
    row_max: Tensor
    row_scale: Tensor
    row_share: Tensor
    cutoff: Tensor
    threshold: Tensor
    ties_kept: Tensor
    list_length: Tensor

    @classmethod
    def allocate(
        cls, *, max_batch: int, vocab_size: int, device: torch.device, chunk: int = 4096
    ) -> "SamplingWorkspace":
        """Reserve ``8 * max_batch * vocab_size`` bytes and a little more."""
        num_chunks = triton.cdiv(vocab_size, chunk)

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty((max_batch, *shape), dtype=dtype, device=device)

        return cls(
            chunk=chunk,
            vocab_size=vocab_size,
            adjusted=empty(torch.float32, vocab_size),
            words=empty(torch.int32, vocab_size),
            chunk_max=empty(torch.float32, num_chunks),
            chunk_place=empty(torch.int32, num_chunks),
            chunk_sum=empty(torch.int64, num_chunks),
            chunk_survey=empty(torch.float32, num_chunks, _SURVEYED.value),
            chunk_weight=empty(torch.int64, num_chunks),
            chunk_ties=empty(torch.int32, num_chunks),
            remaining=empty(torch.int32),
            row_max=empty(torch.float32),
            row_scale=empty(torch.float32),
            row_share=empty(torch.float32),
            cutoff=empty(torch.int32),
            threshold=empty(torch.int32),
            ties_kept=empty(torch.int32),
            list_length=empty(torch.int32),
        )


@triton.jit
def _logits(pointer, places, vocab_size):
    """Float32 logits with NaN as +inf: the largest of a row with either is infinite, which rules the row out."""
    logits = tl.load(pointer + places, mask=places < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.where(logits != logits, float("inf"), logits)  # noqa: PLR0124 (what NaN is known by)


@triton.jit
def _scale_of(temperature):
    """What logits are multiplied by before ``exp2``; a greedy row's sums are not used."""
    return tl.div_rn(tl.full((), _LOG2E, tl.float32), tl.where(temperature > 0, temperature, 1.0))


@triton.jit
def _finite_or_zero(value):
    return tl.where((value > float("-inf")) & (value < float("inf")), value, 0.0)


@triton.jit
def _probability(logits, row_max, row_scale, row_share):
    """No multiplication here feeds an addition, so no compiler can fuse it in one kernel and not in another."""
    return tl.exp2((logits - row_max) * row_scale) * row_share


@triton.jit
def _weight(probability):
    return (probability * _WEIGHT_OF_ONE).to(tl.int64)


@triton.jit
def _share(logits, largest, scale):
    """Exponential beside that of ``largest``; at most 1 even in rows that are ruled out, where ``largest`` means nothing."""
    return tl.minimum(tl.exp2((logits - largest) * scale), 1.0)


@triton.jit
def _fixed_point(share):
    """As an int64: a million of them may be added without overflow."""
    return (share * _FIXED_ONE).to(tl.int64)


@triton.jit
def _total(chunk_max, chunk_sums, row_max, scale):
    """The row's sum of exponentials beside its largest logit, as float32."""
    shares = _share(chunk_max, row_max, scale) * (chunk_sums.to(tl.float32) * _FIXED_STEP)
    return tl.sum(_fixed_point(shares), 0).to(tl.float32) * _FIXED_STEP


@triton.jit
def _bits(probability):
    return probability.to(tl.int32, bitcast=True)


@triton.jit
def _from_bits(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _uniform(seed, position):
    """One uniform number in [0, 1) with 53 random bits: Philox4x32-10 under the key ``seed`` (Salmon et al., 2011)."""
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
def _clear_kernel(rows_ptr, flags_ptr, words_ptr, vocab_size, CHUNK: tl.constexpr):
    """Zero the counters of rows with penalties."""
    i = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + i)
    if row < 0:
        return
    if tl.load(flags_ptr + row * _ROW_WORDS) & _PENALTIES == 0:
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
):
    """Count each token that a row has generated, and mark each that its prompt holds."""
    i = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + i).to(tl.int64)
    if row < 0:
        return
    if tl.load(flags_ptr + row * _ROW_WORDS) & _PENALTIES == 0:
        return
    position = tl.load(positions_ptr + i)
    num_prompt_tokens = tl.load(num_prompt_tokens_ptr + row * _ROW_WORDS)
    counters = words_ptr + i * vocab_size
    for start in range(tl.program_id(0) * TILE, position, PARTS * TILE):
        places = start + tl.arange(0, TILE)
        held = places < position
        token_ids = tl.load(store_ptr + row * store_stride + places, mask=held, other=0)
        # A row whose last step failed may run once more; what its store holds then must not lead outside.
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
):
    """Copy logits as float32, under the penalties of rows that have any."""
    i = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + i)
    if row < 0:
        return
    places = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = places < vocab_size
    logits = tl.load(logits_ptr + i * logits_stride + places, mask=inside, other=0.0).to(tl.float32)
    if tl.load(flags_ptr + row * _ROW_WORDS) & _PENALTIES != 0:
        repetition = tl.load(repetition_ptr + row * _ROW_WORDS)
        presence = tl.load(presence_ptr + row * _ROW_WORDS)
        frequency = tl.load(frequency_ptr + row * _ROW_WORDS)
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
):
    """Add each row's logit bias, and exclude its stop ids while it is shorter than ``min_tokens``."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + i)
    if row < 0:
        return
    num_generated = tl.load(positions_ptr + i) - tl.load(num_prompt_tokens_ptr + row * _ROW_WORDS)
    too_short = num_generated < tl.load(min_tokens_ptr + row * _ROW_WORDS)
    end = tl.load(end_entry_ptr + row * _ROW_WORDS)
    for start in range(tl.load(first_entry_ptr + row * _ROW_WORDS), end, TILE):
        entries = start + tl.arange(0, TILE)
        held = entries < end
        stored = tl.load(entry_token_ids_ptr + entries, mask=held, other=0)
        bias = tl.load(entry_biases_ptr + entries, mask=held, other=0.0)
        place = adjusted_ptr + i * vocab_size + tl.where(stored < 0, ~stored, stored)
        logits = tl.load(place, mask=held, other=0.0) + bias
        tl.store(place, tl.where((stored < 0) & too_short, float("-inf"), logits), mask=held)


@triton.jit
def _statistics_kernel(
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
):
    """Largest logit, its first place, and the sum of exponentials beside it; RAW: at temperature 1."""
    i = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + i)
    if row < 0:
        return
    places = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    logits = _logits(logits_ptr + i * logits_stride, places, vocab_size)
    largest = tl.max(logits, 0)
    here = i * tl.num_programs(0) + tl.program_id(0)
    tl.store(chunk_max_ptr + here, largest)
    tl.store(chunk_place_ptr + here, tl.min(tl.where(logits == largest, places, _LARGEST), 0))
    if WITH_SUM:
        scale = _scale_of(tl.full((), 1.0, tl.float32) if RAW else tl.load(temperature_ptr + row * _ROW_WORDS))
        # A float sum would depend on the layout that the compiler chose, and that on the type of the logits.
        shares = _share(logits, _finite_or_zero(largest), scale)
        tl.store(chunk_sum_ptr + here, tl.sum(_fixed_point(shares), 0))


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
):
    """Put a row's chunks together: the greedy token for all; for others the scale of the distribution, and min-p."""
    i = tl.program_id(0)
    row = tl.load(rows_ptr + i)
    if row < 0:
        tl.store(out_token_ids_ptr + i, -1)
        tl.store(out_status_ptr + i, 0)
        tl.store(remaining_ptr + i, _DONE)
        return
    chunks = tl.arange(0, CHUNKS)
    held = chunks < num_chunks
    chunk_max = tl.load(chunk_max_ptr + i * num_chunks + chunks, mask=held, other=float("-inf"))
    places = tl.load(chunk_place_ptr + i * num_chunks + chunks, mask=held, other=_LARGEST)
    row_max = tl.max(chunk_max, 0)
    usable = (row_max > float("-inf")) & (row_max < float("inf"))
    place = tl.min(tl.where(chunk_max == row_max, places, _LARGEST), 0)
    tl.store(out_token_ids_ptr + i, tl.where(usable, place, -1))
    tl.store(out_status_ptr + i, tl.where(usable, 0, 1))
    if RANDOM:
        flags = tl.load(flags_ptr + row * _ROW_WORDS)
        temperature = tl.load(temperature_ptr + row * _ROW_WORDS)
        scale = _scale_of(temperature)
        sums = tl.load(chunk_sum_ptr + i * num_chunks + chunks, mask=held, other=0)
        total = _total(chunk_max, sums, _finite_or_zero(row_max), scale)
        share = tl.div_rn(tl.full((), 1.0, tl.float32), tl.where(usable, total, 1.0))
        ranked = tl.where((flags & _RANKED) != 0, _DRAWS_RANKED, _DRAWS)
        tl.store(remaining_ptr + i, tl.where(usable & ((flags & _RANDOM) != 0), ranked, _DONE))
        tl.store(row_max_ptr + i, row_max)
        tl.store(row_scale_ptr + i, scale)
        tl.store(row_share_ptr + i, share)
        # The best probability is the share itself: exp2(0) is 1. The least that min-p keeps, rounded up to a float32.
        least = tl.load(min_p_ptr + row * _ROW_PAIRS) * share.to(tl.float64)
        rounded = least.to(tl.float32)
        bits = _bits(rounded) + (rounded.to(tl.float64) < least).to(tl.int32)
        tl.store(threshold_ptr + i, bits - 1)
        tl.store(ties_kept_ptr + i, 0)
        tl.store(list_length_ptr + i, 0)


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
):
    """How many tokens, or how much probability without top-k, lie at or above each surveyed probability."""
    i = tl.program_id(1).to(tl.int64)
    if tl.load(remaining_ptr + i) != _DRAWS_RANKED:
        return
    places = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    logits = _logits(logits_ptr + i * logits_stride, places, vocab_size)
    p = _probability(logits, tl.load(row_max_ptr + i), tl.load(row_scale_ptr + i), tl.load(row_share_ptr + i))
    counted = tl.load(top_k_ptr + tl.load(rows_ptr + i) * _ROW_WORDS) > 0
    measured = tl.where(counted, 1.0, p)
    here = chunk_survey_ptr + (i * tl.num_programs(0) + tl.program_id(0)) * _SURVEYED
    for j in tl.static_range(_SURVEYED):
        reach = _bits(p) >= ((127 - _OCTAVES * (j + 1)) << 23)
        tl.store(here + j, tl.sum(tl.where(reach, measured, 0.0), 0))


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
):
    """Choose the highest cutoff that surely keeps enough; append the bits of the probabilities from there upward."""
    i = tl.program_id(1).to(tl.int64)
    if tl.load(remaining_ptr + i) != _DRAWS_RANKED:
        return
    row = tl.load(rows_ptr + i)
    num_chunks = tl.num_programs(0)
    chunks = tl.arange(0, CHUNKS)
    surveyed = tl.arange(0, _SURVEYED)
    cells = (i * num_chunks + chunks[:, None]) * _SURVEYED + surveyed[None, :]
    measure = tl.sum(tl.load(chunk_survey_ptr + cells, mask=(chunks < num_chunks)[:, None], other=0.0), 0)
    top_k = tl.load(top_k_ptr + row * _ROW_WORDS)
    top_p = tl.load(top_p_ptr + row * _ROW_PAIRS).to(tl.float32)
    enough = tl.where(top_k > 0, top_k.to(tl.float32), top_p * _SURELY)
    choice = tl.min(tl.where(measure >= enough, surveyed, _SURVEYED), 0)
    cutoff = tl.where(choice < _SURVEYED, (127 - _OCTAVES * (choice + 1)) << 23, 0)
    if tl.program_id(0) == 0:
        tl.store(cutoff_ptr + i, cutoff)
    row_max = tl.load(row_max_ptr + i)
    row_scale = tl.load(row_scale_ptr + i)
    row_share = tl.load(row_share_ptr + i)
    best = _probability(tl.load(chunk_max_ptr + i * num_chunks + tl.program_id(0)), row_max, row_scale, row_share)
    if best * _NEARLY < _from_bits(cutoff):
        return
    places = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    logits = _logits(logits_ptr + i * logits_stride, places, vocab_size)
    bits = _bits(_probability(logits, row_max, row_scale, row_share))
    listed = (bits >= cutoff) & (places < vocab_size)
    ones = listed.to(tl.int32)
    # Which chunk comes first is left to chance: what the list is for does not depend on its order.
    first = tl.atomic_add(list_length_ptr + i, tl.sum(ones, 0), sem="relaxed")
    tl.store(words_ptr + i * vocab_size + first + tl.cumsum(ones, 0) - 1, bits, mask=listed)


@triton.jit
def _search(list_ptr, length, low, high, need, BY_WEIGHT: tl.constexpr, TILE: tl.constexpr, PIVOTS: tl.constexpr):
    """Find the highest threshold at and above which the listed tokens suffice for ``need``, a weight or a number.

    They must not suffice at ``high``; if they do at ``low`` either, the threshold is one with all of them above it, or
    with more needed at it than there are. Returns the threshold, and the weight and number of tokens strictly above it.
    Each pass divides the range at several pivots and draws it in to what lies in it, so a range that holds
    one probability, however often, ends the search.
    """
    steps = tl.arange(0, PIVOTS) + 1
    above_weight = tl.zeros((), tl.int64)
    above_count = tl.zeros((), tl.int32)
    while high - low > 1:
        pivots = low + (high - low + PIVOTS) // (PIVOTS + 1) * steps
        weights = tl.zeros((PIVOTS,), tl.int64)
        counts = tl.zeros((PIVOTS,), tl.int32)
        least = tl.full((TILE,), _LARGEST, tl.int32)
        most = tl.full((TILE,), -1, tl.int32)
        for start in range(0, length, TILE):
            places = start + tl.arange(0, TILE)
            held = places < length
            bits = tl.load(list_ptr + places, mask=held, other=0)
            weight = _weight(_from_bits(bits))
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
        # Where nothing suffices, as with a top-p that rounding keeps out of reach, all has to end up above the threshold:
        # so the range is not drawn in beyond its new end.
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
    vocab_size,
    TILE: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """What top-k keeps, then what top-p keeps of it; then whichever of that and min-p keeps less."""
    i = tl.program_id(0).to(tl.int64)
    if tl.load(remaining_ptr + i) != _DRAWS_RANKED:
        return
    row = tl.load(rows_ptr + i)
    top_k = tl.load(top_k_ptr + row * _ROW_WORDS)
    top_p = tl.load(top_p_ptr + row * _ROW_PAIRS)
    list_ptr = words_ptr + i * vocab_size
    length = tl.load(list_length_ptr + i)
    above_all = _bits(tl.load(row_share_ptr + i)) + 1
    threshold = tl.load(cutoff_ptr + i)
    ties_kept = tl.full((), _LARGEST, tl.int32)
    mass = tl.full((), _WEIGHT_OF_ONE, tl.float64)
    if top_k > 0:
        threshold, weight, count = _search(
            list_ptr, length, threshold, above_all, top_k.to(tl.float64), False, TILE, PIVOTS
        )
        ties_kept = top_k - count
        mass = (weight + ties_kept * _weight(_from_bits(threshold))).to(tl.float64)
    if top_p < 1.0:
        need = top_p * mass
        threshold, weight, count = _search(list_ptr, length, threshold, above_all, need, True, TILE, PIVOTS)
        whole = need.to(tl.int64)
        whole += (whole.to(tl.float64) < need).to(tl.int64)
        each = tl.maximum(_weight(_from_bits(threshold)), 1)
        ties_kept = tl.minimum((whole - weight + each - 1) // each, vocab_size).to(tl.int32)
    least = tl.load(threshold_ptr + i)
    tl.store(threshold_ptr + i, tl.maximum(threshold, least))
    tl.store(ties_kept_ptr + i, tl.where(least >= threshold, 0, ties_kept))


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
):
    """The weight above the threshold and the number of tokens at it."""
    i = tl.program_id(1).to(tl.int64)
    if tl.load(remaining_ptr + i) == _DONE:
        return
    row_max = tl.load(row_max_ptr + i)
    row_scale = tl.load(row_scale_ptr + i)
    row_share = tl.load(row_share_ptr + i)
    threshold = tl.load(threshold_ptr + i)
    here = i * tl.num_programs(0) + tl.program_id(0)
    best = _probability(tl.load(chunk_max_ptr + here), row_max, row_scale, row_share)
    if best * _NEARLY < _from_bits(tl.maximum(threshold, 0)):
        tl.store(chunk_weight_ptr + here, tl.zeros((), tl.int64))
        tl.store(chunk_ties_ptr + here, 0)
        return
    places = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    p = _probability(_logits(logits_ptr + i * logits_stride, places, vocab_size), row_max, row_scale, row_share)
    tl.store(chunk_weight_ptr + here, tl.sum(tl.where(_bits(p) > threshold, _weight(p), 0), 0))
    at_threshold = (_bits(p) == threshold) & (places < vocab_size)
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
):
    """Find the chunk, then the token, at which the cumulative weight passes the uniform's share of the total."""
    i = tl.program_id(0).to(tl.int64)
    if tl.load(remaining_ptr + i) == _DONE:
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
    weights += kept * _weight(_from_bits(tl.maximum(threshold, 0)))
    cumulative = tl.cumsum(weights, 0)
    total = tl.sum(weights, 0)

    seed = tl.load(seed_ptr + row * _ROW_PAIRS).to(tl.uint64, bitcast=True)
    uniform = _uniform(seed, tl.load(positions_ptr + i).to(tl.uint64))
    target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    chunk = tl.sum((cumulative <= target).to(tl.int32), 0)
    target -= tl.sum(tl.where(chunks < chunk, weights, 0), 0)
    ties_kept -= tl.sum(tl.where(chunks < chunk, ties, 0), 0)

    places = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = _logits(logits_ptr + i * logits_stride, places, vocab_size)
    p = _probability(logits, tl.load(row_max_ptr + i), tl.load(row_scale_ptr + i), tl.load(row_share_ptr + i))
    bits = _bits(p)
    at_threshold = (bits == threshold) & (places < vocab_size)
    rank = tl.cumsum(at_threshold.to(tl.int32), 0)
    weight = tl.where((bits > threshold) | (at_threshold & (rank <= ties_kept)), _weight(p), 0)
    place = tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
    tl.store(out_token_ids_ptr + i, chunk * CHUNK + place)


@triton.jit
def _logprob_kernel(
    logits_ptr,
    logits_stride,
    token_ids_ptr,
    chunk_max_ptr,
    chunk_sum_ptr,
    out_logprobs_ptr,
    out_normalisers_ptr,
    num_chunks,
    CHUNKS: tl.constexpr,
):
    """The raw log probability of each row's token, and what to subtract from its other logits to get theirs."""
    i = tl.program_id(0).to(tl.int64)
    token_id = tl.load(token_ids_ptr + i)
    if token_id < 0:
        tl.store(out_logprobs_ptr + i, 0.0)
        tl.store(out_normalisers_ptr + i, 0.0)
        return
    chunks = tl.arange(0, CHUNKS)
    held = chunks < num_chunks
    chunk_max = tl.load(chunk_max_ptr + i * num_chunks + chunks, mask=held, other=float("-inf"))
    sums = tl.load(chunk_sum_ptr + i * num_chunks + chunks, mask=held, other=0)
    row_max = _finite_or_zero(tl.max(chunk_max, 0))
    scale = _scale_of(tl.full((), 1.0, tl.float32))
    normaliser = row_max + tl.log(_total(chunk_max, sums, row_max, scale))
    logit = tl.load(logits_ptr + i * logits_stride + token_id).to(tl.float32)
    tl.store(out_logprobs_ptr + i, logit - normaliser)
    tl.store(out_normalisers_ptr + i, normaliser)


def sample(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    columns: SamplingColumns,
    token_store: Tensor,
    workspace: SamplingWorkspace,
    out_token_ids: Tensor,
    out_status: Tensor,
    *,
    variant: Variant,
    adjusted: bool,
) -> None:
    """Draw one token per row of ``logits``.

    ``logits`` bfloat16, float16 or float32, shape ``[n, vocab_size]``, contiguous along the vocabulary, not modified;
    ``rows`` int32, shape ``[n]``, -1 for padding; ``positions`` int32, shape ``[n]``, at least 1: the index of the token
    being drawn; ``token_store`` int32, shape ``[rows, width]``, of which positions ``0 .. position - 1`` are read for
    rows with penalties. Writes ``out_token_ids`` (int32, shape ``[n]``; -1 for padding and for rows without a finite
    largest logit) and ``out_status`` (int32, shape ``[n]``; 1 for the latter, otherwise 0).

    ``variant`` says what some row of the batch asks for: "greedy" nothing, "random" a draw, "truncated" a draw under
    top-k or top-p; min-p needs no more than "random". ``adjusted``: some row has penalties or entries. A row gets the
    same token under any that suffices for it.
    """
    if adjusted:
        _adjust(logits, rows, positions, columns, token_store, workspace)
        logits = workspace.adjusted
    _statistics(logits, rows, columns, workspace, with_sum=variant != "greedy")
    _merge(rows, columns, workspace, out_token_ids, out_status, random=variant != "greedy")
    if variant == "truncated":
        _truncate(logits, rows, columns, workspace)
    if variant != "greedy":
        _draw(logits, rows, positions, columns, workspace, out_token_ids)


def row_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    workspace: SamplingWorkspace,
    out_logprobs: Tensor,
    out_normalisers: Tensor,
) -> None:
    """Log probabilities of ``token_ids`` (int32, shape ``[n]``) in the raw distribution of ``logits``.

    ``out_logprobs`` and ``out_normalisers`` float32, shape ``[n]``; a logit less its row's normaliser is its log
    probability. Rows whose token is -1 get zeros. Uses the workspace: to be launched after ``sample``, not before.
    """
    work = workspace
    # A row without a token is as good as padding.
    _statistics_kernel[_chunk_grid(token_ids, work)](
        logits,
        logits.stride(0),
        token_ids,
        out_logprobs,
        work.chunk_max,
        work.chunk_place,
        work.chunk_sum,
        work.vocab_size,
        CHUNK=work.chunk,
        WITH_SUM=True,
        RAW=True,
        num_warps=_CHUNK_WARPS,
    )
    _logprob_kernel[(len(token_ids),)](
        logits,
        logits.stride(0),
        token_ids,
        work.chunk_max,
        work.chunk_sum,
        out_logprobs,
        out_normalisers,
        work.chunk_max.shape[1],
        CHUNKS=triton.next_power_of_2(work.chunk_max.shape[1]),
    )


def top_logprobs(logits: Tensor, k: int, normalisers: Tensor) -> tuple[Tensor, Tensor]:
    """The ``k`` most likely tokens of each row: ids (int64) and log probabilities (float32), both ``[n, k]``.

    ``normalisers`` as ``row_logprobs`` wrote them. Plain torch: allocates, but waits for nothing.
    """
    best = logits.topk(k, dim=-1)
    return best.indices, best.values.float() - normalisers[:, None]


def _chunk_grid(rows: Tensor, workspace: SamplingWorkspace) -> tuple[int, int]:
    return workspace.chunk_max.shape[1], len(rows)


def _adjust(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    columns: SamplingColumns,
    token_store: Tensor,
    work: SamplingWorkspace,
) -> None:
    """Fill ``adjusted`` with the logits under penalties, bias and the ``min_tokens`` mask."""
    flags, num_prompt_tokens = columns.column("flags"), columns.column("num_prompt_tokens")
    grid = _chunk_grid(rows, work)
    _clear_kernel[grid](rows, flags, work.words, work.vocab_size, CHUNK=work.chunk, num_warps=_CHUNK_WARPS)
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
    )
    # Without fusion the penalties round as they do anywhere else.
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
        num_warps=_CHUNK_WARPS,
        enable_fp_fusion=False,
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
    )


def _statistics(
    logits: Tensor, rows: Tensor, columns: SamplingColumns, work: SamplingWorkspace, *, with_sum: bool
) -> None:
    _statistics_kernel[_chunk_grid(rows, work)](
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
        num_warps=_CHUNK_WARPS,
    )


def _merge(
    rows: Tensor,
    columns: SamplingColumns,
    work: SamplingWorkspace,
    out_token_ids: Tensor,
    out_status: Tensor,
    *,
    random: bool,
) -> None:
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
    )


def _truncate(logits: Tensor, rows: Tensor, columns: SamplingColumns, work: SamplingWorkspace) -> None:
    """Find the thresholds of the rows with top-k or top-p."""
    grid = _chunk_grid(rows, work)
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
        num_warps=_CHUNK_WARPS,
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
        num_warps=_CHUNK_WARPS,
    )
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
        work.vocab_size,
        TILE=_SEARCH_TILE,
        PIVOTS=_PIVOTS,
        num_warps=_SEARCH_WARPS,
    )


def _draw(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    columns: SamplingColumns,
    work: SamplingWorkspace,
    out_token_ids: Tensor,
) -> None:
    """Invert the kept weights of every row that is not done."""
    grid = _chunk_grid(rows, work)
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
        num_warps=_CHUNK_WARPS,
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
        num_warps=_CHUNK_WARPS,
    )
