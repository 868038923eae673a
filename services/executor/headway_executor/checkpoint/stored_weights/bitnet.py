"""Checkpoints of BitNet (Ma et al. 2024, arXiv 2402.17764): weights of three values, with a scale for each matrix.

Owns: their description, their tensors. Must not know: files, kernels.

Four codes of 2 bits are in a byte, each of another quarter of the outputs. A file whose weights are still numbers ("online")
has them rounded while it is read. Inputs are rounded to 8 bits, row by row.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from headway_executor.backend import ModelFilesError
from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.checkpoint.stored_weights.scheme import (
    FLOATS,
    UNSIGNED_BYTES,
    StoredTensor,
    StoredTensors,
    WeightScheme,
)
from headway_kernels.cpu.coded_weight import CodedWeight, CodeForm

_CODES_OF_A_BYTE = 4
_BITS = 2
_LEAST = 1e-5
"""Of the mean magnitude that weights are rounded with."""
_OF_LAYER = re.compile(r"\.[0-9]+\.(?!.*norm)")
"""In a layer, all but norms is rounded: neither embeddings nor a head are."""


@dataclass(frozen=True, slots=True)
class Bitnet:
    """See ``WeightScheme``. ``is_packed``: weights are stored as codes. ``divides``: scales divide."""

    is_packed: bool
    divides: bool
    name: str = "bitnet"
    zeros: tuple[str, ...] = ()

    def holds(self, base: str, stored: StoredTensors) -> bool:
        """See ``WeightScheme``."""
        if self.is_packed:
            return stored.dtype(f"{base}.weight_scale") is not None
        return _OF_LAYER.search(base) is not None and stored.dtype(f"{base}.weight") is not None

    def tensors(self, base: str, shape: tuple[int, int], stored: StoredTensors) -> dict[str, StoredTensor]:
        """See ``WeightScheme``."""
        del stored
        if not self.is_packed:
            return {f"{base}.weight": StoredTensor(FLOATS, (shape,))}
        outputs, inputs = shape
        if outputs % _CODES_OF_A_BYTE:
            raise ModelFilesError(
                f"{base}: {outputs} outputs are not allowed with codes of {_BITS} bits; allowed: multiples of {_CODES_OF_A_BYTE}"
            )
        return {
            f"{base}.weight": StoredTensor(UNSIGNED_BYTES, ((outputs // _CODES_OF_A_BYTE, inputs),)),
            f"{base}.weight_scale": StoredTensor(FLOATS, ((1,), ())),
        }

    def read(self, base: str, stored: StoredTensors) -> CodedWeight:
        """See ``WeightScheme``."""
        weight = stored.read(f"{base}.weight")
        if self.is_packed:
            scale = stored.read(f"{base}.weight_scale").float()
            codes = torch.cat([(weight >> (_BITS * i)) & 3 for i in range(_CODES_OF_A_BYTE)]).view(torch.int8) - 1
            scale = 1.0 / scale if self.divides else scale
        else:
            codes, scale = _rounded(weight.float())
        scales = scale.reshape(1, 1).expand(len(codes), 1).contiguous()
        return CodedWeight(CodeForm.CODES8, codes, scales, codes.shape[1], rounds_inputs=True)


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest codes, and their scale: the mean magnitude."""
    factor = 1.0 / weight.abs().mean().clamp_(min=_LEAST)
    return (weight * factor).round_().clamp_(-1, 1).to(torch.int8), 1.0 / factor


def bitnet_of(fields: ConfigFields) -> WeightScheme:
    """The format that a ``quantization_config`` describes. Raises ``ModelFilesError``: it is another."""
    kinds = {"linear_class": ("bitlinear", "autobitlinear"), "quantization_mode": ("offline", "online")}
    kind, mode = (fields.values.get(field, allowed[0]) for field, allowed in kinds.items())
    for field, value in zip(kinds, (kind, mode), strict=True):
        if value not in kinds[field]:
            raise fields.refuse(field, ", ".join(kinds[field]))
    if fields.flag("use_rms_norm", default=False):
        raise fields.refuse("use_rms_norm", "false")
    is_packed = mode == "offline" or kind == "bitlinear"
    if not is_packed and fields.values.get("modules_to_not_convert") not in (None, ["lm_head"]):
        raise fields.refuse("modules_to_not_convert", "none, where weights are still to be rounded")
    return Bitnet(is_packed, divides=kind == "bitlinear")
