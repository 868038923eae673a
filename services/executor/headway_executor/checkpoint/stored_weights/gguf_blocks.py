"""Blocks of GGUF files (as ggml-org/ggml defines them), which ``headway gguf`` puts into a checkpoint as they are.

Owns: their layout. Must not know: files, kernels.

A row of a weight is blocks of 32 or 256 inputs, each with its scales before or behind its codes. The tensor's name ends
with the kind of block.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headway_executor.checkpoint.stored_weights.mxfp4 import of_fp4
from headway_executor.checkpoint.stored_weights.scheme import StoredTensor, StoredTensors
from headway_kernels.cpu.coded_weight import CodedWeight, CodeForm

_LOW_4, _LOW_6 = 15, 63


class _Block(NamedTuple):
    """``read`` takes blocks, uint8, ``[outputs, blocks, num_bytes]``."""

    inputs: int
    num_bytes: int
    read: Callable[[Tensor], CodedWeight]


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """See ``WeightScheme``."""

    name: str = "gguf"
    unread: tuple[str, ...] = ()

    def holds(self, base: str, stored: StoredTensors) -> bool:
        """See ``WeightScheme``."""
        return _kind_of(base, stored) is not None

    def tensors(self, base: str, shape: tuple[int, int]) -> dict[str, StoredTensor]:
        """See ``WeightScheme``."""
        outputs, inputs = shape
        return {
            f"{base}.{kind}": StoredTensor(
                ("U8",), ((outputs, inputs // block.inputs * block.num_bytes),), is_optional=True
            )
            for kind, block in BLOCKS.items()
            if not inputs % block.inputs
        }

    def read(self, base: str, stored: StoredTensors) -> CodedWeight:
        """See ``WeightScheme``."""
        kind = _kind_of(base, stored)
        assert kind is not None
        found = stored.read(f"{base}.{kind}")
        return BLOCKS[kind].read(found.view(len(found), -1, BLOCKS[kind].num_bytes))


def _kind_of(base: str, stored: StoredTensors) -> str | None:
    return next((kind for kind in BLOCKS if stored.dtype(f"{base}.{kind}") is not None), None)


def _halves(stored: Tensor) -> Tensor:
    """Float16s, ``[..., 2]`` bytes, as float32, ``[...]``."""
    return stored.contiguous().view(torch.float16).float().squeeze(-1)


def _nibbles(stored: Tensor) -> Tensor:
    """``[..., bytes]``: the low halves of all, then the high ones."""
    return torch.cat([stored & _LOW_4, stored >> 4], dim=-1)


def _fifth_bits(stored: Tensor) -> Tensor:
    """Of 32 codes, ``[..., 4]`` bytes, the lowest bit of the first byte first, as 16s."""
    bits = (stored.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(-2) << 4


def _q4_0(blocks: Tensor) -> CodedWeight:
    return CodedWeight(CodeForm.CODES4, _nibbles(blocks[..., 2:]).flatten(1), _halves(blocks[..., :2]), 32)


def _q4_1(blocks: Tensor) -> CodedWeight:
    scales, minima = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    return CodedWeight(CodeForm.CODES4, _nibbles(blocks[..., 4:]).flatten(1), scales, 32, minima)


def _q5_0(blocks: Tensor) -> CodedWeight:
    codes = (_nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])).view(torch.int8) - 16
    return CodedWeight(CodeForm.CODES8, codes.flatten(1), _halves(blocks[..., :2]), 32)


def _q5_1(blocks: Tensor) -> CodedWeight:
    codes = (_nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])).view(torch.int8)
    return CodedWeight(CodeForm.CODES8, codes.flatten(1), _halves(blocks[..., :2]), 32, _halves(blocks[..., 2:4]))


def _q8_0(blocks: Tensor) -> CodedWeight:
    codes = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
    return CodedWeight(CodeForm.CODES8, codes, _halves(blocks[..., :2]), 32)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of eight groups; scales and minima have 6 bits, of which the last four groups keep two elsewhere."""
    first, second, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([first & _LOW_6, (rest & _LOW_4) | (first >> 6 << 4)], dim=-1)
    minima = torch.cat([second & _LOW_6, (rest >> 4) | (second >> 6 << 4)], dim=-1)
    wide_scales = (_halves(blocks[..., :2]).unsqueeze(-1) * scales).flatten(1)
    wide_minima = (_halves(blocks[..., 2:4]).unsqueeze(-1) * minima).flatten(1)
    return wide_scales, -wide_minima


def _pairs_of_groups(blocks: Tensor) -> Tensor:
    """128 bytes of halves of two groups each, as codes of eight groups, ``[..., 8, 32]``."""
    return _nibbles(blocks.reshape(*blocks.shape[:2], 4, 32)).reshape(*blocks.shape[:2], 8, 32)


def _q4_k(blocks: Tensor) -> CodedWeight:
    scales, minima = _scales_and_minima(blocks)
    return CodedWeight(CodeForm.CODES4, _pairs_of_groups(blocks[..., 16:]).flatten(1), scales, 32, minima)


def _q5_k(blocks: Tensor) -> CodedWeight:
    """As ``_q4_k``; a byte has the fifth bits of one place in the eight groups."""
    scales, minima = _scales_and_minima(blocks)
    bits = (blocks[..., 16:48].unsqueeze(2) >> torch.arange(8, dtype=torch.uint8).view(8, 1)) & 1
    codes = (_pairs_of_groups(blocks[..., 48:]) | bits << 4).view(torch.int8)
    return CodedWeight(CodeForm.CODES8, codes.flatten(1), scales, 32, minima)


def _q6_k(blocks: Tensor) -> CodedWeight:
    """Two halves of 128 codes, of 4 low and 2 high bits each; 16 groups."""
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64))
    pairs = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 32)
    high = torch.cat([(pairs >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1)
    codes = (low | (high << 4)).view(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8) * _halves(blocks[..., 208:]).unsqueeze(-1)
    return CodedWeight(CodeForm.CODES8, codes.flatten(1), scales.flatten(1), 16)


def _mxfp4(blocks: Tensor) -> CodedWeight:
    return of_fp4(_nibbles(blocks[..., 1:]).flatten(1), blocks[..., 0], "a block of MXFP4")


BLOCKS: Mapping[str, _Block] = {
    "q4_0": _Block(32, 18, _q4_0),
    "q4_1": _Block(32, 20, _q4_1),
    "q5_0": _Block(32, 22, _q5_0),
    "q5_1": _Block(32, 24, _q5_1),
    "q8_0": _Block(32, 34, _q8_0),
    "q4_k": _Block(256, 144, _q4_k),
    "q5_k": _Block(256, 176, _q5_k),
    "q6_k": _Block(256, 210, _q6_k),
    "mxfp4": _Block(32, 17, _mxfp4),
}
"""By ggml's names, in small letters."""
