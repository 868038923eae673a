"""Architectures of GGUF files whose layers have states: the fields of config.json, and where their tensors stand.

Owns: one function for each. Must not know: what most of them share, files.

What is stored of a state is what is computed with: ``ssm_a`` is the exponential of what a checkpoint has, and below 0.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from headway.gguf_import.family import RMS, Family, chosen, granite_factors, partly, turned
from headway.gguf_import.layout import (
    DENSE,
    EXPERTS,
    QK_NORMS,
    Layout,
    Order,
    Split,
    as_matrix,
    by_expert,
    shared,
    usual,
)
from headway.gguf_import.metadata import Metadata

LINEAR, FULL = "linear_attention", "full_attention"


def of_state(prefix: str, *, has_inputs: bool = True) -> dict[str, str]:
    """The places of a state; without ``has_inputs`` they stand elsewhere."""
    names = {
        "ssm_conv1d": "conv1d",
        "ssm_dt": "dt_bias",
        "ssm_a": "A_log",
        "ssm_d": "D",
        "ssm_norm": "norm",
        "ssm_out": "out_proj",
    }
    if has_inputs:
        names["ssm_in"] = "in_proj"
    return {place: f"{prefix}.{name}" for place, name in names.items()}


def orders_of_state() -> dict[str, Order]:
    """As checkpoints have them."""
    return {
        "ssm_conv1d": lambda rows: rows.unsqueeze(1) if rows.dim() == 2 else rows,
        "ssm_a": lambda rows: rows.neg().log().flatten(),
        "ssm_d": torch.flatten,
        "ssm_norm": torch.flatten,
    }


def bare_of_state(prefix: str) -> frozenset[str]:
    """Names without an end."""
    return frozenset(f"{prefix}.{name}" for name in ("A_log", "D", "dt_bias"))


def has_in_some_layer(metadata: Metadata, tensor: str) -> bool:
    """Whether a layer has a tensor."""
    return any(metadata.has_tensor(f"blk.{index}.{tensor}") for index in range(metadata.num_layers))


def granite_hybrid(metadata: Metadata) -> Family:
    """A layer without heads of keys has a state. A tensor for each matrix of a feed-forward, as in Granite's mixtures. Without
    factors on logits, it is Bamba.
    """
    if "logit_scale" not in metadata:
        return _bamba(metadata)
    experts = {"ffn_gate_inp": "block_sparse_moe.router.layer"} | by_expert("block_sparse_moe.experts")
    dense = {place: name.replace("mlp.", "shared_mlp.") for place, name in DENSE.items()}
    layout = Layout(
        usual(experts, dense, shared("shared_mlp."), of_state("mamba")),
        orders=turned(metadata) | orders_of_state(),
        bare=bare_of_state("mamba"),
    )
    num_experts = metadata.integer("expert_count", 0, low=0)
    rotates = metadata.value("rope.scaling.finetuned", True)
    fields = {
        "layer_types": [FULL if heads else LINEAR for heads in metadata.kv_heads],
        "position_embedding_type": "rope" if rotates else "nope",
        "attention_bias": has_in_some_layer(metadata, "attn_q.bias"),
        "num_local_experts": num_experts,
        "num_experts_per_tok": chosen(metadata) if num_experts else 0,
        "shared_intermediate_size": metadata.integer(
            "expert_shared_feed_forward_length", metadata.integer("feed_forward_length"), low=0
        ),
    }
    return Family("GraniteMoeHybridForCausalLM", layout, fields | _mamba_fields(metadata) | granite_factors(metadata))


def _bamba(metadata: Metadata) -> Family:
    """llama.cpp's converter turns whole heads of queries and keys, though half of each is rotated."""
    metadata.refuse_unless("rope.dimension_count", metadata.head_dim // 2)
    metadata.refuse_unless("rope.scaling.finetuned", allowed=True)
    metadata.refuse_unless("expert_count", 0)
    dense = {place: name.replace("mlp.", "feed_forward.") for place, name in DENSE.items()}
    layout = Layout(
        usual(dense, {"ffn_norm": "pre_ff_layernorm"}, of_state("mamba")),
        outside={"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"},
        orders=turned(metadata) | orders_of_state(),
        bare=bare_of_state("mamba"),
    )
    fields = {
        "attn_layer_indices": [index for index, heads in enumerate(metadata.kv_heads) if heads],
        "attention_bias": has_in_some_layer(metadata, "attn_q.bias"),
        "mlp_bias": has_in_some_layer(metadata, "ffn_up.bias"),
        "partial_rotary_factor": 0.5,
    }
    return Family("BambaForCausalLM", layout, fields | _mamba_fields(metadata))


def _mamba_fields(metadata: Metadata) -> dict[str, object]:
    hidden, inner = metadata.integer("embedding_length"), metadata.integer("ssm.inner_size")
    if inner % hidden:
        raise metadata.refuse("ssm.inner_size", f"a multiple of {hidden}")
    return {
        "mamba_n_heads": metadata.integer("ssm.time_step_rank"),
        "mamba_n_groups": metadata.integer("ssm.group_count", 1),
        "mamba_d_state": metadata.integer("ssm.state_size"),
        "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
        "mamba_expand": inner // hidden,
        "mamba_conv_bias": has_in_some_layer(metadata, "ssm_conv1d.bias"),
        "mamba_proj_bias": has_in_some_layer(metadata, "ssm_in.bias"),
    }


def qwen3_next(metadata: Metadata) -> Family:
    """Older files have inputs as checkpoints do, the parts of a key head side by side."""
    fields = _of_qwen(metadata) | {"norm_topk_prob": True}
    return Family("Qwen3NextForCausalLM", _qwen_layout(metadata, _EXPERTS_OF_QWEN), fields)


def qwen3_5(metadata: Metadata) -> Family:
    """With experts, or without."""
    metadata.value("rope.dimension_sections", None)  # Positions are three numbers, which in a text are the same.
    if metadata.integer("expert_count", 0, low=0):
        return Family("Qwen3_5MoeForCausalLM", _qwen_layout(metadata, _EXPERTS_OF_QWEN), _of_qwen(metadata))
    return Family("Qwen3_5ForCausalLM", _qwen_layout(metadata, DENSE), _of_qwen(metadata))


_EXPERTS_OF_QWEN = EXPERTS | shared("mlp.shared_expert.") | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}


