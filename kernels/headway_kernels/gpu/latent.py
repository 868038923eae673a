"""Queries and rows of latent attention between their products and attention (DeepSeek-AI 2024, arXiv 2405.04434).

Owns: normalising, rotating and storing a token's row, rotating its queries. Must not know: products, requests.
"""

import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.dependence import await_grid, dependent_launch
from headway_kernels.gpu.float8 import code_of, exponent_of, magnitude_bits
from headway_kernels.gpu.rotary import load_rotation, rotated
from headway_kernels.kv_codes import is_coded

NUMBERS_PER_PROGRAM = 1024
"""Of queries, as whole heads."""
NUM_WARPS = 4


def store_latent(
    compressed: Tensor,
    norm: Tensor,
    queries: Tensor,
    wide: Tensor,
    positions: Tensor,
    slots: Tensor,
    cosines: Tensor,
    sines: Tensor,
    pool_layer: Tensor,
    *,
    eps: float,
    query_factors: Tensor | None = None,
) -> None:
    """Store each token's row, and write the rotated channels of its queries where attention reads them.

    ``compressed`` ``[T, rank + shared]``; ``norm`` ``[rank]``: an RMSNorm of the first ``rank``, rounded before and after the
    product with the weight. ``queries`` ``[T, heads, shared + plain]``, of which the ``shared`` are rotated into the first channels
    of ``wide``, ``[T, heads, shared + rank]``; channels i and i + shared / 2 are a pair. ``query_factors`` float32, ``[context]``,
    multiply whole queries by position, the plain channels in place; None: nothing does. One floating dtype, any stride but of elements.

    ``positions``, ``slots``: see ``rotate_and_store``; ``cosines``, ``sines`` float32 ``[context, shared / 2]``, contiguous.
    ``pool_layer`` ``[num_blocks, 1, block_size, shared + rank]``, of numbers or of codes: shared channels first.
    """
    num_tokens, num_heads, head_dim = queries.shape
    if num_tokens == 0:
        return
    shared = 2 * cosines.shape[1]
    rank = compressed.shape[1] - shared
    assert compressed.stride(1) == queries.stride(2) == wide.stride(2) == 1, "rows may lie apart, elements not"
    assert wide.shape == (num_tokens, num_heads, shared + rank), "a head has a row's width"
    constants = sizes(num_heads, rank, shared, head_dim - shared)
    store_latent_kernel[(num_tokens, 1 + triton.cdiv(num_heads, constants["BLOCK_HEADS"]))](
        compressed,
        norm,
        queries,
        wide,
        positions,
        slots,
        cosines,
        sines,
        cosines if query_factors is None else query_factors,
        pool_layer,
        compressed.stride(0),
        queries.stride(0),
        queries.stride(1),
        wide.stride(0),
        wide.stride(1),
        eps,
        **constants,
        GROWS=query_factors is not None,
        CODED=int(is_coded(pool_layer)),
        BLOCK_SIZE=pool_layer.shape[2],
        BLOCK_STRIDE=pool_layer.stride(0),
        num_warps=NUM_WARPS,
        **dependent_launch(queries.device),
    )


