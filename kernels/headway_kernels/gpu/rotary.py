"""Queries, keys and values between their product and attention.

Owns: normalising, rotating, storing. Must not know: requests.

Sources: rotary embeddings, Su et al. 2021 (arXiv 2104.09864); RMSNorm, Zhang & Sennrich 2019 (arXiv 1910.07467), per
head as in Qwen3; layer norms, Ba et al. 2016 (arXiv 1607.06450), per head as in Command R+; the pool of blocks, Kwon et al.
2023 (arXiv 2309.06180).
"""

import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.dependence import await_grid, dependent_launch
from headway_kernels.gpu.float8 import code_of, exponent_of, magnitude_bits
from headway_kernels.kv_codes import is_coded

PAIRS_PER_PROGRAM = 512
"""Rotated pairs of one token per program, as whole heads; 8 heads of 128 channels."""
NUM_WARPS = 4


def rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cosines: Tensor,
    sines: Tensor,
    pool_layer: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    head_weights: Tensor | None = None,
    head_biases: Tensor | None = None,
    eps: float = 0.0,
    norms_rotated: bool = False,
    norms_values: bool = False,
    query_factors: Tensor | None = None,
) -> None:
    """Rotate queries in place; store rotated keys, and values, in the pool. ``qkv`` keeps its keys and values.

    ``qkv`` ``[T, (num_heads + 2 num_kv_heads) * head_dim]``, any row stride: query heads, key heads, value heads;
    channels i and i + head_dim / 2 are a pair. ``positions`` int32 ``[T]``, rows of the tables. ``slots`` int32
    ``[T]``, distinct; -1 stores nothing. ``cosines``, ``sines`` float32 ``[context, head_dim / 2]``, contiguous.
    ``pool_layer`` as of ``paged_attention``, of numbers or of codes. ``q_norm``, ``k_norm`` ``[head_dim]``: weights of an
    RMSNorm per head, or None. ``head_weights`` and perhaps ``head_biases``, float32 ``[num_heads + num_kv_heads, head_dim]``,
    contiguous: of a layer norm per head in its place. ``query_factors`` float32 ``[context]`` multiply queries by position;
    None: nothing does.

    Heads behind an RMSNorm are rounded before and after the product with the weight, behind a layer norm once, then rotated
    in float32; with ``norms_rotated``, rotated and rounded before that. With ``norms_values``, values have an RMSNorm, too,
    without a weight. Without ``num_kv_heads``, ``qkv`` has queries alone, and nothing is stored.
    """
    num_tokens = qkv.shape[0]
    if num_tokens == 0:
        return
    block_pairs = triton.next_power_of_2(head_dim // 2)
    block_heads = max(PAIRS_PER_PROGRAM // block_pairs, 1)
    norms = (q_norm, q_norm if k_norm is None else k_norm) if head_weights is None else (head_weights, head_biases)
    normalise = q_norm is not None
    assert not norms_values or (normalise and not norms_rotated), "values have the norm of what is not rotated yet"
    _rotate_and_store[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, block_heads))](
        qkv,
        positions,
        slots,
        cosines,
        sines,
        pool_layer,
        *(qkv if norm is None else norm for norm in norms),
        cosines if query_factors is None else query_factors,
        qkv.stride(0),
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        PAIRS=head_dim // 2,
        CODED=int(is_coded(pool_layer)),
        BLOCK_SIZE=pool_layer.shape[2],
        BLOCK_STRIDE=pool_layer.stride(0),
        BLOCK_HEADS=block_heads,
        BLOCK_PAIRS=block_pairs,
        NORMALISE=normalise,
        LAYER_NORMS=head_weights is not None,
        HAS_BIASES=head_biases is not None,
        GROWS=query_factors is not None,
        NORMS_ROTATED=norms_rotated,
        NORMS_VALUES=norms_values,
        num_warps=NUM_WARPS,
        **dependent_launch(qkv.device),
    )


@triton.jit
def rotated(first, second, cosine, sine):
    """Both channels of pairs."""
    return first * cosine - second * sine, first * sine + second * cosine


@triton.jit
def load_rotation(positions, cosines, sines, token, pairs, PAIRS: tl.constexpr):
    """The position of a token, int64, and the cosines and sines of its ``pairs``."""
    position = tl.load(positions + token).to(tl.int64)
    cosine = tl.load(cosines + position * PAIRS + pairs, mask=pairs < PAIRS, other=0.0)
    sine = tl.load(sines + position * PAIRS + pairs, mask=pairs < PAIRS, other=0.0)
    return position, cosine, sine


