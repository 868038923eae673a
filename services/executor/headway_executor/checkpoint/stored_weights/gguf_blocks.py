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

from headway_executor.backend import ModelFilesError
from headway_executor.checkpoint.stored_weights.float4 import of_fp4
from headway_executor.checkpoint.stored_weights.gguf_books import BOOKS
from headway_executor.checkpoint.stored_weights.scheme import (
    UNSIGNED_BYTES,
    StoredTensor,
    StoredTensors,
    halves,
    pairs,
    parts_of_bytes,
    wide,
)
from headway_kernels.cpu.coded_weight import CodedWeight, CodeForm

_LOW_4, _LOW_6 = 15, 63
_WIDE = 256
_TO_MIDDLE = 7
_STEPS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of IQ4_NL and IQ4_XS stand for."""


class _Block(NamedTuple):
    """``read`` takes blocks, uint8, ``[outputs, blocks, num_bytes]``."""

    inputs: int
    num_bytes: int
    read: Callable[[Tensor], CodedWeight]


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """See ``WeightScheme``."""

    name: str = "gguf"
    zeros: tuple[str, ...] = ()

    def holds(self, base: str, stored: StoredTensors) -> bool:
        """See ``WeightScheme``."""
        return _kind_of(base, stored) is not None

    def tensors(self, base: str, shape: tuple[int, int], stored: StoredTensors) -> dict[str, StoredTensor]:
        """See ``WeightScheme``."""
        outputs, inputs = shape
        kind = _kind_of(base, stored)
        assert kind is not None
        book = BOOKS.get(kind)
        size, num_bytes = (_WIDE, book.num_bytes) if book else BLOCKS[kind][:2]
        if inputs % size:
            raise ModelFilesError(f"{base}.{kind}: a width of {inputs} is not allowed; allowed: multiples of {size}")
        found = {f"{base}.{kind}": StoredTensor(UNSIGNED_BYTES, ((outputs, inputs // size * num_bytes),))}
        return found | {book_of(kind): StoredTensor(UNSIGNED_BYTES, (book.shape,))} if book else found

    def read(self, base: str, stored: StoredTensors) -> CodedWeight:
        """See ``WeightScheme``."""
        kind = _kind_of(base, stored)
        assert kind is not None
        found = stored.read(f"{base}.{kind}")
        if kind in BOOKS:
            book = stored.read(book_of(kind))
            return BOOKS[kind].weight(found.view(len(found), -1, BOOKS[kind].num_bytes), book)
        return BLOCKS[kind].read(found.view(len(found), -1, BLOCKS[kind].num_bytes))


def book_of(kind: str) -> str:
    """The name of the tensor with a book of codes, which all weights of the kind share."""
    return f"gguf.{kind}"


def _kind_of(base: str, stored: StoredTensors) -> str | None:
    return next((kind for kind in (*BLOCKS, *BOOKS) if stored.dtype(f"{base}.{kind}") is not None), None)


def _half(stored: Tensor) -> Tensor:
    """A float16 of each block: float32, ``[outputs, blocks]``."""
    return halves(stored).squeeze(-1)


def _by_layer(stored: Tensor, bits: int) -> Tensor:
    """``[..., bytes]``: the lowest ``bits`` bits of all, then the next ones."""
    return torch.cat([(stored >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], dim=-1)


def _q4_0(blocks: Tensor) -> CodedWeight:
    return CodedWeight(CodeForm.CODES4, _by_layer(blocks[..., 2:], 4).flatten(1), _half(blocks[..., :2]), 32)


def _q4_1(blocks: Tensor) -> CodedWeight:
    scales, minima = _half(blocks[..., :2]), _half(blocks[..., 2:4])
    return CodedWeight(CodeForm.CODES4, _by_layer(blocks[..., 4:], 4).flatten(1), scales, 32, minima)


def _q5_0(blocks: Tensor) -> CodedWeight:
    codes = (_by_layer(blocks[..., 6:], 4) | parts_of_bytes(blocks[..., 2:6], 1) << 4).view(torch.int8) - 16
    return CodedWeight(CodeForm.CODES8, codes.flatten(1), _half(blocks[..., :2]), 32)


def _q5_1(blocks: Tensor) -> CodedWeight:
    codes = (_by_layer(blocks[..., 8:], 4) | parts_of_bytes(blocks[..., 4:8], 1) << 4).view(torch.int8)
    return CodedWeight(CodeForm.CODES8, codes.flatten(1), _half(blocks[..., :2]), 32, _half(blocks[..., 2:4]))


def _q8_0(blocks: Tensor) -> CodedWeight:
    codes = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
    return CodedWeight(CodeForm.CODES8, codes, _half(blocks[..., :2]), 32)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of eight groups; scales and minima have 6 bits, of which the last four groups keep two elsewhere."""
    first, second, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([first & _LOW_6, (rest & _LOW_4) | (first >> 6 << 4)], dim=-1)
    minima = torch.cat([second & _LOW_6, (rest >> 4) | (second >> 6 << 4)], dim=-1)
    wide_scales = (_half(blocks[..., :2]).unsqueeze(-1) * scales).flatten(1)
    wide_minima = (_half(blocks[..., 2:4]).unsqueeze(-1) * minima).flatten(1)
    return wide_scales, -wide_minima


def _layered(stored: Tensor, size: int, bits: int) -> Tensor:
    """``[outputs, blocks, bytes]``, ``size`` of them ``_by_layer`` at a time: ``[outputs, blocks, codes]``."""
    return _by_layer(stored.reshape(*stored.shape[:-1], -1, size), bits).flatten(-2)


def _q4_k(blocks: Tensor) -> CodedWeight:
    scales, minima = _scales_and_minima(blocks)
    return CodedWeight(CodeForm.CODES4, _layered(blocks[..., 16:], 32, 4).flatten(1), scales, 32, minima)


