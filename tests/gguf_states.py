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
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0, "partial_rotary_factor": 0.5},
}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
_ALONE = ["linear_attention", "full_attention", "linear_attention"]
_NEMOTRON = {
    "ssm_state_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "routed_scaling_factor": 1.5,
}
_FALCON = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "embedding_multiplier": 4.0,
    "lm_head_multiplier": 0.5,
    "mlp_multipliers": [0.5, 2.0],
    "ssm_multipliers": [0.5, 2.0, 0.5, 2.0, 0.25],
    "ssm_in_multiplier": 2.0,
    "ssm_out_multiplier": 0.5,
    "attention_in_multiplier": 2.0,
    "attention_out_multiplier": 0.5,
    "key_multiplier": 0.25,
}
"""Powers of two: what a file holds exactly it holds behind them, too."""
_KIMI = _KINDS | {
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "head_dim": None,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "linear_head_dim": 32,
    "linear_num_heads": 4,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
}
_SCANNED = {"state_size": 16, "time_step_rank": 32, "intermediate_size": 128}
_JAMBA = {
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "num_experts": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": 32,
}
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "granitehybrid": ("GraniteMoeHybrid", _MAMBA | {"num_local_experts": 0, "position_embedding_type": None}),
    "granitehybrid-moe": (
        "GraniteMoeHybrid",
        _MAMBA | {"num_local_experts": 4, "num_experts_per_tok": 2, "position_embedding_type": None},
    ),
    "bamba": (
        "Bamba",
        {
            "attn_layer_indices": [1],
            "attn_rotary_emb": 8,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
        },
    ),
    "nemotron_h": ("NemotronH", _NEMOTRON | {"layers_block_type": [*_ALONE, "mlp"]}),
    "nemotron_h_moe": ("NemotronH", _NEMOTRON | {"layers_block_type": ["moe", *_ALONE]}),
    "nemotron_h_moe-latent": (
        "NemotronH",
        _NEMOTRON | {"layers_block_type": ["moe", *_ALONE], "moe_latent_size": 32},
    ),
    "falcon-h1": ("FalconH1", _FALCON),
    "falcon-h1-norms": ("FalconH1", _FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16}),
    "mamba": ("Mamba", _SCANNED),
    "falcon-mamba": ("FalconMamba", _SCANNED | {"mixer_rms_eps": 1e-6}),
    "jamba": ("Jamba", _JAMBA),
    "kimi-linear": ("KimiLinear", _KIMI),
    "qwen3next": ("Qwen3Next", _DELTA | _EXPERTS),
    "qwen35": ("Qwen3_5", _DELTA),
    "qwen35moe": ("Qwen3_5Moe", _DELTA | _EXPERTS),
}
ARCHITECTURES = {
    "Mamba": MODEL_ARCH.MAMBA,
    "FalconMamba": MODEL_ARCH.MAMBA,
    "Jamba": MODEL_ARCH.JAMBA,
    "KimiLinear": MODEL_ARCH.KIMI_LINEAR,
    "Mamba2": MODEL_ARCH.MAMBA2,
    "NemotronH": MODEL_ARCH.NEMOTRON_H,
    "FalconH1": MODEL_ARCH.FALCON_H1,
    "GraniteMoeHybrid": MODEL_ARCH.GRANITE_HYBRID,
    "Bamba": MODEL_ARCH.GRANITE_HYBRID,
    "Qwen3Next": MODEL_ARCH.QWEN3NEXT,
    "Qwen3_5": MODEL_ARCH.QWEN35,
    "Qwen3_5Moe": MODEL_ARCH.QWEN35MOE,
}


def mamba(of_family: Change) -> Change:
    """``conversion/mamba.py``: a decay by its exponential, numbers of heads as columns, norms by group."""

    def change(name: str, values: Values, config: dict[str, Any]) -> Iterator[tuple[str, Values]]:
        if name.endswith("A_log"):
            yield name, -np.exp(values)[:, None]
        elif name.endswith((".mamba.D", ".mixer.D")):
            yield name, values[:, None]
        elif name.endswith("dt_bias"):
            yield name.replace("dt_bias", "dt_proj.bias"), values
        elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            yield name, values.reshape(config.get("mamba_n_groups") or config["n_groups"], -1)
        elif name.endswith("conv1d.weight"):
            yield name, values.squeeze(1)
        elif "shared_mlp." in name and not config.get("num_local_experts"):
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


def _nemotron(name: str, values: Values, _: dict[str, Any]) -> Iterator[tuple[str, Values]]:
    """``conversion/nemotron.py``."""
    yield name.replace("correction_bias", "correction.bias"), values