def sizes(num_heads: int, rank: int, shared: int, plain: int) -> dict[str, int]:
    """The constants of the kernel that a model decides."""
    return {
        "NUM_HEADS": num_heads,
        "RANK": rank,
        "PAIRS": shared // 2,
        "PLAIN": plain,
        "BLOCK_RANK": triton.next_power_of_2(rank),
        "BLOCK_PAIRS": triton.next_power_of_2(shared // 2),
        "BLOCK_PLAIN": triton.next_power_of_2(plain),
        "BLOCK_HEADS": max(NUMBERS_PER_PROGRAM // triton.next_power_of_2(plain), 1),
    }


@triton.jit(do_not_specialize=["eps"], do_not_specialize_on_alignment=["positions", "slots"])
def store_latent_kernel(
    compressed,
    norm,
    queries,
    wide,
    positions,
    slots,
    cosines,
    sines,
    query_factors,
    pool_layer,
    compressed_stride,
    queries_stride,
    queries_head_stride,
    wide_stride,
    wide_head_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    PAIRS: tl.constexpr,
    PLAIN: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_PLAIN: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    GROWS: tl.constexpr,
    CODED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first program of a token has its row, the others have its queries."""
    await_grid(PDL)
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK_PAIRS)
    is_pair = pair < PAIRS
    position, cosine, sine = load_rotation(positions, cosines, sines, token, pair, PAIRS)
    part = tl.program_id(1)
    if part == 0:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            row = compressed + token * compressed_stride
            block = pool_layer + slot // BLOCK_SIZE * BLOCK_STRIDE
            _store_row(
                row, norm, cosine, sine, pair, block, slot % BLOCK_SIZE, eps, RANK, PAIRS, BLOCK_RANK, CODED, BLOCK_SIZE
            )
    else:
        heads = (part - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        is_head = (heads < NUM_HEADS)[:, None]
        source = queries + token * queries_stride + heads[:, None] * queries_head_stride
        first = tl.load(source + pair[None, :], mask=is_head & is_pair[None, :], other=0.0).to(tl.float32)
        second = tl.load(source + PAIRS + pair[None, :], mask=is_head & is_pair[None, :], other=0.0).to(tl.float32)
        if GROWS:
            factor = tl.load(query_factors + position)
            first, second = first * factor, second * factor
            channel = tl.arange(0, BLOCK_PLAIN)
            plain = source + 2 * PAIRS + channel[None, :]
            within = is_head & (channel < PLAIN)[None, :]
            grown = tl.load(plain, mask=within, other=0.0).to(tl.float32) * factor
            tl.store(plain, grown.to(queries.dtype.element_ty), mask=within)
        target = wide + token * wide_stride + heads[:, None] * wide_head_stride + pair[None, :]
        left, right = rotated(first, second, cosine[None, :], sine[None, :])
        tl.store(target, left.to(wide.dtype.element_ty), mask=is_head & is_pair[None, :])
        tl.store(target + PAIRS, right.to(wide.dtype.element_ty), mask=is_head & is_pair[None, :])


@triton.jit
def _store_row(
    row,
    norm,
    cosine,
    sine,
    pair,
    block,
    place,
    eps,
    RANK: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    CODED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Normalise and rotate a row, and store it at a ``place`` of a ``block``."""
    dtype = row.dtype.element_ty
    channel = tl.arange(0, BLOCK_RANK)
    within = channel < RANK
    latent = tl.load(row + channel, mask=within, other=0.0).to(tl.float32)
    inverse = tl.math.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
    weight = tl.load(norm + channel, mask=within, other=0.0).to(tl.float32)
    latent = ((latent * inverse).to(dtype).to(tl.float32) * weight).to(dtype)
    first = tl.load(row + RANK + pair, mask=pair < PAIRS, other=0.0).to(tl.float32)
    second = tl.load(row + RANK + PAIRS + pair, mask=pair < PAIRS, other=0.0).to(tl.float32)
    left, right = rotated(first, second, cosine, sine)
    left, right = left.to(dtype), right.to(dtype)
    target = block + place * (2 * PAIRS + RANK)
    if CODED:
        latent, left, right = latent.to(tl.float32), left.to(tl.float32), right.to(tl.float32)
        of_pairs = tl.maximum(magnitude_bits(left), magnitude_bits(right))
        exponent = exponent_of(tl.maximum(tl.max(magnitude_bits(latent), 0), tl.max(of_pairs, 0)))
        latent, left, right = code_of(latent, exponent), code_of(left, exponent), code_of(right, exponent)
        tl.store(block + BLOCK_SIZE * (2 * PAIRS + RANK) + place, exponent.to(tl.uint8))
    tl.store(target + pair, left, mask=pair < PAIRS)
    tl.store(target + PAIRS + pair, right, mask=pair < PAIRS)
    tl.store(target + 2 * PAIRS + channel, latent, mask=within)
