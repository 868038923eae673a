"""Checkpoints of NVIDIA's Model Optimizer: floats of 8 bits (FP8) and of 4 bits (NVFP4).

Owns: their description. Must not know: tensors, files, kernels.

Which weight is stored in which way, the tensors say; the description names the ways, one for all or one for each weight.
"""

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.checkpoint.stored_weights.float4 import Float4
from headway_executor.checkpoint.stored_weights.float8 import Float8
from headway_executor.checkpoint.stored_weights.scheme import SchemesByTensors, WeightScheme

_NAME = "modelopt"
_MIXED = "MIXED_PRECISION"
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4")
_FLOATS = SchemesByTensors(
    _NAME, Float8(_NAME), Float4(_NAME, ".weight", ".weight_scale", group=16, total=".weight_scale_2")
)


def modelopt_of(fields: ConfigFields) -> WeightScheme:
    """The format that a ``quantization_config`` describes. Raises ``ModelFilesError``: it is another."""
    algorithm = fields.values.get("quant_algo")
    if algorithm not in (*_ALGORITHMS, _MIXED):
        raise fields.refuse("quant_algo", ", ".join((*_ALGORITHMS, _MIXED)))
    layers = fields.section("quantized_layers") or ConfigFields("", {})
    for own in filter(None, map(layers.section, layers.values)):
        if own.values.get("quant_algo") not in _ALGORITHMS:
            raise own.refuse("quant_algo", ", ".join(_ALGORITHMS))
    return _FLOATS
