"""The description of how a weight is stored: which tensors, and how they become codes.

Owns: the interface of a format, integers packed into words, groups of inputs. Must not know: any one format, files.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headway_executor.backend import ModelFilesError
from headway_executor.checkpoint.fields import ConfigFields
from headway_kernels.cpu.coded_weight import CODE_DTYPES, CodedWeight, CodeForm

FLOATS = ("F32", "BF16", "F16")
WORDS = ("I32",)
FP8 = ("F8_E4M3",)
BYTES = ("I8",)
UNSIGNED_BYTES = ("U8",)
POWERS = ("U8", "F8_E8M0")
"""Powers of two: the exponent plus 127."""

UNREAD = (
    *(".input_scale", ".activation_scale", ".input_global_scale", ".input_scale_ub", ".input_zero_point"),
    *(".output_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".prob_output_scale"),
    *(".weight_shape", ".weight_zero_point"),
)
"""Ends of the names of tensors that a quantised checkpoint may have and that nothing needs: scales of what is rounded while
a model runs, of keys and values among them, and zero points of symmetric weights."""

_WORD_BITS = 32
_FEW_BITS, _MIDDLE = 4, 8
"""Codes of at most so many bits are kept in 4, around this one."""


class StoredTensor(NamedTuple):
    """What a format expects in a file: ``dtypes`` in safetensors' words; ``shapes``: those allowed, or none: any."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_optional: bool = False


class StoredTensors(Protocol):
    """The tensors in the files."""

    def dtype(self, name: str) -> str | None:
        """In safetensors' words; None: there is no such tensor."""
        ...

    def read(self, name: str) -> Tensor:
        """The tensor."""
        ...


class WeightScheme(Protocol):
    """A format of linear weights. ``base`` is a weight's name without ``.weight``; ``shape`` outputs and inputs.

    Of a stack of weights, each tensor has one dimension more, the first.
    """

    @property
    def name(self) -> str:
        """As in ``quantization_config``."""
        ...

    @property
    def zeros(self) -> tuple[str, ...]:
        """Ends of the names of tensors that may be there if all of their numbers are 0."""
        ...

    def holds(self, base: str, stored: StoredTensors) -> bool:
        """Whether this weight is stored as codes."""
        ...

    def tensors(self, base: str, shape: tuple[int, int], stored: StoredTensors) -> dict[str, StoredTensor]:
        """The tensors of one weight. Raises ``ModelFilesError``: its shape cannot be stored so, or tensors are ambiguous."""
        ...

    def read(self, base: str, stored: StoredTensors) -> CodedWeight:
        """The weight."""
        ...


class SchemesByName:
    """Weights of several forms; see ``WeightScheme``. ``chosen`` gives that of a weight, or None: it is not quantised.

    What all weights share, ``usual`` has.
    """

    def __init__(self, usual: WeightScheme, chosen: Callable[[str], WeightScheme | None]) -> None:
        self.name, self.zeros = usual.name, usual.zeros
        self._chosen = cache(chosen)

    def holds(self, base: str, stored: StoredTensors) -> bool:
        """See ``WeightScheme``."""
        scheme = self._chosen(base)
        return scheme is not None and scheme.holds(base, stored)

    def tensors(self, base: str, shape: tuple[int, int], stored: StoredTensors) -> dict[str, StoredTensor]:
        """See ``WeightScheme``."""
        return self._of(base).tensors(base, shape, stored)

    def read(self, base: str, stored: StoredTensors) -> CodedWeight:
        """See ``WeightScheme``."""
        return self._of(base).read(base, stored)

    def _of(self, base: str) -> WeightScheme:
        scheme = self._chosen(base)
        assert scheme is not None  # It holds the weight.
        return scheme


class SchemesByTensors:
    """Weights of several forms, each as the first of ``schemes`` that holds it; see ``WeightScheme``.

    Without any, no weight is quantised: keys and values alone are meant to be.
    """

    def __init__(self, name: str, *schemes: WeightScheme) -> None:
        self.name = name
        self.zeros = tuple(end for scheme in schemes for end in scheme.zeros)
        self._schemes = schemes

    def holds(self, base: str, stored: StoredTensors) -> bool:
        """See ``WeightScheme``."""
        return any(scheme.holds(base, stored) for scheme in self._schemes)

    def tensors(self, base: str, shape: tuple[int, int], stored: StoredTensors) -> dict[str, StoredTensor]:
        """See ``WeightScheme``."""
        return self._of(base, stored).tensors(base, shape, stored)

    def read(self, base: str, stored: StoredTensors) -> CodedWeight:
        """See ``WeightScheme``."""
        return self._of(base, stored).read(base, stored)

    def _of(self, base: str, stored: StoredTensors) -> WeightScheme:
        return next(scheme for scheme in self._schemes if scheme.holds(base, stored))