@triton.jit(do_not_specialize=["eps"], do_not_specialize_on_alignment=["positions", "slots"])
def _rotate_and_store(
    qkv,
    positions,
    slots,
    cosines,
    sines,
    pool_layer,
    q_norm,
    k_norm,
    query_factors,
    qkv_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    CODED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    NORMALISE: tl.constexpr,
    LAYER_NORMS: tl.constexpr,
    HAS_BIASES: tl.constexpr,
    GROWS: tl.constexpr,
    NORMS_ROTATED: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
    PDL: tl.constexpr,
):
    """With ``LAYER_NORMS``, ``q_norm`` and ``k_norm`` are weights and biases of all heads of queries and keys."""
    await_grid(PDL)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pairs = tl.arange(0, BLOCK_PAIRS)
    within = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (pairs < PAIRS)[None, :]
    dtype = qkv.dtype.element_ty
    source = qkv + token * qkv_stride + heads[:, None] * (2 * PAIRS) + pairs[None, :]
    first = tl.load(source, mask=within, other=0.0).to(tl.float32)
    second = tl.load(source + PAIRS, mask=within, other=0.0).to(tl.float32)

    is_query, is_rotated = (heads < NUM_HEADS)[:, None], (heads < NUM_HEADS + NUM_KV_HEADS)[:, None]
    position, cosine, sine = load_rotation(positions, cosines, sines, token, pairs, PAIRS)
    cosine, sine = cosine[None, :], sine[None, :]
    left, right = first, second
    if NORMS_ROTATED:
        left, right = rotated(first, second, cosine, sine)
        left, right = left.to(dtype).to(tl.float32), right.to(dtype).to(tl.float32)
    if NORMALISE:
        left, right = _rms_normed(left, right, q_norm, k_norm, eps, pairs, is_query, is_rotated, dtype, PAIRS)
        if NORMS_VALUES:
            first, second = left, right
    if LAYER_NORMS:
        is_there = within & is_rotated
        left, right = _layer_normed(left, right, q_norm, k_norm, eps, heads, pairs, is_there, dtype, PAIRS, HAS_BIASES)
    if GROWS:
        factor = tl.where(is_query, tl.load(query_factors + position), 1.0)
        left, right = left * factor, right * factor
    if not NORMS_ROTATED:
        left, right = rotated(left, right, cosine, sine)
    # Values are chosen, not rotated by nothing: a zero sine times an infinity would not be zero.
    rotated_first = tl.where(is_rotated, left, first).to(dtype)
    rotated_second = tl.where(is_rotated, right, second).to(dtype)

    tl.store(source, rotated_first, mask=within & is_query)
    tl.store(source + PAIRS, rotated_second, mask=within & is_query)
    slot = tl.load(slots + token).to(tl.int64)
    block = pool_layer + (slot // BLOCK_SIZE) * BLOCK_STRIDE
    vector = (heads - NUM_HEADS) * BLOCK_SIZE + slot % BLOCK_SIZE
    target = block + vector[:, None] * (2 * PAIRS) + pairs[None, :]
    # Not "& (slot >= 0)": Triton's interpreter cannot broadcast what comparing a scalar gives.
    is_stored = tl.where(heads >= NUM_HEADS, slot, -1) >= 0
    stored = within & is_stored[:, None]
    if CODED:
        left, right = rotated_first.to(tl.float32), rotated_second.to(tl.float32)
        exponents = exponent_of(tl.max(tl.maximum(magnitude_bits(left), magnitude_bits(right)), axis=1))
        tl.store(target, code_of(left, exponents[:, None]), mask=stored)
        tl.store(target + PAIRS, code_of(right, exponents[:, None]), mask=stored)
        behind = block + 2 * NUM_KV_HEADS * BLOCK_SIZE * 2 * PAIRS
        tl.store(behind + vector, exponents.to(tl.uint8), mask=is_stored & (heads < NUM_HEADS + 2 * NUM_KV_HEADS))
    else:
        tl.store(target, rotated_first, mask=stored)
        tl.store(target + PAIRS, rotated_second, mask=stored)


@triton.jit
def _rms_normed(
    left, right, q_norm, k_norm, eps, pairs, is_query, is_rotated, dtype: tl.constexpr, PAIRS: tl.constexpr
):
    """Half-heads ``[heads, pairs]`` behind an RMSNorm, rounded to the model's dtype; float32."""
    squares = tl.sum(left * left + right * right, axis=1)
    inverse = tl.math.rsqrt(squares / (2 * PAIRS) + eps)[:, None]
    left = _times_weight((left * inverse).to(dtype), q_norm, k_norm, pairs, PAIRS, is_query, is_rotated)
    right = _times_weight(
        (right * inverse).to(dtype), q_norm + PAIRS, k_norm + PAIRS, pairs, PAIRS, is_query, is_rotated
    )
    return left, right


@triton.jit
def _layer_normed(
    left,
    right,
    weights,
    biases,
    eps,
    heads,
    pairs,
    is_there,
    dtype: tl.constexpr,
    PAIRS: tl.constexpr,
    HAS_BIASES: tl.constexpr,
):
    """As ``_rms_normed``, of a layer norm; each head has weights of its own."""
    mean = (tl.sum(left + right, axis=1) / (2 * PAIRS))[:, None]
    left = tl.where(is_there, left - mean, 0.0)
    right = tl.where(is_there, right - mean, 0.0)
    inverse = tl.math.rsqrt(tl.sum(left * left + right * right, axis=1) / (2 * PAIRS) + eps)[:, None]
    place = heads[:, None] * (2 * PAIRS) + pairs[None, :]
    left *= inverse * tl.load(weights + place, mask=is_there, other=0.0)
    right *= inverse * tl.load(weights + PAIRS + place, mask=is_there, other=0.0)
    if HAS_BIASES:
        left += tl.load(biases + place, mask=is_there, other=0.0)
        right += tl.load(biases + PAIRS + place, mask=is_there, other=0.0)
    return left.to(dtype).to(tl.float32), right.to(dtype).to(tl.float32)


@triton.jit
def _times_weight(normalised, q_norm, k_norm, pairs, PAIRS: tl.constexpr, is_query, is_rotated):
    """Half-heads ``[heads, pairs]`` times their kind's weight, which is 1 of values, rounded to the model's dtype; float32."""
    of_queries = tl.load(q_norm + pairs, mask=pairs < PAIRS, other=0.0).to(tl.float32)[None, :]
    of_keys = tl.load(k_norm + pairs, mask=pairs < PAIRS, other=0.0).to(tl.float32)[None, :]
    scaled = normalised.to(tl.float32) * tl.where(is_query, of_queries, tl.where(is_rotated, of_keys, 1.0))
    return scaled.to(normalised.dtype).to(tl.float32)
