"""Which formats of quantised weights there are.

Owns: their names, weights that are not quantised, and what a description says of keys and values. Must not know: a format's tensors.
"""

from collections.abc import Callable
from pathlib import Path

from headway_executor.checkpoint.fields import CONFIG_FILE, TEXT_CONFIG, ConfigFields, read_json_object
from headway_executor.checkpoint.stored_weights.auto_round import auto_round_of
from headway_executor.checkpoint.stored_weights.awq import awq_of
from headway_executor.checkpoint.stored_weights.bitnet import bitnet_of
from headway_executor.checkpoint.stored_weights.bitsandbytes import bitsandbytes_of
from headway_executor.checkpoint.stored_weights.compressed_tensors import compressed_tensors_of
from headway_executor.checkpoint.stored_weights.float4 import MXFP4
from headway_executor.checkpoint.stored_weights.float8 import Float8, float8_of
from headway_executor.checkpoint.stored_weights.gguf_blocks import GgufBlocks
from headway_executor.checkpoint.stored_weights.gptq import gptq_of
from headway_executor.checkpoint.stored_weights.mlx import mlx_of
from headway_executor.checkpoint.stored_weights.modelopt import modelopt_of
from headway_executor.checkpoint.stored_weights.quark import quark_of
from headway_executor.checkpoint.stored_weights.scheme import WeightScheme

_FORMATS: dict[str, Callable[[ConfigFields], WeightScheme]] = {
    "auto-round": auto_round_of,
    "awq": awq_of,
    "bitnet": bitnet_of,
    "bitsandbytes": bitsandbytes_of,
    "compressed-tensors": compressed_tensors_of,
    "fbgemm_fp8": lambda _: Float8("fbgemm_fp8"),
    "fp8": float8_of,
    "gguf": lambda _: GgufBlocks(),
    "gptq": gptq_of,
    "mlx": mlx_of,
    "modelopt": modelopt_of,
    "mxfp4": lambda _: MXFP4,
    "quark": quark_of,
}


_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Where AutoGPTQ, AutoAWQ and Model Optimizer described the format before config.json did."""
_FIELD = "quantization_config"
_KV_FIELDS = ("kv_cache_scheme", "kv_cache_quant_algo")
_KV_MODULES = "kv_cache_group"
"""Quark's, in ``export``."""


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


def asks_for_kv_codes(directory: Path) -> bool:
    """Whether a checkpoint directory is meant for keys and values that are quantised, too. Raises ``ModelFilesError``."""
    described = _description_in(directory)
    if described is None:
        return False
    export = described.section("export")
    return any(described.values.get(field) for field in _KV_FIELDS) or (
        export is not None and bool(export.values.get(_KV_MODULES))
    )


def _description_in(directory: Path) -> ConfigFields | None:
    config = read_json_object(directory / CONFIG_FILE)
    text = config.section(TEXT_CONFIG)
    holder = text if text is not None and config.section(_FIELD) is None else config
    described, of_mlx = holder.section(_FIELD), config.values.get("quantization")
    if isinstance(of_mlx, dict) and (described is None or "quant_method" not in described.values):
        return ConfigFields(f"{config.source}: quantization", {"quant_method": "mlx", **of_mlx})
    for name, method in _BESIDE.items():
        if described is None and (directory / name).is_file():
            whole = read_json_object(directory / name)
            inner = whole.section("quantization") or whole
            described = ConfigFields(inner.source, {"quant_method": method, **inner.values})
    return described
