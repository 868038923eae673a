"""Random models with states in their layers, and how llama.cpp's converter writes them: see ``gguf_files``."""

from collections.abc import Callable, Iterator
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH
from numpy.typing import NDArray

Values = NDArray[np.float32]
Change = Callable[[str, Values, dict[str, Any]], Iterator[tuple[str, Values]]]

_KINDS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_MAMBA = _KINDS | {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
    "attention_multiplier": 0.1,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "intermediate_size": 64,
    "shared_intermediate_size": 64,
}
_DELTA = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0, "partial_rotary_factor": 0.5},
}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "granitehybrid": ("GraniteMoeHybrid", _MAMBA | {"num_local_experts": 0, "position_embedding_type": None}),
    "granitehybrid-moe": (
        "GraniteMoeHybrid",
        _MAMBA | {"num_local_experts": 4, "num_experts_per_tok": 2, "position_embedding_type": None},
    ),
    "qwen3next": ("Qwen3Next", _DELTA | _EXPERTS),
    "qwen35": ("Qwen3_5", _DELTA),
    "qwen35moe": ("Qwen3_5Moe", _DELTA | _EXPERTS),
}
ARCHITECTURES = {
    "GraniteMoeHybrid": MODEL_ARCH.GRANITE_HYBRID,
    "Qwen3Next": MODEL_ARCH.QWEN3NEXT,
    "Qwen3_5": MODEL_ARCH.QWEN35,
    "Qwen3_5Moe": MODEL_ARCH.QWEN35MOE,
}


def mamba(of_family: Change) -> Change:
    """``conversion/mamba.py``: a decay by its exponential, numbers of heads as columns, norms by group."""

    def change(name: str, values: Values, config: dict[str, Any]) -> Iterator[tuple[str, Values]]:
        if name.endswith("A_log"):
            yield name, -np.exp(values)[:, None]
        elif name.endswith("mamba.D"):
            yield name, values[:, None]
        elif name.endswith("dt_bias"):
            yield name.replace("dt_bias", "dt_proj.bias"), values
        elif name.endswith("mamba.norm.weight"):
            yield name, values.reshape(config["mamba_n_groups"], -1)
        elif name.endswith("conv1d.weight"):
            yield name, values.squeeze(1)
        elif "shared_mlp." in name and not config["num_local_experts"]:
            place = name.replace("shared_mlp", "mlp").replace("output_linear", "down_proj")
            halves = np.split(values, 2) if "input" in name else [values]
            for kind, part in zip(("gate", "up"), halves, strict=False):
                yield place.replace("input_linear", f"{kind}_proj"), part
        else:
            yield from of_family(name, values, config)

    return change


def _qwen(name: str, values: Values, config: dict[str, Any]) -> Iterator[tuple[str, Values]]:
    """``conversion/qwen.py``, ``Qwen3NextModel``: norms have 1 added, and inputs are no longer by key head."""
    if name.endswith("A_log"):
        yield name, -np.exp(values)
    elif name.endswith("dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), values
    elif name.endswith("conv1d.weight"):
        yield name, values.squeeze(1)
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        yield name, values + 1
    elif "in_proj_qkvz" in name and config["is_absorbed"]:
        keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        wide = heads // keys * config["linear_value_head_dim"]
        ends = np.cumsum([config["linear_key_head_dim"]] * 2 + [wide])
        parts = [
            part.reshape(-1, values.shape[1]) for part in np.split(values.reshape(keys, -1, values.shape[1]), ends, 1)
        ]
        yield name.replace("qkvz", "qkv"), np.concatenate(parts[:3])
        yield name.replace("qkvz", "z"), parts[3]
    elif name.endswith("experts.gate_up_proj"):
        for kind, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
            yield name.replace("gate_up_proj", f"{kind}_proj.weight"), half
    else:
        yield f"{name}.weight" if name.endswith("experts.down_proj") else name, values


def _qwen3_5(name: str, values: Values, config: dict[str, Any]) -> Iterator[tuple[str, Values]]:
    """The same file, ``_LinearAttentionVReorderBase``: heads that share a key do not follow each other."""
    keys, dim = config["linear_num_key_heads"], config["linear_value_head_dim"]

    def turned(rows: Values, width: int) -> Values:
        return rows.reshape(keys, -1, width, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    first = 2 * keys * config["linear_key_head_dim"]
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        values = np.concatenate([values[:first], turned(values[first:], dim)])
    elif name.endswith("in_proj_z.weight"):
        values = turned(values, dim)
    elif name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        values = turned(values, 1)
    elif name.endswith("linear_attn.out_proj.weight"):
        values = turned(values.T, dim).T
    yield from _qwen(name, values, config)


CHANGES: dict[str, Change] = {"Qwen3Next": _qwen, "Qwen3_5": _qwen3_5, "Qwen3_5Moe": _qwen3_5}


def add_granite_hybrid(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/granite.py``, behind what it does for mixtures."""
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_rope_scaling_finetuned(False)


def add_qwen(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/qwen.py``."""
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(4)
    writer.add_rope_dimension_count(int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]))
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if config["architectures"] != ["Qwen3NextForCausalLM"]:
        writer.add_rope_dimension_sections([2, 1, 1, 0])