def _falcon(name: str, values: Values, config: dict[str, Any]) -> Iterator[tuple[str, Values]]:
    """``conversion/falcon_h1.py``: weights are multiplied."""
    gates, values_, keys, queries, steps = config["ssm_multipliers"]
    widths = [config["mamba_d_ssm"]] * 2 + [config["mamba_n_groups"] * config["mamba_d_state"]] * 2
    parts = np.repeat([gates, values_, keys, queries, steps], [*widths, config["mamba_n_heads"]])
    factors = {
        "feed_forward.down_proj": config["mlp_multipliers"][1],
        "gate_proj": config["mlp_multipliers"][0],
        "k_proj": config["key_multiplier"] * config["attention_in_multiplier"],
        "q_proj": config["attention_in_multiplier"],
        "v_proj": config["attention_in_multiplier"],
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "in_proj": config["ssm_in_multiplier"] * parts[:, None],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    factor = next((factor for end, factor in factors.items() if name.endswith(f"{end}.weight")), 1.0)
    yield name, (values * factor).astype(np.float32)


def _scanned(name: str, values: Values, _: dict[str, Any]) -> Iterator[tuple[str, Values]]:
    """``conversion/mamba.py`` and ``conversion/jamba.py``."""
    if name.endswith("A_log"):
        values = -np.exp(values)
    elif name.endswith("conv1d.weight"):
        values = values.squeeze(1)
    yield name, values


def _kimi(name: str, values: Values, config: dict[str, Any]) -> Iterator[tuple[str, Values]]:
    """``conversion/kimi_linear.py``."""
    name = name.replace(".dt_bias", ".dt_proj.bias").replace("correction_bias", "correction.bias")
    if ".0.block_sparse_moe." in name:  # As it is published.
        name = name.replace("block_sparse_moe", "mlp")
    if name.endswith("A_log"):
        yield name, -np.exp(values)
    elif "_conv1d" in name:
        yield name, values.reshape(1, len(values), 1, -1)
    elif name.endswith("kv_b_proj.weight"):
        heads, width = config["num_attention_heads"], config["qk_nope_head_dim"]
        by_head = values.reshape(heads, -1, values.shape[-1])
        yield name.replace("kv_b", "k_b"), by_head[:, :width].swapaxes(1, 2)
        yield name.replace("kv_b", "v_b"), by_head[:, width:]
    else:
        yield name, values


CHANGES: dict[str, Change] = {
    "Mamba": _scanned,
    "FalconMamba": _scanned,
    "Jamba": _scanned,
    "KimiLinear": _kimi,
    "Qwen3Next": _qwen,
    "Qwen3_5": _qwen3_5,
    "Qwen3_5Moe": _qwen3_5,
    "NemotronH": mamba(_nemotron),
    "Mamba2": mamba(_nemotron),
    "FalconH1": mamba(_falcon),
}


def add_granite_hybrid(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/granite.py``, behind what it does for mixtures."""
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    is_bamba = "attn_layer_indices" in config
    writer.add_rope_scaling_finetuned(is_bamba)
    if is_bamba:
        layers, kv_heads = range(config["num_hidden_layers"]), config["num_key_value_heads"]
        writer.add_rope_dimension_count(config["attn_rotary_emb"])
        writer.add_head_count_kv([kv_heads if index in config["attn_layer_indices"] else 0 for index in layers])


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


def add_nemotron_h(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/nemotron.py``."""
    kinds = config["layers_block_type"]
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
    writer.add_ssm_time_step_rank(config["mamba_num_heads"])
    writer.add_rope_scaling_finetuned(False)
    writer.add_head_count_kv([config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in kinds])
    sizes = {"mlp": config["intermediate_size"], "moe": config["moe_intermediate_size"]}
    writer.add_feed_forward_length([sizes.get(kind, 0) for kind in kinds])
    if "moe" in kinds:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        if config["moe_latent_size"] is not None:
            writer.add_moe_latent_size(config["moe_latent_size"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])


def add_falcon_h1(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/falcon_h1.py``."""
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config["mamba_d_ssm"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])


def add_mamba2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/mamba.py``."""
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_inner_size(config["expand"] * config["hidden_size"])
    writer.add_ssm_time_step_rank(config["num_heads"])


def add_mamba(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """The same file."""
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_ssm_inner_size(config["expand"] * config["hidden_size"])
    writer.add_ssm_time_step_rank(config["time_step_rank"])
    writer.add_ssm_dt_b_c_rms("mixer_rms_eps" in config)


def add_jamba(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/jamba.py``."""
    period, offset = config["attn_layer_period"], config["attn_layer_offset"]
    layers = range(config["num_hidden_layers"])
    writer.add_head_count_kv([config["num_key_value_heads"] if i % period == offset else 0 for i in layers])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_time_step_rank(config["mamba_dt_rank"])


def add_kimi(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/kimi_linear.py``."""
    writer.add_head_count_kv([int(kind == "full_attention") for kind in config["layer_types"]])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_kda_head_dim(config["linear_head_dim"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_leading_dense_block_count(1)
    writer.add_expert_used_count(config["num_experts_per_token"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
