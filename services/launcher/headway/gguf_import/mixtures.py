"""Architectures of GGUF files with experts: the fields of config.json that each has, and where its tensors stand.

Owns: one function for each. Must not know: what most of them share, files.

Metadata is what llama.cpp's converter writes (``conversion/*.py`` of ggml-org/llama.cpp). What a file does not say is what
llama.cpp takes for it (``src/models/*.cpp``), which is what the published models have.
"""

import math
from collections.abc import Mapping

from headway.gguf_import.family import (
    HUNYUAN_NORMS,
    LAYER,
    Family,
    chosen,
    partial,
    partly,
    rotated_granite,
    turned,
    windows,
)
from headway.gguf_import.layout import (
    DENSE,
    EXPERTS,
    LATENT,
    QK_NORMS,
    Joined,
    Layout,
    alone,
    as_matrix,
    by_expert,
    keys_and_values,
    shared,
    side_by_side,
    usual,
)
from headway.gguf_import.metadata import Metadata

_EXPERTS_OF_MAVERICK = 128
"""Of the model that does not normalise queries and keys."""
_DBRX_EPS = 1e-5
_SPARSE_BLOCK = {"ffn_gate_inp": "block_sparse_moe.gate"} | by_expert("block_sparse_moe.experts", ("w1", "w3", "w2"))
"""Experts as Mixtral has them."""


def mixtral(metadata: Metadata) -> Family:
    """Mixtral."""
    places = usual(_SPARSE_BLOCK)
    fields = {"num_local_experts": metadata.integer("expert_count"), "num_experts_per_tok": chosen(metadata)}
    return Family("MixtralForCausalLM", Layout(places, orders=turned(metadata)), fields | {"sliding_window": None})


def llama4(metadata: Metadata) -> Family:
    """A file says neither which layers have no positions nor how queries grow, and has no channels to turn."""
    if metadata.value("attention.sliding_window", None) == 0:
        raise metadata.refuse("attention.sliding_window", "absent: attention in chunks")
    names = {place: name.replace("mlp.", "") for place, name in DENSE.items()}
    places = usual(
        {place: f"feed_forward.{name}" for place, name in names.items()},
        {f"{place}_exps": f"feed_forward.experts.{{}}.{name}" for place, name in names.items()},
        {f"{place}_shexp": f"feed_forward.shared_expert.{name}" for place, name in names.items()},
        {"ffn_gate_inp": "feed_forward.router"},
    )
    num_experts = metadata.integer("expert_count")
    fields = {
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "intermediate_size_mlp": metadata.integer("feed_forward_length"),
        "num_local_experts": num_experts,
        "num_experts_per_tok": chosen(metadata),
        "interleave_moe_layer_step": metadata.integer("interleave_moe_layer_step", 1),
        "use_qk_norm": num_experts != _EXPERTS_OF_MAVERICK,
    }
    return Family("Llama4ForCausalLM", Layout(places), fields)


