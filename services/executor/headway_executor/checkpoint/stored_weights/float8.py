"""FP8 checkpoints: weights of 8 bits (E4M3; Micikevicius et al. 2022, arXiv 2209.05433) with scales of blocks or tensors.

Owns: their tensors, and 8-bit floats of other formats. Must not know: files, kernels.

Blocks have ``weight_scale_inv``, which is the scale to multiply with; whole tensors have it or ``weight_scale``. A stack of
weights has outputs before inputs, and its scales are named as it is, with ``_scale_inv`` behind. Whoever rounds
activations gives each block of them a scale of its own, which is more exact than ``input_scale``: that is not read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headway_executor.backend import ModelFilesError
from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.checkpoint.stored_weights.scheme import (
    FLOATS,
    FP8,
    POWERS,
    StoredTensor,
    StoredTensors,
    groups_of,
    wide,
)
from headway_kernels.cpu.coded_weight import CodedWeight, CodeForm

_SCHEMES = ("dynamic", "static")
_SCALE_FORMATS = (None, "float", "ue8m0")
"""Powers of two may be stored as floats, as DeepSeek V3.1 does, or as their exponents."""

_NO_NUMBER = 0x7F


@dataclass(frozen=True, slots=True)
class Float8:
    """See ``WeightScheme``. ``block``: outputs and inputs that share a scale; None: all inputs, and one output or all.

    ``rounds_inputs``: see ``CodedWeight``.
    """

    name: str
    block: tuple[int, int] | None = None
    scale_names: tuple[str, ...] = ("weight_scale",)
    rounds_inputs: bool = True
    zeros: tuple[str, ...] = ()

    def holds(self, base: str, stored: StoredTensors) -> bool:
        """See ``WeightScheme``."""
        return stored.dtype(_name_of_codes(base, stored)) in FP8

    def tensors(self, base: str, shape: tuple[int, int], stored: StoredTensors) -> dict[str, StoredTensor]:
        """See ``WeightScheme``."""
        scales = StoredTensor(FLOATS + POWERS, scale_shapes(shape, self.block))
        return {_name_of_codes(base, stored): StoredTensor(FP8, (shape,)), self._name_of_scales(base, stored): scales}

    def read(self, base: str, stored: StoredTensors) -> CodedWeight:
        """See ``WeightScheme``."""
        name = _name_of_codes(base, stored)
        codes, scales = stored.read(name), stored.read(self._name_of_scales(base, stored))
        if bool(((codes.view(torch.uint8) & _NO_NUMBER) == _NO_NUMBER).any()):
            raise ModelFilesError(f"{name}: a value is not a number; allowed: finite values")
        scales, group = spread(scales, codes.shape[0], self.block), self.block[1] if self.block else codes.shape[1]
        return CodedWeight(CodeForm.FP8, codes, scales, group, rounds_inputs=self.rounds_inputs)

    def _name_of_scales(self, base: str, stored: StoredTensors) -> str:
        names = [_name_of_codes(base, stored) + name.removeprefix("weight") for name in self.scale_names]
        found = [name for name in names if stored.dtype(name) is not None]
        if len(found) != 1:
            raise ModelFilesError(
                f"{base}: {len(found)} tensors of scales; allowed: one of {', '.join(self.scale_names)}"
            )
        return found[0]


def _name_of_codes(base: str, stored: StoredTensors) -> str:
    """Of a weight, or of a stack of weights."""
    return f"{base}.weight" if stored.dtype(base) is None else base


def scale_shapes(shape: tuple[int, int], block: tuple[int, int] | None) -> tuple[tuple[int, ...], ...]:
    """The shapes that the scales of a weight may have."""
    outputs, inputs = shape
    if block is not None:
        return ((groups_of(outputs, block[0]), groups_of(inputs, block[1])),)
    return ((), (1,), (1, 1), (outputs, 1), (outputs,))


def spread(scales: Tensor, outputs: int, block: tuple[int, int] | None) -> Tensor:
    """Scales of one of ``scale_shapes``, for each output: float32, ``[outputs, groups]``."""
    numbers = wide(scales)
    if block is not None:
        return numbers.repeat_interleave(block[0], 0)[:outputs]
    return numbers.reshape(-1, 1).expand(outputs, 1)


def float8_of(fields: ConfigFields) -> Float8:
    """The format that a ``quantization_config`` describes. Raises ``ModelFilesError``: it is another."""
    if fields.values.get("activation_scheme", "dynamic") not in _SCHEMES:
        raise fields.refuse("activation_scheme", " or ".join(_SCHEMES))
    if fields.values.get("fmt", "e4m3") != "e4m3":
        raise fields.refuse("fmt", "e4m3")
    if fields.values.get("scale_fmt") not in _SCALE_FORMATS:
        raise fields.refuse("scale_fmt", "float or ue8m0")
    block = block_of(fields, "weight_block_size")
    return Float8("fp8", block, ("weight_scale", "weight_scale_inv") if block is None else ("weight_scale_inv",))


def block_of(fields: ConfigFields, field: str) -> tuple[int, int] | None:
    """Outputs and inputs of a block; None if there is none. Raises ``ModelFilesError``: it is neither."""
    value = fields.values.get(field)
    if value is None:
        return None
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(isinstance(size, int) and size > 0 and not size % 16 for size in value):
        raise fields.refuse(field, "null or two positive multiples of 16")
    return value[0], value[1]
