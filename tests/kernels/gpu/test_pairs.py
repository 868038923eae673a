"""The instructions that make numbers of codes in pairs, run one after the other as PTX defines them, for every code."""

import pytest
import torch

from headway_kernels.gpu.float8 import NUMBERS_TOO_SMALL
from headway_kernels.gpu.linear import pairs

WORDS = torch.arange(1 << 16)
KINDS = {"f16x2": torch.float16, "bf16x2": torch.bfloat16}


def run(instructions, word, num_results):
    """Registers ``$0`` to ``$<num_results - 1>`` after the instructions; ``word``: int64, of 32 bits, the next register."""
    registers = {f"${num_results}": word}
    results = []
    for line in instructions.strip("{}\n").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        operation, operands = line.strip().split(" ", 1)
        target, *sources = [part.strip() for part in operands.split(",")]
        values = [registers[name] if name in registers else torch.tensor(int(name, 0)) for name in sources]
        registers[target] = OPERATIONS[operation](*values) & 0xFFFFFFFF
        results += [target] if target.startswith("$") else []
    assert results == [f"${place}" for place in range(num_results)]
    return [registers[name] for name in results]


def of_halves(bits, dtype):
    """Both halves of registers as numbers, ``[..., 2]``: the low one is the first."""
    return torch.stack([bits & 0xFFFF, bits >> 16], -1).to(torch.uint16).view(dtype)


def fused(kind):
    def operation(*sources):
        left, right, other = (of_halves(source, KINDS[kind]).double() for source in sources)
        exact = left * right + other
        rounded = exact.to(KINDS[kind])
        assert torch.equal(rounded.double(), exact), "nothing is rounded"
        # Zeros keep the sign that IEEE 754 gives them; float64 has done so.
        halves = rounded.view(torch.uint16).long()
        return halves[..., 0] | halves[..., 1] << 16

    return operation


def permuted(left, right, selector):
    both, chosen = left | right << 32, int(selector)
    return sum((both >> 8 * (chosen >> 4 * place & 15) & 0xFF) << 8 * place for place in range(4))


OPERATIONS = {
    "shl.b32": lambda value, count: value << count,
    "shr.b32": lambda value, count: value >> count,
    "and.b32": lambda value, mask: value & mask,
    "or.b32": lambda value, other: value | other,
    "mov.b32": lambda value: value,
    "prmt.b32": permuted,
    "fma.rn.f16x2": fused("f16x2"),
    "fma.rn.bf16x2": fused("bf16x2"),
}


@pytest.mark.parametrize(
    ("instructions", "dtype"), [(pairs.FP8_TO_FLOAT16, torch.float16), (pairs.FP8_TO_BFLOAT16, torch.bfloat16)]
)
def test_every_pair_of_fp8_codes(instructions, dtype):
    """Beside another word in the register, which changes nothing."""
    codes = torch.stack([WORDS & 0xFF, WORDS >> 8], -1).to(torch.uint8).view(torch.float8_e4m3fn).double()
    others = WORDS.flip(0) ^ 0x5A5A
    for word, place in ((WORDS | others << 16, 0), (others | WORDS << 16, 1)):
        found = torch.stack([of_halves(bits, dtype)[:, place] for bits in run(instructions, word, 2)], -1)
        is_number = codes.isfinite()
        assert torch.equal(found.double()[is_number] * NUMBERS_TOO_SMALL, codes[is_number])


@pytest.mark.parametrize(
    ("instructions", "dtype"), [(pairs.INT4_TO_FLOAT16, torch.float16), (pairs.INT4_TO_BFLOAT16, torch.bfloat16)]
)
def test_every_pair_of_codes_of_4_bits(instructions, dtype):
    """All bytes in each of the four places, beside three others."""
    codes = torch.arange(256)
    for place in range(4):
        places = [(codes * (31 + 2 * other) + other) & 0xFF if other != place else codes for other in range(4)]
        word = sum(byte << 8 * other for other, byte in enumerate(places))
        low_first, low_second, high_first, high_second = (of_halves(bits, dtype) for bits in run(instructions, word, 4))
        low, high = torch.cat([low_first, low_second], -1), torch.cat([high_first, high_second], -1)
        for other, byte in enumerate(places):
            assert torch.equal(low[:, other].double(), (byte & 15).double() - 8)
            assert torch.equal(high[:, other].double(), (byte >> 4).double() - 8)
