"""Checkpoints of NVIDIA's Model Optimizer: floats of 8 and of 4 bits.

Owns: their description. Must not know: tensors, files, kernels.

Where weights are stored in several ways, the description names that of each; the tensors say it, too.
"""

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.checkpoint.stored_weights.float4 import Float4
from headway_executor.checkpoint.stored_weights.float8 import Float8
from headway_executor.checkpoint.stored_weights.scheme import SchemesByTensors, WeightScheme

_NAME = "modelopt"
_FP8 = Float8(_NAME)
_NVFP4 = Float4(_NAME, ".weight", ".weight_scale", group=16, total=".weight_scale_2")
_SCHEMES: dict[str, WeightScheme] = {
    "FP8": _FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": _FP8,
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
    "MXFP8": Float8(_NAME, block=(1, 32)),
    "W4A8_MXFP4_FP8": Float4(_NAME, ".weight", ".weight_scale"),
}
_MIXED, _OF_MIXED = "MIXED_PRECISION", ("FP8", "NVFP4", "W4A16_NVFP4")


def modelopt_of(fields: ConfigFields) -> WeightScheme:
    """The format that a ``quantization_config`` describes. Raises ``ModelFilesError``: it is another."""
    algorithm = fields.values.get("quant_algo")
    if isinstance(algorithm, str) and algorithm in _SCHEMES:
        return _SCHEMES[algorithm]
    if algorithm is None and (fields.values.get("kv_cache_scheme") or fields.values.get("kv_cache_quant_algo")):
        return SchemesByTensors(_NAME)
    if algorithm != _MIXED:
        raise fields.refuse("quant_algo", ", ".join((*_SCHEMES, _MIXED)))
    layers = fields.section("quantized_layers") or ConfigFields("", {})
    for own in filter(None, map(layers.section, layers.values)):
        if own.values.get("quant_algo") not in _OF_MIXED:
            raise own.refuse("quant_algo", ", ".join(_OF_MIXED))
    return SchemesByTensors(_NAME, _FP8, _NVFP4)