def qwen2_moe(metadata: Metadata) -> Family:
    """Qwen2, with experts."""
    places = usual(EXPERTS, shared("mlp.shared_expert."), {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"})
    fields = _experts(metadata) | {
        "shared_expert_intermediate_size": metadata.integer(
            "expert_shared_feed_forward_length", metadata.integer("feed_forward_length")
        ),
        "norm_topk_prob": False,
        "qkv_bias": metadata.has_tensor("blk.0.attn_q.bias"),
    }
    return Family("Qwen2MoeForCausalLM", Layout(places, orders={"ffn_gate_inp_shexp": as_matrix}), fields)


def qwen3_moe(metadata: Metadata) -> Family:
    """Qwen3 and Qwen3-VL, with experts."""
    return Family(
        "Qwen3MoeForCausalLM", Layout(usual(EXPERTS, QK_NORMS)), _experts(metadata) | {"norm_topk_prob": True}
    )


def olmoe(metadata: Metadata) -> Family:
    """OLMoE."""
    fields = {"num_experts": metadata.integer("expert_count"), "num_experts_per_tok": chosen(metadata)}
    return Family("OlmoeForCausalLM", Layout(usual(EXPERTS, QK_NORMS)), fields | {"norm_topk_prob": False})


def gpt_oss(metadata: Metadata) -> Family:
    """gpt-oss."""
    places = usual(
        {
            "attn_sinks": "self_attn.sinks",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        }
    )
    fields = {
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": chosen(metadata),
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "rope_parameters": metadata.rope() | {"truncate": False},
    }
    joined = {
        ("ffn_gate_exps", "ffn_up_exps"): Joined("mlp.experts.gate_up_proj", side_by_side, is_stack=True),
        ("ffn_down_exps",): Joined("mlp.experts.down_proj", alone, is_stack=True),
    }
    return Family("GptOssForCausalLM", Layout(places, joined=joined), fields | windows(metadata, every=2))


def deepseek(metadata: Metadata) -> Family:
    """V3 has sigmoid scores and a correction of them; a file that does not say is of V2."""
    rotary = metadata.integer("rope.dimension_count")
    key_dim, value_dim = (
        metadata.integer(f"attention.{width}_mla", metadata.integer(f"attention.{width}"))
        for width in ("key_length", "value_length")
    )
    groups = metadata.integer("expert_group_count", 1, low=0) or 1
    scoring = metadata.integer("expert_gating_func", 1, low=0)
    if scoring not in (0, 1, 2):
        raise metadata.refuse("expert_gating_func", "1 (softmax), 2 (sigmoid)")
    fields: dict[str, object] = {
        "head_dim": None,
        "num_key_value_heads": metadata.num_heads,
        "q_lora_rank": metadata.integer("attention.q_lora_rank", 0, low=0) or None,
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key_dim - rotary,
        "v_head_dim": value_dim,
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0, low=0),
        "n_routed_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": chosen(metadata),
        "n_shared_experts": metadata.integer("expert_shared_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(metadata.value("expert_weights_norm", False)),
        "n_group": groups,
        "topk_group": metadata.integer("expert_group_used_count", 1, low=0) or 1,
        "rope_parameters": _deepseek_rope(metadata),
    }
    places = usual(DENSE, EXPERTS, shared("mlp.shared_experts."), LATENT)
    parts = ("attn_k_b", "attn_v_b")
    # Some files have both forms.
    layout = (
        {"ignored": frozenset(parts)}
        if metadata.has_tensor("blk.0.attn_kv_b.weight")
        else {"joined": {parts: Joined("self_attn.kv_b_proj", keys_and_values, is_wide=True)}}
    )
    if scoring == 2:
        places["exp_probs_b"] = "mlp.gate.e_score_correction_bias"
        return Family("DeepseekV3ForCausalLM", Layout(places, **layout), fields)
    fields["topk_method"] = "greedy" if groups == 1 else "group_limited_greedy"
    return Family("DeepseekV2ForCausalLM", Layout(places, **layout), fields)


def _deepseek_rope(metadata: Metadata) -> dict[str, object]:
    """The multiplier is a tenth of ``mscale_all_dim``, which is ``mscale`` too."""
    rope = metadata.rope()
    if rope["rope_type"] == "yarn" and "rope.scaling.yarn_log_multiplier" in metadata:
        scale = round(metadata.number("rope.scaling.yarn_log_multiplier") * 10, 6)
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    return rope


def mistral3(metadata: Metadata) -> Family:
    """Ministral 3 has a temperature. Its factors of yarn are equal, so attention has none."""
    layout = Layout(usual(DENSE), orders=turned(metadata))
    if not metadata.value("attention.temperature_scale", 0.0):
        return Family("MistralForCausalLM", layout, {"sliding_window": None})
    metadata.refuse_unless("rope.scaling.type", "yarn")
    metadata.value("rope.scaling.yarn_log_multiplier", 0.0)
    beta = metadata.number("attention.temperature_scale")
    rope = metadata.rope() | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": beta}
    return Family("Ministral3ForCausalLM", layout, {"rope_parameters": rope, "sliding_window": None})


def granite_moe(metadata: Metadata) -> Family:
    """A tensor for each matrix of an expert, unlike checkpoints, for blocks of gates and ups may be of two kinds."""
    experts = {"ffn_gate_inp": "block_sparse_moe.router.layer"} | by_expert("block_sparse_moe.experts")
    layout = Layout(usual(experts, shared("shared_mlp.")), orders=turned(metadata))
    fields = {
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": chosen(metadata),
        "shared_intermediate_size": metadata.integer("expert_shared_feed_forward_length", 0, low=0),
    }
    return Family("GraniteMoeSharedForCausalLM", layout, fields | rotated_granite(metadata))


def ernie_moe(metadata: Metadata) -> Family:
    """ERNIE 4.5, with experts."""
    correction = {"exp_probs_b": "mlp.moe_statics.e_score_correction_bias"}
    layout = Layout(usual(DENSE, EXPERTS, shared("mlp.shared_experts."), correction), orders={"exp_probs_b": as_matrix})
    inner, num_shared = (
        metadata.integer("expert_feed_forward_length"),
        metadata.integer("expert_shared_count", 0, low=0),
    )
    metadata.refuse_unless("expert_shared_feed_forward_length", inner * num_shared)
    fields = {
        "moe_num_experts": metadata.integer("expert_count"),
        "moe_k": chosen(metadata),
        "moe_intermediate_size": inner,
        "moe_num_shared_experts": num_shared,
        "moe_layer_start_index": metadata.integer("leading_dense_block_count", 0, low=0),
        "moe_layer_interval": metadata.integer("interleave_moe_layer_step", 1),
    }
    return Family("Ernie4_5_MoeForCausalLM", layout, fields)


def hunyuan_moe(metadata: Metadata) -> Family:
    """Hunyuan, with experts."""
    places = usual(EXPERTS, shared("mlp.shared_mlp."), HUNYUAN_NORMS, {"ffn_gate_inp": "mlp.gate.wg"})
    fields = {
        "num_experts": metadata.integer("expert_count"),
        "moe_topk": chosen(metadata),
        "intermediate_size": metadata.integer("expert_shared_feed_forward_length"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "num_shared_expert": metadata.integer("expert_shared_count"),
    }
    return Family("HunYuanMoEV1ForCausalLM", Layout(places), fields)


def glm4_moe(metadata: Metadata) -> Family:
    """GLM 4.5 and later."""
    fields = _corrected(metadata) | {
        "rope_parameters": partly(metadata),
        "use_qk_norm": metadata.has_tensor("blk.0.attn_q_norm.weight"),
    }
    norm = {"post_attention_norm": "post_attention_layernorm"}
    layout = Layout(_corrected_places(QK_NORMS, norm), num_layers=metadata.read_layers)
    return Family("Glm4MoeForCausalLM", layout, fields)


def dots1(metadata: Metadata) -> Family:
    """dots.llm1."""
    fields = _corrected(metadata) | {"sliding_window": None}
    return Family("Dots1ForCausalLM", Layout(_corrected_places(QK_NORMS)), fields)


def _corrected(metadata: Metadata) -> dict[str, object]:
    """Of mixtures whose experts are those of DeepSeek V3."""
    if metadata.integer("expert_gating_func", 2, low=0) not in (0, 2):
        raise metadata.refuse("expert_gating_func", "2 (sigmoid)")
    return {
        "num_hidden_layers": metadata.read_layers,
        "num_nextn_predict_layers": 0,
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0, low=0),
        "n_routed_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": chosen(metadata),
        "n_shared_experts": metadata.integer("expert_shared_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(metadata.value("expert_weights_norm", False)),
    }


def _corrected_places(*more: Mapping[str, str]) -> dict[str, str]:
    correction = {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
    return usual(DENSE, EXPERTS, shared("mlp.shared_experts."), correction, *more)


def minimax_m2(metadata: Metadata) -> Family:
    """MiniMax M2."""
    if metadata.integer("expert_gating_func", 2, low=0) not in (0, 2):
        raise metadata.refuse("expert_gating_func", "2 (sigmoid)")
    places = usual(_SPARSE_BLOCK, QK_NORMS, {"exp_probs_b": "block_sparse_moe.e_score_correction_bias"})
    fields = {
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": chosen(metadata),
        "intermediate_size": metadata.integer("expert_feed_forward_length", metadata.integer("feed_forward_length")),
        "rope_parameters": partly(metadata),
    }
    return Family("MiniMaxM2ForCausalLM", Layout(places), fields)


def mimo2(metadata: Metadata) -> Family:
    """A file says neither the factor on values nor which layers have experts, and its windows leave out the token itself."""
    near = metadata.value("attention.sliding_window_pattern")
    if not isinstance(near, list) or len(near) != metadata.num_layers:
        raise metadata.refuse("attention.sliding_window_pattern", f"a list of {metadata.num_layers}")
    counts = [count // 2 if is_near else count for count, is_near in zip(metadata.kv_heads, near, strict=True)]
    if len({*counts}) != 1:
        raise metadata.refuse("attention.head_count_kv", "twice as many heads in layers with windows as in others")
    if metadata.integer("expert_gating_func", 2, low=0) not in (0, 2):
        raise metadata.refuse("expert_gating_func", "2 (sigmoid)")
    rotary = metadata.integer("rope.dimension_count")
    ropes = {
        kind: {"rope_type": "default", "rope_theta": metadata.number(key)} | partial(metadata, rotary)
        for kind, key in (("full_attention", "rope.freq_base"), ("sliding_attention", "rope.freq_base_swa"))
    }
    metadata.refuse_unless("rope.scaling.type", "none")
    sparse = [metadata.has_tensor(f"blk.{index}.ffn_gate_inp.weight") for index in range(metadata.num_layers)]
    fields = {
        "num_key_value_heads": counts[0],
        "v_head_dim": metadata.integer("attention.value_length"),
        "attention_value_scale": metadata.number("attention.value_scale", 0.707),
        "sliding_window": metadata.integer("attention.sliding_window") + 1,
        "layer_types": ["sliding_attention" if is_near else "full_attention" for is_near in near],
        "mlp_layer_types": ["sparse" if is_sparse else "dense" for is_sparse in sparse],
        "rope_parameters": ropes,
        "n_routed_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": chosen(metadata),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
    }
    sinks = {"attn_sinks": "self_attn.attention_sink_bias"}
    return Family("MiMoV2FlashForCausalLM", Layout(_corrected_places(sinks)), fields)


def dbrx(metadata: Metadata) -> Family:
    """DBRX. A tensor for each matrix of an expert, unlike checkpoints."""
    if not math.isclose(metadata.number(LAYER), _DBRX_EPS, rel_tol=1e-6):
        raise metadata.refuse(LAYER, f"{_DBRX_EPS:g}")
    layout = Layout(
        {
            "attn_norm": "norm_attn_norm.norm_1",
            "attn_output_norm": "norm_attn_norm.norm_2",
            "attn_qkv": "norm_attn_norm.attn.Wqkv",
            "attn_output": "norm_attn_norm.attn.out_proj",
            "ffn_gate_inp": "ffn.router.layer",
        }
        | by_expert("ffn.experts", ("w1", "v1", "w2")),
        outside={"token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head"},
        layer="transformer.blocks.{}.",
    )
    clip = metadata.value("attention.clamp_kqv", 0.0) or None
    fields = {
        "head_dim": None,
        "attn_config": {"kv_n_heads": metadata.num_kv_heads, "clip_qkv": clip},
        "ffn_config": {
            "ffn_hidden_size": metadata.inner_size,
            "moe_num_experts": metadata.integer("expert_count"),
            "moe_top_k": chosen(metadata),
        },
    }
    return Family("DbrxForCausalLM", layout, fields, eps=("layer_norm_eps", LAYER))


def _experts(metadata: Metadata) -> dict[str, object]:
    return {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": chosen(metadata),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
    }