def _q5_k(blocks: Tensor) -> CodedWeight:
    """As ``_q4_k``; a byte has the fifth bits of one place in the eight groups."""
    scales, minima = _scales_and_minima(blocks)
    codes = (_layered(blocks[..., 48:], 32, 4) | _by_layer(blocks[..., 16:48], 1) << 4).view(torch.int8)
    return CodedWeight(CodeForm.CODES8, codes.flatten(1), scales, 32, minima)


def _q6_k(blocks: Tensor) -> CodedWeight:
    """Two halves of 128 codes, of 4 low and 2 high bits each; 16 groups."""
    codes = (_layered(blocks[..., :128], 64, 4) | _layered(blocks[..., 128:192], 32, 2) << 4).view(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8) * _half(blocks[..., 208:]).unsqueeze(-1)
    return CodedWeight(CodeForm.CODES8, codes.flatten(1), scales.flatten(1), 16)


def _q2_k(blocks: Tensor) -> CodedWeight:
    """A byte has the scale of a group of 16, below, and its minimum."""
    codes, of_groups = _layered(blocks[..., 16:80], 32, 2), blocks[..., :16]
    scales = _half(blocks[..., 80:82]).unsqueeze(-1) * (of_groups & _LOW_4)
    minima = _half(blocks[..., 82:]).unsqueeze(-1) * (of_groups >> 4)
    return CodedWeight(CodeForm.CODES4, codes.flatten(1), scales.flatten(1), 16, -minima.flatten(1))


def _q3_k(blocks: Tensor) -> CodedWeight:
    """2 low bits, and a third as in ``_q5_k``; codes are symmetric around 4, and here around 8. 16 groups."""
    codes = (_layered(blocks[..., 32:96], 32, 2) | _by_layer(blocks[..., :32], 1) << 2) + 4
    stored = (_by_layer(blocks[..., 96:104], 4) | _by_layer(blocks[..., 104:108], 2) << 4).view(torch.int8) - 32
    scales = stored * _half(blocks[..., 108:]).unsqueeze(-1)
    return CodedWeight(CodeForm.CODES4, codes.flatten(1), scales.flatten(1), 16)


def _iq4_nl(blocks: Tensor) -> CodedWeight:
    codes = _by_layer(blocks[..., 2:], 4).flatten(1)
    return CodedWeight(CodeForm.TABLE4, codes, _half(blocks[..., :2]), 32, table=_STEPS)


def _iq4_xs(blocks: Tensor) -> CodedWeight:
    """The same, with scales of 6 bits, of which the upper two come first."""
    stored = (pairs(blocks[..., 4:8]) | parts_of_bytes(blocks[..., 2:4], 2) << 4).view(torch.int8) - 32
    scales = stored * _half(blocks[..., :2]).unsqueeze(-1)
    return CodedWeight(
        CodeForm.TABLE4, _layered(blocks[..., 8:], 16, 4).flatten(1), scales.flatten(1), 32, table=_STEPS
    )


def _mxfp4(blocks: Tensor) -> CodedWeight:
    return of_fp4(_by_layer(blocks[..., 1:], 4).flatten(1), wide(blocks[..., 0].contiguous()))


def _nvfp4(blocks: Tensor) -> CodedWeight:
    """Of 64 inputs, four scales, floats of 8 bits; what is not a number is 0, as in ggml."""
    scales = blocks[..., :4].contiguous().view(torch.float8_e4m3fn).float().nan_to_num(0.0).abs()
    return of_fp4(_layered(blocks[..., 4:], 8, 4).flatten(1), scales.flatten(1))


def _tq2_0(blocks: Tensor) -> CodedWeight:
    """Codes are symmetric around 1, and here around 8."""
    codes = _layered(blocks[..., :64], 32, 2) + _TO_MIDDLE
    return CodedWeight(CodeForm.CODES4, codes.flatten(1), _half(blocks[..., 64:]), _WIDE)


def _tq1_0(blocks: Tensor) -> CodedWeight:
    """A byte is a fraction of 256, of which each digit to the base of 3 is a code."""
    parts = [
        blocks[..., begin:end].unsqueeze(-2)
        * torch.tensor([3**place for place in range(count)], dtype=torch.uint8)[:, None]
        for begin, end, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    ]
    bytes_of_codes = torch.cat([part.flatten(-2) for part in parts], dim=-1)
    codes = (bytes_of_codes.int() * 3 >> 8).to(torch.uint8) + _TO_MIDDLE
    return CodedWeight(CodeForm.CODES4, codes.flatten(1), _half(blocks[..., 52:]), _WIDE)


BLOCKS: Mapping[str, _Block] = {
    "tq1_0": _Block(256, 54, _tq1_0),
    "tq2_0": _Block(256, 66, _tq2_0),
    "q4_0": _Block(32, 18, _q4_0),
    "q4_1": _Block(32, 20, _q4_1),
    "q5_0": _Block(32, 22, _q5_0),
    "q5_1": _Block(32, 24, _q5_1),
    "q8_0": _Block(32, 34, _q8_0),
    "q2_k": _Block(256, 84, _q2_k),
    "q3_k": _Block(256, 110, _q3_k),
    "q4_k": _Block(256, 144, _q4_k),
    "q5_k": _Block(256, 176, _q5_k),
    "q6_k": _Block(256, 210, _q6_k),
    "iq4_nl": _Block(32, 18, _iq4_nl),
    "iq4_xs": _Block(256, 136, _iq4_xs),
    "mxfp4": _Block(32, 17, _mxfp4),
    "nvfp4": _Block(64, 36, _nvfp4),
}
"""By ggml's names, in small letters."""