def _qwen_layout(metadata: Metadata, feed_forward: Mapping[str, str]) -> Layout:
    inputs = {
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
        "post_attention_norm": "post_attention_layernorm",
    }
    key_heads = metadata.integer("ssm.group_count")
    ratio = metadata.integer("ssm.time_step_rank") // key_heads
    key_dim = metadata.integer("ssm.state_size")
    values = ratio * metadata.integer("ssm.inner_size") // max(1, key_heads * ratio)
    return Layout(
        usual(feed_forward, QK_NORMS, inputs, of_state("linear_attn", has_inputs=False)),
        orders={"ffn_gate_inp_shexp": as_matrix} | orders_of_state(),
        splits={
            "ssm_ba": by_key_head(key_heads, {"in_proj_b": [ratio], "in_proj_a": [ratio]}),
            "ssm_in": by_key_head(key_heads, {"in_proj_qkv": [key_dim, key_dim, values], "in_proj_z": [values]}),
        },
        bare=bare_of_state("linear_attn"),
        norm_offset=1.0,
        plain_norms=frozenset({"ssm_norm"}),
        num_layers=metadata.read_layers,
    )


def by_key_head(count: int, names: Mapping[str, list[int]]) -> Split:
    """Rows of each key head side by side, as those of all: of each name, parts of so many rows."""

    def split(rows: Tensor) -> dict[str, Tensor]:
        widths = [width for of_name in names.values() for width in of_name]
        parts = iter(torch.split(rows.view(count, -1, *rows.shape[1:]), widths, 1))
        return {
            f"linear_attn.{name}": torch.cat([next(parts).flatten(0, 1) for _ in of_name])
            for name, of_name in names.items()
        }

    return split


def _of_qwen(metadata: Metadata) -> dict[str, object]:
    heads, inner = metadata.integer("ssm.time_step_rank"), metadata.integer("ssm.inner_size")
    if inner % heads:
        raise metadata.refuse("ssm.inner_size", f"a multiple of {heads}")
    fields: dict[str, object] = {
        "num_hidden_layers": metadata.read_layers,
        "full_attention_interval": metadata.integer("full_attention_interval", 4),
        "attention_bias": False,
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "linear_num_key_heads": metadata.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": metadata.integer("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "rope_parameters": partly(metadata),
    }
    if metadata.integer("expert_count", 0, low=0):
        fields |= {
            "num_experts": metadata.integer("expert_count"),
            "num_experts_per_tok": chosen(metadata),
            "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
            "shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length"),
        }
    return fields


_OF_NEMOTRON = {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b": "mixer.gate.e_score_correction_bias",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "ffn_up_exps": "mixer.experts.{}.up_proj",
    "ffn_down_exps": "mixer.experts.{}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
}


_OF_EXPERTS = ("count", "group_count", "shared_count", "shared_feed_forward_length", "weights_scale")


