"""The description of how a weight is stored: which tensors, and how they become codes.

Owns: the interface of a format, integers packed into words, groups of inputs. Must not know: any one format, files.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headway_executor.backend import ModelFilesError
from headway_executor.checkpoint.fields import ConfigFields
from headway_kernels.cpu.coded_weight import CodedWeight, CodeForm

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
_MIDDLE = {4: 8, 8: 128}


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
    """Weights of several forms, each as the first of ``schemes`` that holds it; see ``WeightScheme``."""

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
    per_word = _WORD_BITS // bits
    if numbers % per_word:
        raise ModelFilesError(
            f"{base}: a width of {numbers} is not allowed with {bits} bits; allowed: multiples of {per_word}"
        )
    return numbers // per_word


def groups_of(inputs: int, group: int) -> int:
    """How many groups of ``group`` inputs there are."""
    return -(-inputs // group)


def unpacked(words: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """The unsigned integers in 32-bit ``words``, the lowest bits first, along ``dim`` of two: uint8.

    ``order[i]``: the place of a word's i-th integer among its neighbours; None: i.
    """
    per_word = _WORD_BITS // bits
    places = list(range(per_word))
    if order is not None:
        places = [list(order).index(place) for place in places]
    shifts = torch.tensor(places, dtype=torch.int32) * bits
    parts = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    parts = parts.to(torch.uint8)
    rows, columns = words.shape
    if dim == 1:
        return parts.view(rows, columns * per_word)
    return parts.movedim(-1, 1).reshape(rows * per_word, columns)


def of_integers(
    codes: Tensor, zeros: Tensor | None, scales: Tensor, *, bits: int, group: int, group_of: Tensor | None = None
) -> CodedWeight:
    """A weight ``(code - zero) * scale``.

    ``codes`` uint8, ``[outputs, inputs]``, unsigned with ``bits`` bits; ``zeros`` integers, ``[outputs, groups]``, or None
    for the middle code; ``scales`` floating, ``[outputs, groups]``.
    """
    wide = scales.float()
    middle = _MIDDLE[bits]
    if zeros is not None and bool((zeros == middle).all()):
        zeros = None
    if bits == 4:
        minima = None if zeros is None else -zeros.float() * wide
        return CodedWeight(CodeForm.CODES4, codes, wide, group, minima, group_of)
    minima = None if zeros is None else (middle - zeros.float()) * wide
    return CodedWeight(CodeForm.CODES8, (codes ^ middle).view(torch.int8), wide, group, minima, group_of)


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
