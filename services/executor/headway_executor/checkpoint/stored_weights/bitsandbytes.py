"""Checkpoints of bitsandbytes: 4 bits (QLoRA; Dettmers et al. 2023, arXiv 2305.14314) and 8 bits (arXiv 2208.07339).

Owns: their tensors. Must not know: files, kernels.

A code of 4 bits stands for one of 16 floats, which are stored beside it. Consecutive weights share a scale, row after row.
The scales may be codes of 8 bits themselves, with scales and an offset. Of two neighbouring codes the first is the high
half of a byte.
"""

import json
import math
from dataclasses import dataclass

from headway_executor.backend import ModelFilesError
from headway_executor.checkpoint.fields import CONFIG_FILE, ConfigFields
from headway_executor.checkpoint.stored_weights.scheme import (
    BYTES,
    UNSIGNED_BYTES,
    SchemesByTensors,
    StoredTensor,
    StoredTensors,
    WeightScheme,
    groups_of,
    pairs,
)
from headway_kernels.cpu.coded_weight import CodedWeight, CodeForm

_NAME = "bitsandbytes"
_FLOATS = ("F32",)
_STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
_NUM_CODES = 16
_NUM_SCALES = 256
_LARGEST = 127


@dataclass(frozen=True, slots=True)
class Bnb4:
    """See ``WeightScheme``."""

    name: str = _NAME
    zeros: tuple[str, ...] = ()

    def holds(self, base: str, stored: StoredTensors) -> bool:
        """See ``WeightScheme``."""
        return stored.dtype(f"{base}.weight.quant_map") is not None

    def tensors(self, base: str, shape: tuple[int, int], stored: StoredTensors) -> dict[str, StoredTensor]:
        """See ``WeightScheme``."""
        outputs, inputs = shape
        name, state = f"{base}.weight", _state(base, stored)
        if state.values.get("shape") != [outputs, inputs]:
            raise state.refuse("shape", f"{[outputs, inputs]}, as {CONFIG_FILE} says")
        group = state.integer("blocksize", low=16)
        if inputs % group:
            raise ModelFilesError(f"{base}: a width of {inputs} is not allowed; allowed: multiples of {group}")
        groups = outputs * inputs // group
        found = {
            name: StoredTensor(UNSIGNED_BYTES, ((outputs * inputs // 2, 1), (1, outputs * inputs // 2))),
            f"{name}.absmax": StoredTensor(_FLOATS, ((groups,),)),
            f"{name}.quant_map": StoredTensor(_FLOATS, ((_NUM_CODES,),)),
            f"{name}.{_kind_of(base, stored)}": StoredTensor(UNSIGNED_BYTES, ()),
        }
        if state.values.get("nested_blocksize") is None:
            return found
        return found | {
            f"{name}.absmax": StoredTensor(UNSIGNED_BYTES, ((groups,),)),
            f"{name}.nested_absmax": StoredTensor(_FLOATS, ((groups_of(groups, state.integer("nested_blocksize")),),)),
            f"{name}.nested_quant_map": StoredTensor(_FLOATS, ((_NUM_SCALES,),)),
        }

    def read(self, base: str, stored: StoredTensors) -> CodedWeight:
        """See ``WeightScheme``."""
        name, state = f"{base}.weight", _state(base, stored)
        outputs, inputs = state.values["shape"]
        scales = stored.read(f"{name}.absmax")
        if state.values.get("nested_blocksize") is not None:
            sizes = stored.read(f"{name}.nested_absmax").repeat_interleave(state.integer("nested_blocksize"))
            scales = stored.read(f"{name}.nested_quant_map")[scales.int()] * sizes[: len(scales)]
            scales = scales + state.number("nested_offset", above=-math.inf)
        codes = pairs(stored.read(name).view(-1)).view(-1, 2).flip(1)
        return CodedWeight(
            CodeForm.TABLE4,
            codes.view(outputs, inputs),
            scales.view(outputs, -1),
            state.integer("blocksize"),
            table=tuple(stored.read(f"{name}.quant_map").tolist()),
        )


@dataclass(frozen=True, slots=True)
class Bnb8:
    """See ``WeightScheme``."""

    name: str = _NAME
    zeros: tuple[str, ...] = (".weight_format",)

    def holds(self, base: str, stored: StoredTensors) -> bool:
        """See ``WeightScheme``."""
        return stored.dtype(f"{base}.weight") in BYTES

    def tensors(self, base: str, shape: tuple[int, int], stored: StoredTensors) -> dict[str, StoredTensor]:
        """See ``WeightScheme``."""
        del stored
        return {
            f"{base}.weight": StoredTensor(BYTES, (shape,)),
            f"{base}.SCB": StoredTensor(_FLOATS, ((shape[0],),)),
        }

    def read(self, base: str, stored: StoredTensors) -> CodedWeight:
        """See ``WeightScheme``."""
        codes = stored.read(f"{base}.weight")
        return CodedWeight(CodeForm.CODES8, codes, stored.read(f"{base}.SCB")[:, None] / _LARGEST, codes.shape[1])


def bitsandbytes_of(fields: ConfigFields) -> WeightScheme:
    """The format that a ``quantization_config`` describes. Raises ``ModelFilesError``: it is another."""
    if fields.values.get("bnb_4bit_quant_storage") not in (None, "uint8"):
        raise fields.refuse("bnb_4bit_quant_storage", "uint8")
    return SchemesByTensors(_NAME, Bnb4(), Bnb8())


def _kind_of(base: str, stored: StoredTensors) -> str:
    found = [name for name in _STATES if stored.dtype(f"{base}.weight.{name}") in UNSIGNED_BYTES]
    if len(found) != 1:
        raise ModelFilesError(f"{base}: {len(found)} tensors with its shape; allowed: one of {', '.join(_STATES)}")
    return found[0]


def _state(base: str, stored: StoredTensors) -> ConfigFields:
    """What is stored as JSON in the bytes of a tensor."""
    name = f"{base}.weight.{_kind_of(base, stored)}"
    try:
        values = json.loads(bytes(stored.read(name).flatten().tolist()))
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ModelFilesError(f"{name}: not valid JSON; allowed: an object")
    return ConfigFields(name, values)