def nemotron_h(metadata: Metadata) -> Family:
    """What a layer is, its tensors say. Without positions, it does not matter how queries and keys are turned."""
    layout = Layout(
        _OF_NEMOTRON | of_state("mixer"),
        outside={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
        layer="backbone.layers.{}.",
        orders=orders_of_state(),
        bare=bare_of_state("mixer") | {"mixer.gate.e_score_correction_bias"},
        num_layers=metadata.read_layers,
    )
    # Nothing is rotated, and a file may say what experts would be like if there were any.
    for key in ("rope.dimension_count", *(f"expert_{key}" for key in _OF_EXPERTS)):
        metadata.value(key, None)
    heads, inner = metadata.integer("ssm.time_step_rank"), metadata.integer("ssm.inner_size")
    if inner % heads:
        raise metadata.refuse("ssm.inner_size", f"a multiple of {heads}")
    kinds = [_kind_of_nemotron(metadata, index) for index in range(metadata.read_layers)]
    dense = next((index for index, kind in enumerate(kinds) if kind == "mlp"), None)
    fields: dict[str, object] = {
        "layers_block_type": kinds,
        "num_hidden_layers": metadata.read_layers,
        "attention_bias": has_in_some_layer(metadata, "attn_q.bias"),
        "mlp_bias": has_in_some_layer(metadata, "ffn_up.bias"),
        "use_bias": has_in_some_layer(metadata, "ssm_in.bias"),
        "use_conv_bias": has_in_some_layer(metadata, "ssm_conv1d.bias"),
        "conv_kernel": metadata.integer("ssm.conv_kernel"),
        "n_groups": metadata.integer("ssm.group_count"),
        "ssm_state_size": metadata.integer("ssm.state_size"),
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
    }
    if dense is not None:
        fields["intermediate_size"] = metadata.file.shape(f"blk.{dense}.ffn_up.weight")[0]
    if "moe" in kinds:
        metadata.refuse_unless("expert_gating_func", 2)
        fields |= {
            "n_routed_experts": metadata.integer("expert_count"),
            "num_experts_per_tok": chosen(metadata),
            "n_shared_experts": metadata.integer("expert_shared_count", 1),
            "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length"),
            "moe_latent_size": metadata.value("moe_latent_size", None),
            "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
            "norm_topk_prob": bool(metadata.value("expert_weights_norm", False)),
            "n_group": metadata.integer("expert_group_count", 1, low=0) or 1,
            "topk_group": metadata.integer("expert_group_used_count", 1, low=0) or 1,
        }
    return Family("NemotronHForCausalLM", layout, fields, eps=("layer_norm_epsilon", RMS))


def _kind_of_nemotron(metadata: Metadata, index: int) -> str:
    kinds = {"ssm_in": LINEAR, "attn_q": FULL, "ffn_gate_inp": "moe", "ffn_up": "mlp"}
    found = [kind for place, kind in kinds.items() if metadata.has_tensor(f"blk.{index}.{place}.weight")]
    if len(found) != 1:
        raise metadata.file.refuse(
            f"layer {index} has tensors of {' and '.join(found) or 'nothing'}; allowed: of one kind"
        )
    return found[0]


def falcon_h1(metadata: Metadata) -> Family:
    """The file's weights are multiplied already. llama.cpp has gates before the norm of a state, if there is one."""
    dense = {place: name.replace("mlp.", "feed_forward.") for place, name in DENSE.items()}
    layout = Layout(
        usual(dense, {"ffn_norm": "pre_ff_layernorm"}, of_state("mamba")),
        outside={"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"},
        endless=frozenset({"ffn_norm"}),
        orders=orders_of_state(),
        bare=bare_of_state("mamba"),
    )
    fields = {
        "mamba_d_ssm": metadata.integer("ssm.inner_size"),
        "mamba_n_heads": metadata.integer("ssm.time_step_rank"),
        "mamba_n_groups": metadata.integer("ssm.group_count", 1),
        "mamba_d_state": metadata.integer("ssm.state_size"),
        "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
        "mamba_conv_bias": metadata.has_tensor("blk.0.ssm_conv1d.bias"),
        "mamba_proj_bias": metadata.has_tensor("blk.0.ssm_in.bias"),
        "mamba_rms_norm": metadata.has_tensor("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }
    return Family("FalconH1ForCausalLM", layout, fields)


def mamba2(metadata: Metadata) -> Family:
    """Layers of a state alone."""
    layout = Layout(
        {"attn_norm": "norm"} | of_state("mixer"),
        outside={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
        layer="backbone.layers.{}.",
        orders=orders_of_state(),
        bare=bare_of_state("mixer"),
    )
    hidden, heads, inner = (
        metadata.integer(key) for key in ("embedding_length", "ssm.time_step_rank", "ssm.inner_size")
    )
    if inner % heads or inner % hidden:
        raise metadata.refuse("ssm.inner_size", f"a multiple of {heads} and of {hidden}")
    fields = {
        "num_heads": heads,
        "head_dim": inner // heads,
        "expand": inner // hidden,
        "state_size": metadata.integer("ssm.state_size"),
        "n_groups": metadata.integer("ssm.group_count", 1),
        "conv_kernel": metadata.integer("ssm.conv_kernel"),
        "use_bias": metadata.has_tensor("blk.0.ssm_in.bias"),
        "use_conv_bias": metadata.has_tensor("blk.0.ssm_conv1d.bias"),
    }
    return Family("Mamba2ForCausalLM", layout, fields, eps=("layer_norm_epsilon", RMS))
