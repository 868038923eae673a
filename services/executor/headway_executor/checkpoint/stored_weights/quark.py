"""Checkpoints of AMD's Quark: floats of 8 bits (E4M3) and of 4 bits (MXFP4).

Owns: their description. Must not know: tensors, files, kernels.

Which weight is stored in which way, the tensors say; the description names the ways, one for all and others for some.
"""

from collections.abc import Iterator, Mapping

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.checkpoint.stored_weights.float4 import Float4
from headway_executor.checkpoint.stored_weights.float8 import Float8
from headway_executor.checkpoint.stored_weights.scheme import SchemesByTensors, WeightScheme

_NAME = "quark"
_FLOATS = SchemesByTensors(_NAME, Float8(_NAME), Float4(_NAME, ".weight", ".weight_scale"))
_USUAL, _OF_SOME = "global_quant_config", ("layer_quant_config", "layer_type_quant_config")
_LAYOUTS: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "fp8_e4m3": {"qscheme": ("per_tensor", "per_channel")},
    "fp4": {"qscheme": ("per_group",), "group_size": (32,), "scale_format": ("e8m0",)},
}


def quark_of(fields: ConfigFields) -> WeightScheme:
    """The format that a ``quantization_config`` describes. Raises ``ModelFilesError``: it is another."""
    for described in _each(fields):
        weight = described.section("weight")
        if weight is None:
            continue
        dtype = weight.values.get("dtype")
        if not isinstance(dtype, str) or dtype not in _LAYOUTS:
            raise weight.refuse("dtype", ", ".join(_LAYOUTS))
        for field, allowed in _LAYOUTS[dtype].items():
            if weight.values.get(field) not in allowed:
                raise weight.refuse(field, ", ".join(map(str, allowed)))
    return _FLOATS


def _each(fields: ConfigFields) -> Iterator[ConfigFields]:
    usual = fields.section(_USUAL)
    if usual is None:
        raise fields.refuse(_USUAL, "an object with weight")
    yield usual
    for some in filter(None, map(fields.section, _OF_SOME)):
        yield from filter(None, map(some.section, some.values))
