"""FP8 checkpoints: weights of 8 bits (E4M3; Micikevicius et al. 2022, arXiv 2209.05433) with scales of blocks or tensors.

Owns: their tensors, and 8-bit floats of other formats. Must not know: files, kernels.

Blocks have ``weight_scale_inv``, which is the scale to multiply with; whole tensors have it or ``weight_scale``. Whoever rounds
activations gives each block of them a scale of its own, which is more exact than ``input_scale``: that is not read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headway_executor.backend import ModelFilesError
from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.checkpoint.stored_weights.scheme import FLOATS, FP8, StoredTensor, StoredTensors, groups_of
from headway_kernels.cpu.coded_weight import CodedWeight, CodeForm

_SCHEMES = ("dynamic", "static")
_SCALE_FORMATS = (None, "float", "ue8m0")
"""DeepSeek V3.1 stores powers of two as floats; scales that are no floats are refused by their dtype."""

_NO_NUMBER = 0x7F


@dataclass(frozen=True, slots=True)
class Float8:
    """See ``WeightScheme``. ``block``: outputs and inputs that share a scale; None: all inputs, and one output or all."""

    block: tuple[int, int] | None
    scale_names: tuple[str, ...]
    name: str = "fp8"
    unread: tuple[str, ...] = (".input_scale", ".activation_scale")
    zeros: tuple[str, ...] = ()

    def holds(self, base: str, stored: StoredTensors) -> bool:
        """See ``WeightScheme``."""
        return stored.dtype(f"{base}.weight") in FP8

    def tensors(self, base: str, shape: tuple[int, int]) -> dict[str, StoredTensor]:
        """See ``WeightScheme``."""
        scale = StoredTensor(FLOATS, scale_shapes(shape, self.block), is_optional=len(self.scale_names) > 1)
        scales = {f"{base}.{name}": scale for name in self.scale_names}
        return {f"{base}.weight": StoredTensor(FP8, (shape,))} | scales

    def read(self, base: str, stored: StoredTensors) -> CodedWeight:
        """See ``WeightScheme``."""
        found = [name for name in self.scale_names if stored.dtype(f"{base}.{name}") is not None]
        if len(found) != 1:
            raise ModelFilesError(
                f"{base}: {len(found)} tensors of scales; allowed: one of {', '.join(self.scale_names)}"
            )
        scales = stored.read(f"{base}.{found[0]}")
        return of_float8(stored.read(f"{base}.weight"), scales, self.block, base, rounds_inputs=True)


def scale_shapes(shape: tuple[int, int], block: tuple[int, int] | None) -> tuple[tuple[int, ...], ...]:
    """The shapes that the scales of a weight may have."""
    outputs, inputs = shape
    if block is not None:
        return ((groups_of(outputs, block[0]), groups_of(inputs, block[1])),)
    return ((), (1,), (1, 1), (outputs, 1), (outputs,))


def of_float8(
    codes: Tensor, scales: Tensor, block: tuple[int, int] | None, base: str, *, rounds_inputs: bool
) -> CodedWeight:
    """A weight of ``codes``, ``[outputs, inputs]``, and scales of one of ``scale_shapes``.

    Raises:
        ModelFilesError: a code is no number.
    """
    if bool(((codes.view(torch.uint8) & _NO_NUMBER) == _NO_NUMBER).any()):
        raise ModelFilesError(f"{base}.weight: a value is not a number; allowed: finite values")
    group = block[1] if block else codes.shape[1]
    return CodedWeight(CodeForm.FP8, codes, spread(scales, codes.shape[0], block), group, rounds_inputs=rounds_inputs)


def spread(scales: Tensor, outputs: int, block: tuple[int, int] | None) -> Tensor:
    """Scales of one of ``scale_shapes``, for each output: float32, ``[outputs, groups]``."""
    wide = scales.float()
    if block is not None:
        return wide.repeat_interleave(block[0], 0)[:outputs]
    return wide.reshape(-1, 1).expand(outputs, 1)


def float8_of(fields: ConfigFields) -> Float8:
    """The format that a ``quantization_config`` describes. Raises ``ModelFilesError``: it is another."""
    if fields.values.get("activation_scheme", "dynamic") not in _SCHEMES:
        raise fields.refuse("activation_scheme", " or ".join(_SCHEMES))
    if fields.values.get("fmt", "e4m3") != "e4m3":
        raise fields.refuse("fmt", "e4m3")
    if fields.values.get("scale_fmt") not in _SCALE_FORMATS:
        raise fields.refuse("scale_fmt", "float or ue8m0")
    if fields.values.get("kv_cache_scheme"):
        raise fields.refuse("kv_cache_scheme", "none")
    block = block_of(fields, "weight_block_size")
    return Float8(block, ("weight_scale", "weight_scale_inv") if block is None else ("weight_scale_inv",))


def block_of(fields: ConfigFields, field: str) -> tuple[int, int] | None:
    """Outputs and inputs of a block; None if there is none. Raises ``ModelFilesError``: it is neither."""
    value = fields.values.get(field)
    if value is None:
        return None
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(isinstance(size, int) and size > 0 and not size % 16 for size in value):
        raise fields.refuse(field, "null or two positive multiples of 16")
    return value[0], value[1]
