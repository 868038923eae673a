"""Blocks of GGUF files with books of codes (IQ1, IQ2, IQ3): an index names the codes of some neighbouring inputs.

Owns: their layout. Must not know: files, kernels, what stands in a book.

A block has 256 inputs. A book's codes stand for the first half of a table; a bit beside them, the sign of each weight or a
shift of several, chooses the other half. ``headway gguf`` stores the books of the ``gguf`` package beside the blocks, for
they are as long as many files of source.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from headway_executor.checkpoint.stored_weights.scheme import halves, pairs, parts_of_bytes
from headway_kernels.cpu.coded_weight import CodedWeight, CodeForm

_INPUTS = 256
_HALF_TABLE = 8
_SIGNS_OF_WORD = (0, 7, 14, 21)
_THREES = (0, 3, 6, 9)


class _Block(NamedTuple):
    """Of blocks ``[outputs, blocks, ...]``: indices, bits that choose the half of the table for so many inputs, and scales."""

    indices: Tensor
    bits: Tensor
    scales: Tensor


class Book(NamedTuple):
    """``shape``: how many entries there are, and inputs of each. ``first``: the first half of the table; ``second`` None:
    the same numbers below zero. ``read`` takes blocks, uint8, ``[outputs, blocks, num_bytes]``.
    """

    num_bytes: int
    shape: tuple[int, int]
    first: tuple[int, ...]
    read: Callable[[Tensor], _Block]
    second: tuple[int, ...] | None = None

    def weight(self, blocks: Tensor, book: Tensor) -> CodedWeight:
        """The weight; ``book`` uint8, of ``shape``."""
        found = self.read(blocks)
        entries = (book & (_HALF_TABLE - 1))[found.indices.int()].flatten(-2)
        bits = found.bits.to(torch.uint8).repeat_interleave(_INPUTS // found.bits.shape[-1], -1)
        second = self.second or tuple(-number for number in self.first)
        padding = (0,) * (_HALF_TABLE - len(self.first))
        return CodedWeight(
            CodeForm.TABLE4,
            (entries | bits << 3).flatten(1),
            found.scales.flatten(1),
            _INPUTS // found.scales.shape[-1],
            table=(*self.first, *padding, *second, *padding),
        )


def _words(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """``[..., bytes]`` as unsigned words of int16 or int32: int64."""
    words = stored.contiguous().view(dtype).long()
    return words & ((1 << 8 * dtype.itemsize) - 1)


def _each(words: Tensor, shifts: tuple[int, ...], bits: int) -> Tensor:
    """``bits`` bits of each word from each shift on: ``[..., words * shifts]``."""
    return ((words.unsqueeze(-1) >> torch.tensor(shifts)) & ((1 << bits) - 1)).flatten(-2)


def _signs(sevens: Tensor) -> Tensor:
    """Seven signs each; an even number of eight are set."""
    eighth = sevens
    for shift in (4, 2, 1):
        eighth = eighth ^ (eighth >> shift)
    return parts_of_bytes((sevens | (eighth & 1) << 7).to(torch.uint8), 1)


def _small(scales: Tensor, stored: Tensor, unit: float) -> Tensor:
    """Scales of groups, of 4 bits, around the half: ``[..., groups]``."""
    return scales * (0.5 + stored) * unit


def _iq2_xxs(blocks: Tensor) -> _Block:
    """Of 32 inputs, four indices, four times seven signs, and the scale."""
    parts = blocks[..., 2:].reshape(*blocks.shape[:-1], -1, 8)
    words = _words(parts[..., 4:], torch.int32).flatten(-2)
    signs = _signs(_each(words, _SIGNS_OF_WORD, 7))
    return _Block(parts[..., :4].flatten(-2), signs, _small(halves(blocks[..., :2]), words >> 28, 0.25))


def _iq2_xs(blocks: Tensor) -> _Block:
    words = _words(blocks[..., 2:66], torch.int16)
    scales = _small(halves(blocks[..., :2]), pairs(blocks[..., 66:]), 0.25)
    return _Block(words & 511, _signs(words >> 9), scales)


def _iq2_s(blocks: Tensor) -> _Block:
    indices = blocks[..., 2:34].int() | parts_of_bytes(blocks[..., 66:74], 2).int() << 8
    scales = _small(halves(blocks[..., :2]), pairs(blocks[..., 74:]), 0.25)
    return _Block(indices, parts_of_bytes(blocks[..., 34:66], 1), scales)


def _iq3_xxs(blocks: Tensor) -> _Block:
    words = _words(blocks[..., 66:], torch.int32)
    signs = _signs(_each(words, _SIGNS_OF_WORD, 7))
    return _Block(blocks[..., 2:66], signs, _small(halves(blocks[..., :2]), words >> 28, 0.5))


def _iq3_s(blocks: Tensor) -> _Block:
    indices = blocks[..., 2:66].int() | parts_of_bytes(blocks[..., 66:74], 1).int() << 8
    scales = halves(blocks[..., :2]) * (1 + 2 * pairs(blocks[..., 106:]))
    return _Block(indices, parts_of_bytes(blocks[..., 74:106], 1), scales)


def _iq1_s(blocks: Tensor) -> _Block:
    words = _words(blocks[..., 34:], torch.int16)
    indices = blocks[..., 2:34].int() | _each(words, _THREES, 3) << 8
    scales = halves(blocks[..., :2]) * (1 + 2 * (words >> 12 & 7)) / 8
    return _Block(indices, words >> 15, scales)


def _iq1_m(blocks: Tensor) -> _Block:
    """The float16 of a block is in the highest bits of four words, the lowest ones first."""
    highs, words = pairs(blocks[..., 32:48]), _words(blocks[..., 48:], torch.int16)
    whole = ((words >> 12) << torch.tensor((0, 4, 8, 12))).sum(-1, keepdim=True).to(torch.int16)
    scales = whole.view(torch.float16).float() * (1 + 2 * _each(words, _THREES, 3)) / 8
    return _Block(blocks[..., :32].int() | (highs & 7).int() << 8, highs >> 3, scales)


_OF_IQ1 = {"first": (-7, 1, 9), "second": (-9, -1, 7)}
"""Eighths of -1, 0 and 1, an eighth more or less."""
_OF_IQ2 = (8, 25, 43)

BOOKS: Mapping[str, Book] = {
    "iq1_s": Book(50, (2048, 8), read=_iq1_s, **_OF_IQ1),
    "iq1_m": Book(56, (2048, 8), read=_iq1_m, **_OF_IQ1),
    "iq2_xxs": Book(66, (256, 8), _OF_IQ2, _iq2_xxs),
    "iq2_xs": Book(74, (512, 8), _OF_IQ2, _iq2_xs),
    "iq2_s": Book(82, (1024, 8), _OF_IQ2, _iq2_s),
    "iq3_xxs": Book(98, (256, 4), (4, 12, 20, 28, 36, 44, 52, 62), _iq3_xxs),
    "iq3_s": Book(110, (512, 4), (1, 3, 5, 7, 9, 11, 13, 15), _iq3_s),
}
"""By ggml's names, in small letters."""
