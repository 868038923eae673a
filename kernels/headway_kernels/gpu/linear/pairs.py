"""Codes in pairs become numbers of 16 bits, two or four at a time.

Owns: the instructions. Must not know: what the codes are of, products.

One by one, a code takes six to eight instructions; with few tokens, memory delivers codes faster than a processor could issue
those. Every step here is exact. The tests run these instructions, one after the other, for every code.
"""

import triton
import triton.language as tl

_HALVES = 0x10001
_SIGNS = "0x80008000"


def _of_fp8(left: int, ending: str) -> str:
    """Two int16 pairs of E4M3: seven bits move to where an exponent ends, the eighth to the sign."""
    mask = f"0x{(0x7F << left) * _HALVES:08x}"
    return f"""{{
.reg .b32 low, high, sign, one, other;
shl.b32 low, $2, {left};
and.b32 low, low, {mask};
shl.b32 sign, $2, 8;
and.b32 sign, sign, {_SIGNS};
or.b32 low, low, sign;
shr.b32 high, $2, {8 - left};
and.b32 high, high, {mask};
and.b32 sign, $2, {_SIGNS};
or.b32 high, high, sign;
{ending}
}}"""


def _of_int4(kind: str, exponent: int, one: int, other: int) -> str:
    """Four bytes: below an exponent, four bits are an integer, with the smallest that has it; ``other`` subtracts that and 8."""
    return f"""{{
.reg .b32 low, high, exponent, one, other, part;
and.b32 low, $4, 0x0f0f0f0f;
shr.b32 high, $4, 4;
and.b32 high, high, 0x0f0f0f0f;
mov.b32 exponent, 0x{exponent:08x};
mov.b32 one, 0x{one * _HALVES:08x};
mov.b32 other, 0x{other * _HALVES:08x};
prmt.b32 part, low, exponent, 0x4140;
fma.rn.{kind} $0, part, one, other;
prmt.b32 part, low, exponent, 0x4342;
fma.rn.{kind} $1, part, one, other;
prmt.b32 part, high, exponent, 0x4140;
fma.rn.{kind} $2, part, one, other;
prmt.b32 part, high, exponent, 0x4342;
fma.rn.{kind} $3, part, one, other;
}}"""


FP8_TO_FLOAT16 = _of_fp8(7, "mov.b32 $0, low;\nmov.b32 $1, high;")
FP8_TO_BFLOAT16 = _of_fp8(
    4,
    f"""mov.b32 one, 0x77807780;
mov.b32 other, {_SIGNS};
fma.rn.bf16x2 $0, low, one, other;
fma.rn.bf16x2 $1, high, one, other;""",
)
"""bfloat16's exponents are 120 too small; a product with 2 ** 112 leaves the 8 of float16."""
INT4_TO_FLOAT16 = _of_int4("f16x2", 0x64, 0x3C00, 0xE408)
INT4_TO_BFLOAT16 = _of_int4("bf16x2", 0x43, 0x3F80, 0xC308)

_FP8_TO_FLOAT16 = tl.constexpr(FP8_TO_FLOAT16)
_FP8_TO_BFLOAT16 = tl.constexpr(FP8_TO_BFLOAT16)
_INT4_TO_FLOAT16 = tl.constexpr(INT4_TO_FLOAT16)
_INT4_TO_BFLOAT16 = tl.constexpr(INT4_TO_BFLOAT16)


# Each type is written out in a call of its own: Triton takes no ``constexpr`` among the types of inline assembly.
@triton.jit
def numbers_of_fp8_pairs(pairs, dtype: tl.constexpr):
    """The low and the high E4M3 codes of int16 ``pairs`` as numbers of ``dtype``, too small as ``float8.numbers_of`` says."""
    if dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            _FP8_TO_BFLOAT16, "=r,=r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        low, high = tl.inline_asm_elementwise(
            _FP8_TO_FLOAT16, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return low, high


@triton.jit
def numbers_of_int4_pairs(pairs, dtype: tl.constexpr):
    """The low and the high codes of 4 bits of uint8 ``pairs``, less 8, as numbers of ``dtype``."""
    if dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            _INT4_TO_BFLOAT16, "=r,=r,=r,=r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low, high = tl.inline_asm_elementwise(
            _INT4_TO_FLOAT16, "=r,=r,=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    return low, high
