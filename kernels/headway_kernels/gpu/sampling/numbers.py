"""The arithmetic that all sampling kernels share: logits to probabilities to integer weights.

Owns: what must give the same bits in every kernel. Must not know: grids.
"""

import triton
import triton.language as tl

from headway_kernels.gpu.sampling.layout import ROW_WORDS

WORDS = tl.constexpr(ROW_WORDS)
PAIRS = tl.constexpr(ROW_WORDS // 2)
"""The stride from one row to the next in a column of 4-byte and of 8-byte numbers."""

LOG2E = tl.constexpr(1.4426950408889634)
WEIGHT_OF_ONE = tl.constexpr(4503599627370496.0)
FIXED_ONE = tl.constexpr(float(1 << 42))
FIXED_STEP = tl.constexpr(1.0 / (1 << 42))
LARGEST = tl.constexpr(0x7FFFFFFF)

NEARLY = tl.constexpr(1.001)
"""A chunk's best probability, from its largest logit, bounds all others up to this rounding."""


@triton.jit
def load_logits(pointer, places, vocab_size):
    """Float32 logits with NaN as +inf: an infinite largest logit makes the row fail."""
    logits = tl.load(pointer + places, mask=places < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.where(logits != logits, float("inf"), logits)  # noqa: PLR0124 (what NaN is known by)


@triton.jit
def scale_of(temperature):
    """The factor on logits before ``exp2``."""
    return tl.div_rn(tl.full((), LOG2E, tl.float32), tl.where(temperature > 0, temperature, 1.0))


@triton.jit
def finite_or_zero(value):
    """Replace an infinite value by 0."""
    return tl.where((value > float("-inf")) & (value < float("inf")), value, 0.0)


@triton.jit
def probability_of(logits, row_max, row_scale, row_share):
    """No product here feeds an addition, so no compiler can fuse it in one kernel and not in another."""
    return tl.exp2((logits - row_max) * row_scale) * row_share


@triton.jit
def weight_of(probability):
    """The integer weight ``floor(p * 2^52)``."""
    return (probability * WEIGHT_OF_ONE).to(tl.int64)


@triton.jit
def share_beside(logits, largest, scale):
    """An exponential relative to ``largest``; at most 1, even in rows that fail."""
    return tl.minimum(tl.exp2((logits - largest) * scale), 1.0)


@triton.jit
def fixed_point(share):
    """An int64 with room for the sum of a million."""
    return (share * FIXED_ONE).to(tl.int64)


@triton.jit
def total_of(chunk_max, chunk_sums, row_max, scale):
    """A row's sum of exponentials relative to its largest logit."""
    shares = share_beside(chunk_max, row_max, scale) * (chunk_sums.to(tl.float32) * FIXED_STEP)
    return tl.sum(fixed_point(shares), 0).to(tl.float32) * FIXED_STEP


@triton.jit
def bits_of(probability):
    """The bits of a float32 as an int32."""
    return probability.to(tl.int32, bitcast=True)


@triton.jit
def from_bits(bits):
    """The float32 of these bits."""
    return bits.to(tl.float32, bitcast=True)