def words_of(base: str, numbers: int, bits: int) -> int:
    """How many words hold so many integers. Raises ``ModelFilesError``: the last one is not full."""
    count, size = _run_of(bits)
    if numbers % count:
        raise ModelFilesError(
            f"{base}: a width of {numbers} is not allowed with {bits} bits; allowed: multiples of {count}"
        )
    return numbers // count * size


def _run_of(bits: int) -> tuple[int, int]:
    """So many integers fill so many words."""
    shared = math.gcd(_WORD_BITS, bits)
    return _WORD_BITS // shared, bits // shared


def groups_of(inputs: int, group: int) -> int:
    """How many groups of ``group`` inputs there are."""
    return -(-inputs // group)


def unpacked(words: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """The unsigned integers in 32-bit ``words``, the lowest bits first, along ``dim`` of two: uint8.

    An integer may begin in one word and end in the next. ``order[i]``: the place of a word's i-th integer among its
    neighbours; None: i.
    """
    if dim == 0:
        return unpacked(words.t(), bits, 1, order).t()
    count, size = _run_of(bits)
    runs = words.reshape(len(words), -1, size)
    found = torch.empty(*runs.shape[:2], count, dtype=torch.uint8)
    for place in range(count):
        word, shift = divmod(place * bits, _WORD_BITS)
        numbers, kept = runs[..., word] >> shift, _WORD_BITS - shift
        if kept < bits:
            numbers = numbers & ((1 << kept) - 1) | runs[..., word + 1] << kept
        found[..., place if order is None else order[place]] = (numbers & ((1 << bits) - 1)).to(torch.uint8)
    return found.flatten(1)


def of_integers(
    codes: Tensor, zeros: Tensor | None, scales: Tensor, *, bits: int, group: int, group_of: Tensor | None = None
) -> CodedWeight:
    """A weight ``(code - zero) * scale``.

    ``codes`` uint8, ``[outputs, inputs]``, unsigned with ``bits`` bits; ``zeros`` integers, ``[outputs, groups]``, or None
    for the middle code; ``scales`` floating, ``[outputs, groups]``.
    """
    numbers, middle = scales.float(), 1 << (bits - 1)
    form, kept_middle = (CodeForm.CODES4, _MIDDLE) if bits <= _FEW_BITS else (CodeForm.CODES8, 0)
    kept = (codes + (kept_middle - middle)).view(CODE_DTYPES[form])
    if zeros is None or bool((zeros == middle).all()):
        return CodedWeight(form, kept, numbers, group, None, group_of)
    return CodedWeight(form, kept, numbers, group, (middle - kept_middle - zeros.float()) * numbers, group_of)


def with_minima(codes: Tensor, scales: Tensor, minima: Tensor, *, bits: int, group: int) -> CodedWeight:
    """A weight ``code * scale + minimum``; see ``of_integers``. ``minima`` as ``scales``, both float32."""
    if bits <= _FEW_BITS:
        return CodedWeight(CodeForm.CODES4, codes, scales, group, minima)
    middle = 1 << (bits - 1)
    return CodedWeight(CodeForm.CODES8, (codes - middle).view(torch.int8), scales, group, minima + scales * middle)


def grouping(group_of: Tensor, group: int, num_groups: int, base: str) -> Tensor | None:
    """The group of each input, int32; None if groups are consecutive.

    Raises:
        ModelFilesError: an input has a group that does not exist.
    """
    if bool((group_of < 0).any()) or bool((group_of >= num_groups).any()):
        raise ModelFilesError(f"{base}: g_idx names a group that does not exist; allowed: 0 to {num_groups - 1}")
    if torch.equal(group_of.long(), torch.arange(len(group_of)) // group):
        return None
    return group_of.to(torch.int32)


def wide(scales: Tensor) -> Tensor:
    """Scales as float32, also those of ``POWERS``: what is not a number stays so."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()


def halves(stored: Tensor) -> Tensor:
    """Float16s, ``[..., 2]`` bytes, as float32, ``[..., 1]``."""
    return stored.contiguous().view(torch.float16).float()


def parts_of_bytes(stored: Tensor, bits: int) -> Tensor:
    """``[..., bytes]``: all bits of the first, ``bits`` at a time, the lowest first, then those of the next."""
    return ((stored.unsqueeze(-1) >> torch.arange(0, 8, bits, dtype=torch.uint8)) & ((1 << bits) - 1)).flatten(-2)


def pairs(codes: Tensor) -> Tensor:
    """Codes of 4 bits, ``[..., bytes]``, the first of a byte in its lower half: ``[..., 2 * bytes]``."""
    return parts_of_bytes(codes, 4)


def check_group_size(fields: ConfigFields, field: str) -> int | None:
    """The inputs of a group; None for -1 or null: one group of all.

    Raises:
        ModelFilesError: it is neither.
    """
    value = fields.values.get(field)
    if value is None or value == -1:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value % 16:
        raise fields.refuse(field, "-1 or a positive multiple of 16")
    return value
