"""Architectures of GGUF files with a step for each channel: Mamba, FalconMamba, Jamba and Kimi Linear.

Owns: one function for each. Must not know: what most of them share, files.
"""

from torch import Tensor

from headway.gguf_import.family import RMS, Family, chosen
from headway.gguf_import.layout import DENSE, Joined, Layout, Order, by_expert, keys_and_values, shared, usual
from headway.gguf_import.metadata import Metadata
from headway.gguf_import.states import FULL, LINEAR

_SIGMOID = 2
_NAMES = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_x": "x_proj",
    "ssm_dt": "dt_proj",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_out": "out_proj",
}
_NORMS = {"ssm_dt_norm": "dt_layernorm", "ssm_b_norm": "b_layernorm", "ssm_c_norm": "c_layernorm"}
_ORDERS: dict[str, Order] = {
    "ssm_conv1d": lambda rows: rows.unsqueeze(1) if rows.dim() > 1 else rows,
    "ssm_a": lambda rows: rows.neg().log(),
}
"""As checkpoints have them: a decay is stored as it is computed with."""


def mamba(metadata: Metadata) -> Family:
    """With norms of what a token's values select, it is FalconMamba. Their epsilon is not in the file."""
    layout = Layout(
        {"attn_norm": "norm"} | {place: f"mixer.{name}" for place, name in _NAMES.items()},
        outside={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
        layer="backbone.layers.{}.",
        orders=_ORDERS,
        bare=frozenset({"mixer.A_log", "mixer.D"}),
    )
    fields = {
        "expand": _growth(metadata),
        "state_size": metadata.integer("ssm.state_size"),
        "time_step_rank": metadata.integer("ssm.time_step_rank"),
        "conv_kernel": metadata.integer("ssm.conv_kernel"),
        "use_bias": metadata.has_tensor("blk.0.ssm_in.bias"),
        "use_conv_bias": metadata.has_tensor("blk.0.ssm_conv1d.bias"),
    }
    is_normed = bool(metadata.value("ssm.dt_b_c_rms", False))
    architecture = "FalconMambaForCausalLM" if is_normed else "MambaForCausalLM"
    return Family(architecture, layout, fields, eps=("layer_norm_epsilon", RMS))


def jamba(metadata: Metadata) -> Family:
    """A layer with heads of keys has attention, and one with a router experts."""
    of_state = {place: f"mamba.{name}" for place, name in (_NAMES | _NORMS).items()}
    experts = {"ffn_gate_inp": "feed_forward.router"} | by_expert("feed_forward.experts")
    dense = {place: name.replace("mlp.", "feed_forward.") for place, name in DENSE.items()}
    layout = Layout(
        usual(dense, experts, of_state, {"ffn_norm": "pre_ff_layernorm"}),
        outside={"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"},
        orders=_ORDERS,
        bare=frozenset({"mamba.A_log", "mamba.D"}),
    )
    layers = range(metadata.num_layers)
    attending = [index for index in layers if metadata.kv_heads[index]]
    sparse = [index for index in layers if metadata.has_tensor(f"blk.{index}.ffn_gate_inp.weight")]
    states = [index for index in layers if index not in attending]
    fields = {
        **_every(metadata, "attn_layer", attending),
        **_every(metadata, "expert_layer", sparse),
        "num_experts": metadata.integer("expert_count", 0, low=0) or 1,
        "num_experts_per_tok": chosen(metadata) if sparse else 1,
        "mamba_expand": _growth(metadata),
        "mamba_d_state": metadata.integer("ssm.state_size"),
        "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
        "mamba_dt_rank": metadata.integer("ssm.time_step_rank"),
        "mamba_conv_bias": any(metadata.has_tensor(f"blk.{index}.ssm_conv1d.bias") for index in states),
        "mamba_proj_bias": any(metadata.has_tensor(f"blk.{index}.ssm_in.bias") for index in states),
    }
    return Family("JambaForCausalLM", layout, fields)


def kimi_linear(metadata: Metadata) -> Family:
    """A layer with heads of keys has attention. Nothing is rotated."""
    rotary = metadata.integer("rope.dimension_count")
    key_dim, value_dim = (metadata.integer(f"attention.{width}_mla") for width in ("key_length", "value_length"))
    for width in ("key_length", "value_length"):  # of keys that stay compressed
        metadata.value(f"attention.{width}", None)
    moe = "block_sparse_moe."
    names = {
        "ssm_conv1d_q": "q_conv1d",
        "ssm_conv1d_k": "k_conv1d",
        "ssm_conv1d_v": "v_conv1d",
        "ssm_f_a": "f_a_proj",
        "ssm_f_b": "f_b_proj",
        "ssm_g_a": "g_a_proj",
        "ssm_g_b": "g_b_proj",
        "ssm_beta": "b_proj",
        "ssm_a": "A_log",
        "ssm_dt": "dt_bias",
        "ssm_norm": "o_norm",
        "attn_kv_a_mqa": "kv_a_proj_with_mqa",
        "attn_kv_a_norm": "kv_a_layernorm",
        "attn_kv_b": "kv_b_proj",
    }
    experts = {"ffn_gate_inp": f"{moe}gate", "exp_probs_b": f"{moe}gate.e_score_correction_bias"}
    parts = ("attn_k_b", "attn_v_b")
    layout = Layout(
        usual(
            DENSE,
            experts | by_expert(f"{moe}experts", ("w1", "w3", "w2")),
            shared(f"{moe}shared_experts."),
            {place: f"self_attn.{name}" for place, name in names.items()},
        ),
        orders={
            **dict.fromkeys(("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v"), _as_convolution),
            "ssm_a": lambda rows: rows.neg().log().view(1, 1, -1, 1),
        },
        joined={parts: Joined("self_attn.kv_b_proj", keys_and_values, is_wide=True)},
        bare=frozenset({"self_attn.A_log", "self_attn.dt_bias", f"{moe}gate.e_score_correction_bias"}),
    )
    metadata.refuse_unless("attention.q_lora_rank", 0)
    metadata.refuse_unless("expert_gating_func", _SIGMOID)
    fields: dict[str, object] = {
        "head_dim": None,
        "num_key_value_heads": metadata.num_heads,
        "layer_types": [FULL if heads else LINEAR for heads in metadata.kv_heads],
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key_dim - rotary,
        "v_head_dim": value_dim,
        "linear_num_heads": metadata.num_heads,
        "linear_head_dim": metadata.integer("kda.head_dim"),
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0, low=0),
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": chosen(metadata),
        "n_shared_experts": metadata.integer("expert_shared_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(metadata.value("expert_weights_norm", True)),
        "n_group": metadata.integer("expert_group_count", 1, low=0) or 1,
        "topk_group": metadata.integer("expert_group_used_count", 1, low=0) or 1,
    }
    return Family("KimiLinearForCausalLM", layout, fields)


def _as_convolution(rows: Tensor) -> Tensor:
    """Each channel with its taps."""
    return rows.reshape(-1, 1, rows.shape[-1])


def _growth(metadata: Metadata) -> int:
    hidden, inner = metadata.integer("embedding_length"), metadata.integer("ssm.inner_size")
    if inner % hidden:
        raise metadata.refuse("ssm.inner_size", f"a multiple of {hidden}")
    return inner // hidden


def _every(metadata: Metadata, name: str, layers: list[int]) -> dict[str, int]:
    """The period and the offset of ``layers``; of one or none, beyond the last."""
    count = metadata.num_layers
    first = layers[0] if layers else count
    period = layers[1] - first if len(layers) > 1 else count + 1
    if layers != list(range(first, count, period)) or first >= period:
        raise metadata.file.refuse(f"layers {layers} are {name}s; allowed: every so manieth, from one of the first on")
    return {f"{name}_period": period, f"{name}_offset": first}
