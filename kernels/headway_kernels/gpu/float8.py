"""E4M3 codes in registers, on every processor.

Owns: the bits, which processors have an instruction for them. Must not know: what the codes are of.

The codes and exponents of keys and values are those of ``headway_kernels.kv_codes``.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from headway_kernels import kv_codes

NUMBERS_TOO_SMALL = 256.0
"""A code read as float16 has an exponent that is 15 - 7 = 8 too small."""

_FIRST_CAPABILITY = (8, 9)
_AS_SMALL = tl.constexpr(1 / NUMBERS_TOO_SMALL)
_LEAST_EXPONENT = tl.constexpr(kv_codes.LEAST_EXPONENT)
_NO_NUMBER = tl.constexpr(kv_codes.NO_NUMBER)
_LEAST_NORMAL = tl.constexpr(2.0**-6)
_STEPS_OF_SUBNORMALS = tl.constexpr(2.0**9)
_ROUNDS_TO_WHOLE = tl.constexpr(2.0**23)
"""Added to smaller numbers, it leaves no bit for a fraction: they are rounded to the nearest, ties to even."""


@cache
def has_e4m3(device: torch.device) -> bool:
    """Whether the processor converts E4M3; the argument ``HAS_E4M3`` of kernels that read codes."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY


@triton.jit
def numbers_of(codes, dtype: tl.constexpr, HAS_E4M3: tl.constexpr):
    """uint8 codes as numbers of ``dtype``, exactly, but too small by ``NUMBERS_TOO_SMALL``.

    Without an instruction, the bits are moved to float16's exponent and mantissa, which also fits subnormal codes; this takes
    three times as many instructions. NaN has no place here.
    """
    if HAS_E4M3:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16) * _AS_SMALL
    else:
        bits = codes.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        numbers = bits.to(tl.float16, bitcast=True)
    return numbers.to(dtype)


@triton.jit
def factor_of(exponents):
    """What the ``numbers_of`` codes are to be multiplied by, for uint8 exponents; float32."""
    factor = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True) * 2.0
    return tl.where(exponents == _NO_NUMBER, float("nan"), factor)


@triton.jit
def magnitude_bits(values):
    """The bits of the magnitudes of float32 values, int32, which are in their order."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def exponent_of(bits):
    """The exponent of vectors, int32, from the bits of their largest magnitude."""
    return tl.maximum(bits >> 23, _LEAST_EXPONENT)


@triton.jit
def code_of(values, exponents):
    """The uint8 codes of float32 values of vectors with these exponents, rounded to the nearest, ties to even."""
    factor = ((261 - exponents) << 23).to(tl.float32, bitcast=True)
    scaled = values * factor
    bits = magnitude_bits(scaled)
    size = bits.to(tl.float32, bitcast=True)
    # Three bits of the mantissa stay, and the exponent loses what float32's bias is larger.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    whole = size * _STEPS_OF_SUBNORMALS + _ROUNDS_TO_WHOLE
    subnormal = whole.to(tl.int32, bitcast=True) & 0xFF
    sign = (scaled.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (tl.where(size < _LEAST_NORMAL, subnormal, normal) | sign).to(tl.uint8)
