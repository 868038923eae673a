"""A weight matrix as codes of few bits, each group of inputs with a scale.

Owns: what codes stand for, and the operations on rows that keep them codes. Must not know: checkpoints, the library.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn import functional


class CodeForm(IntEnum):
    """Unsigned codes of 4 bits, one per byte; signed codes of 8 bits; floats of 8 bits (E4M3, no infinities).

    ``TABLE4``: codes of 4 bits, one per byte, which stand for the numbers of a table.
    """

    CODES4 = 3
    CODES8 = 4
    FP8 = 5
    TABLE4 = 6


CODE_DTYPES = {
    CodeForm.CODES4: torch.uint8,
    CodeForm.CODES8: torch.int8,
    CodeForm.FP8: torch.float8_e4m3fn,
    CodeForm.TABLE4: torch.uint8,
}

_MIDDLE = 8.0
"""The code of 4 bits that stands for zero without minima."""

_BYTES = range(-128, 128)
_BLOCK = 32
_SMALL_BLOCK = 16
"""Inputs that become integers with one scale."""


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """Each weight is ``code * scale + minimum``, rounded once to float32.

    ``codes`` ``[outputs, inputs]``, of the form's dtype. ``scales`` and ``minima`` float32, ``[outputs, groups]``;
    ``minima`` None: 0, or ``-8 * scale`` with CODES4. ``group_of`` int32, ``[inputs]``: the group of each input;
    None: each ``group`` consecutive inputs are one, the last perhaps with fewer. ``table``: at most 16 numbers, with TABLE4.

    ``rounds_inputs``: inputs may be rounded to 8 bits, symmetrically: whole rows if each output has one scale, else in
    blocks; with FP8 to floats, always in blocks. Whoever can multiply so may; others compute more exactly.
    """

    form: CodeForm
    codes: Tensor
    scales: Tensor
    group: int
    minima: Tensor | None = None
    group_of: Tensor | None = None
    rounds_inputs: bool = False
    table: tuple[float, ...] | None = None

    @property
    def is_for_int8(self) -> bool:
        """Whether an int8 product computes what the weight is meant for."""
        is_plain = self.minima is None and self.group_of is None and self.scales.shape[1] == 1
        return self.rounds_inputs and self.form is CodeForm.CODES8 and is_plain

    @property
    def has_integers(self) -> bool:
        """Whether codes are integers of 8 bits, or stand for such."""
        return self.form is not CodeForm.FP8 and all(number in _BYTES for number in self.table or ())

    @property
    def has_blocks(self) -> bool:
        """Whether codes are integers, and each group consists of one or several blocks."""
        if self.group_of is not None or not self.has_integers:
            return False
        return self.group == _SMALL_BLOCK or self.scales.shape[1] == 1 or self.group % _BLOCK == 0

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, inputs = self.codes.shape
        return outputs, inputs

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.codes.device

    def float(self) -> Tensor:
        """The weights: float32, ``[outputs, inputs]``."""
        groups, stored = self._groups(), self.codes
        if self.table is not None:
            stored = torch.tensor(self.table, device=self.device)[self.codes.int()]
        if self.minima is None:
            codes = stored.float() - (_MIDDLE if self.form is CodeForm.CODES4 else 0.0)
            return codes.mul_(self.scales[:, groups])
        wide = stored.double().mul_(self.scales[:, groups])  # Exact, so the sum alone is rounded.
        return wide.add_(self.minima[:, groups]).float()

    def with_integers(self) -> "CodedWeight":
        """The same with codes of 8 bits, if they have a table of such."""
        if self.table is None or not self.has_integers:
            return self
        integers = torch.tensor(self.table, dtype=torch.int8, device=self.device)
        return replace(self, form=CodeForm.CODES8, codes=integers[self.codes.int()], table=None)

    def with_rows(self, change: Callable[[Tensor], Tensor]) -> "CodedWeight":
        """Choose, order or repeat rows: ``change`` gets ``[outputs, ...]`` of the codes, and of each value of a group."""
        minima = None if self.minima is None else change(self.minima)
        return replace(self, codes=_of_bytes(change, self.codes), scales=change(self.scales), minima=minima)

    def with_inputs(self, count: int) -> "CodedWeight":
        """Add inputs up to ``count``. Their weights are some numbers: whoever multiplies gives zeros there."""
        more = count - self.codes.shape[1]
        codes = _of_bytes(lambda rows: functional.pad(rows, (0, more)), self.codes)
        if self.group_of is not None:
            return replace(self, codes=codes, group_of=functional.pad(self.group_of, (0, more)))
        if self.scales.shape[1] == 1:
            return replace(self, codes=codes, group=max(self.group, count))
        groups = (0, -(-count // self.group) - self.scales.shape[1])
        minima = None if self.minima is None else functional.pad(self.minima, groups)
        return replace(self, codes=codes, scales=functional.pad(self.scales, groups), minima=minima)

    def contiguous(self) -> "CodedWeight":
        """The same in contiguous memory."""
        whole = self.with_rows(Tensor.contiguous)
        return replace(whole, group_of=None if self.group_of is None else self.group_of.contiguous())

    def _groups(self) -> Tensor:
        if self.group_of is not None:
            return self.group_of.long()
        return torch.arange(self.codes.shape[1], device=self.codes.device) // self.group


def unified(parts: Sequence[CodedWeight]) -> list[CodedWeight] | None:
    """The same weights in one form, with the same groups, all with minima or none; None if no form holds them exactly."""
    first = parts[0]
    if not all(_fits(part, first) for part in parts):
        if any(part.group_of is not None or not part.has_integers for part in parts):
            return None
        group = math.gcd(*(part.group for part in parts))
        parts = [_as_codes8(part.with_integers(), group) for part in parts]
    if all(part.minima is None for part in parts):
        return list(parts)
    return [replace(part, minima=_minima(part)) for part in parts]


def _fits(part: CodedWeight, first: CodedWeight) -> bool:
    kind, kind_of_first = ((one.form, one.group, one.rounds_inputs, one.table) for one in (part, first))
    if kind != kind_of_first:
        return False
    if part.group_of is None or first.group_of is None:
        return part.group_of is first.group_of
    return torch.equal(part.group_of, first.group_of)


def _as_codes8(part: CodedWeight, group: int) -> CodedWeight:
    """The same weights in the form that holds all integer codes, with groups of ``group``, a divisor of theirs."""
    groups = torch.arange(0, part.codes.shape[1], group, device=part.codes.device) // part.group
    codes, minima = part.codes.to(torch.int8), _minima(part)
    return CodedWeight(CodeForm.CODES8, codes, part.scales[:, groups], group, minima[:, groups])


def _minima(part: CodedWeight) -> Tensor:
    if part.minima is not None:
        return part.minima
    return part.scales * -(_MIDDLE if part.form is CodeForm.CODES4 else 0.0)


def _of_bytes(change: Callable[[Tensor], Tensor], codes: Tensor) -> Tensor:
    """Not all operators take floats of 8 bits."""
    return change(codes.view(torch.uint8)).view(codes.dtype)


_LEAST = torch.finfo(torch.float32).tiny
_LEAST_HALF = 2.0**-24
_MOST_OF_8_BITS = 127.0
_ROUNDED_GROUP = 32
_EXTREME_CODES = (-8.0, -9.0, -7.0)
"""Where the scale may put a group's largest value: at the end of the codes, or a little beyond or inside it."""

