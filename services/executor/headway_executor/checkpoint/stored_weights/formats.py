"""Which formats of quantised weights there are.

Owns: their names, and weights that are not quantised. Must not know: a format's tensors.
"""

from collections.abc import Callable
from pathlib import Path

from headway_executor.checkpoint.fields import CONFIG_FILE, ConfigFields, read_json_object
from headway_executor.checkpoint.stored_weights.auto_round import auto_round_of
from headway_executor.checkpoint.stored_weights.awq import awq_of
from headway_executor.checkpoint.stored_weights.compressed_tensors import compressed_tensors_of
from headway_executor.checkpoint.stored_weights.float8 import float8_of
from headway_executor.checkpoint.stored_weights.gguf_blocks import GgufBlocks
from headway_executor.checkpoint.stored_weights.gptq import gptq_of
from headway_executor.checkpoint.stored_weights.mxfp4 import Mxfp4
from headway_executor.checkpoint.stored_weights.scheme import WeightScheme

_FORMATS: dict[str, Callable[[ConfigFields], WeightScheme]] = {
    "auto-round": auto_round_of,
    "awq": awq_of,
    "compressed-tensors": compressed_tensors_of,
    "fp8": float8_of,
    "gguf": lambda _: GgufBlocks(),
    "gptq": gptq_of,
    "mxfp4": lambda _: Mxfp4(),
}


_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where AutoGPTQ and AutoAWQ described the format before config.json did."""


def scheme_in(directory: Path) -> WeightScheme | None:
    """The format of a checkpoint directory; None: its weights are not quantised.

    Raises:
        ModelFilesError: a format, or a variant of one, that cannot be read.
    """
    described = _description_in(directory)
    if described is None:
        return None
    method = described.values.get("quant_method")
    if not isinstance(method, str) or method not in _FORMATS:
        raise described.refuse("quant_method", ", ".join(_FORMATS))
    return _FORMATS[method](described)


def _description_in(directory: Path) -> ConfigFields | None:
    described = read_json_object(directory / CONFIG_FILE).section("quantization_config")
    for name, method in _BESIDE.items():
        if described is None and (directory / name).is_file():
            described = ConfigFields(name, {"quant_method": method, **read_json_object(directory / name).values})
    return described