_CHUNK = 1 << 22
_CHUNK_IN_CACHE = 1 << 18
"""Weights that are rounded at a time: on a CPU, so few that what lies between them stays in its caches."""


def rounded_to_4_bits(*parts: Tensor) -> CodedWeight:
    """The nearest codes, symmetric, with a scale for 32 inputs, for inputs that are rounded too.

    Of some scales, each a float16, it is the one with the least squared error. ``parts`` floating, ``[outputs, inputs]``:
    their rows follow each other.
    """
    codes, scales = _in_chunks(_rounded_rows, parts)
    return CodedWeight(CodeForm.CODES4, codes, scales, _ROUNDED_GROUP, rounds_inputs=True)


def of_4_bits(outputs: int, inputs: int) -> CodedWeight:
    """A weight as ``rounded_to_4_bits`` gives it, on the CPU, whose codes and scales are still to be written."""
    scales = torch.empty(outputs, -(-inputs // _ROUNDED_GROUP))
    codes = torch.empty(outputs, inputs, dtype=CODE_DTYPES[CodeForm.CODES4])
    return CodedWeight(CodeForm.CODES4, codes, scales, _ROUNDED_GROUP, rounds_inputs=True)


def rounded_to_8_bits(*parts: Tensor) -> CodedWeight:
    """The nearest codes, symmetric, with a scale for each output, for inputs that are rounded too.

    ``parts``: as in ``rounded_to_4_bits``.
    """
    codes, scales = _in_chunks(_bytes_of_rows, parts)
    return CodedWeight(CodeForm.CODES8, codes, scales, codes.shape[1], rounds_inputs=True)


def _in_chunks(rounded: Callable[[Tensor], tuple[Tensor, Tensor]], parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Round some rows at a time, to save memory."""
    step = max(1, (_CHUNK_IN_CACHE if parts[0].is_cpu else _CHUNK) // parts[0].shape[1])
    chunks = [
        rounded(part[first : first + step].float()) for part in parts for first in range(0, max(1, len(part)), step)
    ]
    codes, scales = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return codes, scales


def _bytes_of_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    scales = (rows.abs().amax(1, keepdim=True) / _MOST_OF_8_BITS).clamp_(min=_LEAST)
    return (rows / scales).round_().to(torch.int8), scales


def _rounded_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    inputs = rows.shape[1]
    num_groups = -(-inputs // _ROUNDED_GROUP)
    padded = functional.pad(rows, (0, -inputs % _ROUNDED_GROUP))
    groups = padded.view(len(rows), num_groups, _ROUNDED_GROUP)
    extremes = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for extreme in _EXTREME_CODES:
        scales = _nearest_halves(extremes / extreme)
        codes = (groups / scales).round_().clamp_(-_MIDDLE, _MIDDLE - 1)
        errors = (codes * scales - groups).square_().sum(-1, keepdim=True)
        if best is not None:
            is_better = errors < best[0]
            errors, scales = torch.where(is_better, errors, best[0]), torch.where(is_better, scales, best[1])
            codes = torch.where(is_better, codes, best[2])
        best = errors, scales, codes
    assert best is not None
    codes = best[2].add_(_MIDDLE).to(torch.uint8).flatten(1)[:, :inputs]
    return codes, best[1].squeeze(-1)


def _nearest_halves(scales: Tensor) -> Tensor:
    """Float16s, but none that is 0 or infinite: a product reads less memory for them than for float32s."""
    halves = scales.half().float()
    halves = torch.where(halves.abs() < _LEAST_HALF, _LEAST_HALF, halves)
    return torch.where(halves.isinf(), scales, halves)
