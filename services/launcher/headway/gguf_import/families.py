"""The architectures of GGUF files: the fields of config.json that each has, and where its tensors stand.

Owns: one function for each. Must not know: what most of them share, files.

Metadata is what llama.cpp's converter writes (``conversion/*.py`` of ggml-org/llama.cpp). What a file does not say is what
llama.cpp takes for it (``src/models/*.cpp``), which is what the published models have.
"""

import math
from collections.abc import Callable, Mapping

from headway.gguf_import.family import LAYER, RMS, Family, granite_factors
from headway.gguf_import.family import chosen as _chosen
from headway.gguf_import.family import partial as _partial
from headway.gguf_import.family import partly as _partly
from headway.gguf_import.family import turned as _turned
from headway.gguf_import.layout import (
    DENSE,
    EXPERTS,
    QK_NORMS,
    Joined,
    Layout,
    alone,
    as_matrix,
    by_expert,
    by_head,
    keys_and_values,
    shared,
    side_by_side,
    usual,
)
from headway.gguf_import.metadata import Metadata
from headway.gguf_import.older import bloom, falcon, gpt2, mpt, starcoder
from headway.gguf_import.states import granite_hybrid, qwen3_5, qwen3_next

_WIDE_RANGE = "bfloat16"
"""The hidden states of Gemma grow beyond float16."""
_EXPERTS_OF_MAVERICK = 128
"""Of the model that does not normalise queries and keys."""
_OLMO_EPS = 1e-5


def _llama(metadata: Metadata) -> Family:
    if metadata.integer("expert_count", 0, low=0):
        return _mixtral(metadata)
    has_bias = metadata.has_tensor("blk.0.ffn_up.bias")
    return Family("LlamaForCausalLM", Layout(usual(DENSE), orders=_turned(metadata)), {"mlp_bias": has_bias})


_SPARSE_BLOCK = {"ffn_gate_inp": "block_sparse_moe.gate"} | by_expert("block_sparse_moe.experts", ("w1", "w3", "w2"))
"""Experts as Mixtral has them."""


def _mixtral(metadata: Metadata) -> Family:
    places = usual(_SPARSE_BLOCK)
    fields = {"num_local_experts": metadata.integer("expert_count"), "num_experts_per_tok": _chosen(metadata)}
    return Family("MixtralForCausalLM", Layout(places, orders=_turned(metadata)), fields | {"sliding_window": None})


def _lfm2(metadata: Metadata) -> Family:
    """A layer without heads of keys has a convolution."""
    names = {"gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2"}
    places = usual(
        {f"ffn_{kind}": name for kind, name in names.items()},
        by_expert("feed_forward.experts", ("w1", "w3", "w2")),
        {
            "ffn_gate_inp": "feed_forward.gate",
            "exp_probs_b": "feed_forward.expert_bias",
            "attn_norm": "operator_norm",
            "ffn_norm": "ffn_norm",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "shortconv.conv": "conv.conv",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
        },
    )
    norm = "model.embedding_norm"
    layout = Layout(
        places,
        outside={"token_embd": "model.embed_tokens", "token_embd_norm": norm, "output_norm": norm, "output": "lm_head"},
        orders={"shortconv.conv": lambda rows: rows.unsqueeze(1)},
        bare=frozenset({"feed_forward.expert_bias"}),
    )
    fields = {
        "layer_types": ["full_attention" if heads else "conv" for heads in metadata.kv_heads],
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }
    if not metadata.integer("expert_count", 0, low=0):
        return Family("Lfm2ForCausalLM", layout, fields, ("norm_eps", RMS))
    metadata.refuse_unless("expert_gating_func", 2)
    fields |= {
        "num_dense_layers": metadata.integer("leading_dense_block_count", 0, low=0),
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": _chosen(metadata),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
    }
    return Family("Lfm2MoeForCausalLM", layout, fields, ("norm_eps", RMS))


def _llama4(metadata: Metadata) -> Family:
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
        "num_experts_per_tok": _chosen(metadata),
        "interleave_moe_layer_step": metadata.integer("interleave_moe_layer_step", 1),
        "use_qk_norm": num_experts != _EXPERTS_OF_MAVERICK,
    }
    return Family("Llama4ForCausalLM", Layout(places), fields)


def _qwen2(metadata: Metadata) -> Family:
    del metadata
    return Family("Qwen2ForCausalLM", Layout(usual(DENSE)))


def _qwen3(metadata: Metadata) -> Family:
    del metadata
    return Family("Qwen3ForCausalLM", Layout(usual(DENSE, QK_NORMS)))


def _qwen2_moe(metadata: Metadata) -> Family:
    places = usual(EXPERTS, shared("mlp.shared_expert."), {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"})
    fields = _experts(metadata) | {
        "shared_expert_intermediate_size": metadata.integer(
            "expert_shared_feed_forward_length", metadata.integer("feed_forward_length")
        ),
        "norm_topk_prob": False,
        "qkv_bias": metadata.has_tensor("blk.0.attn_q.bias"),
    }
    return Family("Qwen2MoeForCausalLM", Layout(places, orders={"ffn_gate_inp_shexp": as_matrix}), fields)


def _qwen3_moe(metadata: Metadata) -> Family:
    return Family(
        "Qwen3MoeForCausalLM", Layout(usual(EXPERTS, QK_NORMS)), _experts(metadata) | {"norm_topk_prob": True}
    )


def _olmoe(metadata: Metadata) -> Family:
    fields = {"num_experts": metadata.integer("expert_count"), "num_experts_per_tok": _chosen(metadata)}
    return Family("OlmoeForCausalLM", Layout(usual(EXPERTS, QK_NORMS)), fields | {"norm_topk_prob": False})


def _gpt_oss(metadata: Metadata) -> Family:
    places = usual(
        {
            "attn_sinks": "self_attn.sinks",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        }
    )
    fields = {
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": _chosen(metadata),
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "rope_parameters": metadata.rope() | {"truncate": False},
    }
    joined = {
        ("ffn_gate_exps", "ffn_up_exps"): Joined("mlp.experts.gate_up_proj", side_by_side, is_stack=True),
        ("ffn_down_exps",): Joined("mlp.experts.down_proj", alone, is_stack=True),
    }
    return Family("GptOssForCausalLM", Layout(places, joined=joined), fields | _windows(metadata, every=2))


def _deepseek(metadata: Metadata) -> Family:
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
        "num_experts_per_tok": _chosen(metadata),
        "n_shared_experts": metadata.integer("expert_shared_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(metadata.value("expert_weights_norm", False)),
        "n_group": groups,
        "topk_group": metadata.integer("expert_group_used_count", 1, low=0) or 1,
        "rope_parameters": _deepseek_rope(metadata),
    }
    places = usual(
        DENSE,
        EXPERTS,
        shared("mlp.shared_experts."),
        {
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
        },
    )
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


def _mistral3(metadata: Metadata) -> Family:
    """Ministral 3 has a temperature. Its factors of yarn are equal, so attention has none."""
    layout = Layout(usual(DENSE), orders=_turned(metadata))
    if not metadata.value("attention.temperature_scale", 0.0):
        return Family("MistralForCausalLM", layout, {"sliding_window": None})
    metadata.refuse_unless("rope.scaling.type", "yarn")
    metadata.value("rope.scaling.yarn_log_multiplier", 0.0)
    beta = metadata.number("attention.temperature_scale")
    rope = metadata.rope() | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": beta}
    return Family("Ministral3ForCausalLM", layout, {"rope_parameters": rope, "sliding_window": None})


def _gemma(metadata: Metadata) -> Family:
    del metadata
    return Family("GemmaForCausalLM", Layout(usual(DENSE), norm_offset=1.0), {"dtype": _WIDE_RANGE})


def _gemma2(metadata: Metadata) -> Family:
    fields = {
        "dtype": _WIDE_RANGE,
        "query_pre_attn_scalar": _query_scalar(metadata, layers_of_27b=46),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }
    return Family("Gemma2ForCausalLM", _gemma_layout(), fields | _windows(metadata, every=2, default=4096))


def _gemma3(metadata: Metadata) -> Family:
    near = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 10_000.0)}
    fields = {
        "dtype": _WIDE_RANGE,
        "query_pre_attn_scalar": _query_scalar(metadata, layers_of_27b=62),
        "rope_parameters": {"full_attention": metadata.rope(), "sliding_attention": near},
    }
    return Family("Gemma3ForCausalLM", _gemma_layout(), fields | _windows(metadata, every=6))


def _gemma_layout() -> Layout:
    behind = {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    return Layout(usual(DENSE, QK_NORMS, behind), norm_offset=1.0)


def _query_scalar(metadata: Metadata, *, layers_of_27b: int) -> int:
    """A file does not say it; only the model of 27B has another one than the width of a head."""
    if metadata.num_layers == layers_of_27b:
        return metadata.integer("embedding_length") // metadata.num_heads
    return metadata.head_dim


def _phi3(metadata: Metadata) -> Family:
    rotary = metadata.integer("rope.dimension_count", metadata.head_dim)
    rope = _long_rope(metadata) or metadata.rope()
    places = usual({"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"})
    fields = {
        "rope_parameters": rope | _partial(metadata, rotary),
        "sliding_window": metadata.integer("attention.sliding_window", 0, low=0) or None,
    }
    ignored = frozenset({"rope_factors_long", "rope_factors_short"})
    return Family("Phi3ForCausalLM", Layout(places, ignored=ignored), fields)


def _long_rope(metadata: Metadata) -> dict[str, object] | None:
    names = [f"rope_factors_{kind}.weight" for kind in ("short", "long")]
    if not all(map(metadata.has_tensor, names)):
        return None
    short, long = (metadata.file.floats(name).tolist() for name in names)
    rope = {
        "rope_type": "longrope",
        "rope_theta": metadata.number("rope.freq_base", 10_000.0),
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": metadata.integer("rope.scaling.original_context_length"),
    }
    metadata.refuse_unless("rope.scaling.type", "longrope")
    if "rope.scaling.attn_factor" in metadata:
        rope["attention_factor"] = metadata.number("rope.scaling.attn_factor")
    return rope


def _olmo(metadata: Metadata) -> Family:
    if not math.isclose(metadata.number(LAYER), _OLMO_EPS, rel_tol=1e-6):
        raise metadata.refuse(LAYER, f"{_OLMO_EPS:g}")
    places = _without(usual(DENSE), "attn_norm", "ffn_norm")
    layout = Layout(places, orders=_turned(metadata))
    return Family("OlmoForCausalLM", layout, {"clip_qkv": None}, eps=("layer_norm_eps", LAYER))


def _olmo2(metadata: Metadata) -> Family:
    """With a window it is OLMo 3."""
    layout = Layout(_norms_behind())
    if not metadata.integer("attention.sliding_window", 0, low=0):
        return Family("Olmo2ForCausalLM", layout)
    theta = metadata.number("rope.freq_base_swa", metadata.number("rope.freq_base", 10_000.0))
    near = {"rope_type": "default", "rope_theta": theta}
    fields = {"rope_parameters": {"full_attention": metadata.rope(), "sliding_attention": near}}
    return Family("Olmo3ForCausalLM", layout, fields | _windows(metadata, every=4))


def _exaone4(metadata: Metadata) -> Family:
    return Family("Exaone4ForCausalLM", Layout(_norms_behind()), _windows(metadata, every=4))


def _norms_behind() -> dict[str, str]:
    behind = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
    return _without(usual(DENSE, QK_NORMS, behind), "attn_norm", "ffn_norm")


def _without(places: Mapping[str, str], *absent: str) -> dict[str, str]:
    return {place: name for place, name in places.items() if place not in absent}


def _granite(metadata: Metadata) -> Family:
    has_bias = metadata.has_tensor("blk.0.ffn_up.bias")
    return Family(
        "GraniteForCausalLM",
        Layout(usual(DENSE), orders=_turned(metadata)),
        _granite_factors(metadata) | {"mlp_bias": has_bias},
    )


def _granite_moe(metadata: Metadata) -> Family:
    """A tensor for each matrix of an expert, unlike checkpoints, for blocks of gates and ups may be of two kinds."""
    experts = {"ffn_gate_inp": "block_sparse_moe.router.layer"} | by_expert("block_sparse_moe.experts")
    layout = Layout(usual(experts, shared("shared_mlp.")), orders=_turned(metadata))
    fields = {
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": _chosen(metadata),
        "shared_intermediate_size": metadata.integer("expert_shared_feed_forward_length", 0, low=0),
    }
    return Family("GraniteMoeSharedForCausalLM", layout, fields | _granite_factors(metadata))


def _granite_factors(metadata: Metadata) -> dict[str, object]:
    metadata.refuse_unless("rope.scaling.finetuned", allowed=True)
    return granite_factors(metadata)


def _arcee(metadata: Metadata) -> Family:
    places = _without(usual(DENSE), "ffn_gate")
    has_bias = metadata.has_tensor("blk.0.ffn_up.bias")
    return Family("ArceeForCausalLM", Layout(places, orders=_turned(metadata)), {"mlp_bias": has_bias})


def _seed_oss(metadata: Metadata) -> Family:
    del metadata
    return Family("SeedOssForCausalLM", Layout(usual(DENSE, {"post_attention_norm": "post_attention_layernorm"})))


def _ernie(metadata: Metadata) -> Family:
    has_bias = metadata.has_tensor("blk.0.attn_q.bias")
    return Family("Ernie4_5ForCausalLM", Layout(usual(DENSE)), {"use_bias": has_bias})


def _ernie_moe(metadata: Metadata) -> Family:
    correction = {"exp_probs_b": "mlp.moe_statics.e_score_correction_bias"}
    layout = Layout(usual(DENSE, EXPERTS, shared("mlp.shared_experts."), correction), orders={"exp_probs_b": as_matrix})
    inner, num_shared = (
        metadata.integer("expert_feed_forward_length"),
        metadata.integer("expert_shared_count", 0, low=0),
    )
    metadata.refuse_unless("expert_shared_feed_forward_length", inner * num_shared)
    fields = {
        "moe_num_experts": metadata.integer("expert_count"),
        "moe_k": _chosen(metadata),
        "moe_intermediate_size": inner,
        "moe_num_shared_experts": num_shared,
        "moe_layer_start_index": metadata.integer("leading_dense_block_count", 0, low=0),
        "moe_layer_interval": metadata.integer("interleave_moe_layer_step", 1),
    }
    return Family("Ernie4_5_MoeForCausalLM", layout, fields)


_HUNYUAN_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}


def _hunyuan(metadata: Metadata) -> Family:
    del metadata
    return Family("HunYuanDenseV1ForCausalLM", Layout(usual(DENSE, _HUNYUAN_NORMS)))


def _hunyuan_moe(metadata: Metadata) -> Family:
    places = usual(EXPERTS, shared("mlp.shared_mlp."), _HUNYUAN_NORMS, {"ffn_gate_inp": "mlp.gate.wg"})
    fields = {
        "num_experts": metadata.integer("expert_count"),
        "moe_topk": _chosen(metadata),
        "intermediate_size": metadata.integer("expert_shared_feed_forward_length"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "num_shared_expert": metadata.integer("expert_shared_count"),
    }
    return Family("HunYuanMoEV1ForCausalLM", Layout(places), fields)


def _glm4(metadata: Metadata) -> Family:
    places = {
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    }
    return Family("Glm4ForCausalLM", Layout(usual(places)), {"rope_parameters": _partly(metadata)})


def _glm4_moe(metadata: Metadata) -> Family:
    fields = _corrected(metadata) | {
        "rope_parameters": _partly(metadata),
        "use_qk_norm": metadata.has_tensor("blk.0.attn_q_norm.weight"),
    }
    norm = {"post_attention_norm": "post_attention_layernorm"}
    layout = Layout(_corrected_places(QK_NORMS, norm), num_layers=metadata.read_layers)
    return Family("Glm4MoeForCausalLM", layout, fields)


def _dots1(metadata: Metadata) -> Family:
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
        "num_experts_per_tok": _chosen(metadata),
        "n_shared_experts": metadata.integer("expert_shared_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(metadata.value("expert_weights_norm", False)),
    }


def _corrected_places(*more: Mapping[str, str]) -> dict[str, str]:
    correction = {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
    return usual(DENSE, EXPERTS, shared("mlp.shared_experts."), correction, *more)


def _minimax_m2(metadata: Metadata) -> Family:
    if metadata.integer("expert_gating_func", 2, low=0) not in (0, 2):
        raise metadata.refuse("expert_gating_func", "2 (sigmoid)")
    places = usual(_SPARSE_BLOCK, QK_NORMS, {"exp_probs_b": "block_sparse_moe.e_score_correction_bias"})
    fields = {
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": _chosen(metadata),
        "intermediate_size": metadata.integer("expert_feed_forward_length", metadata.integer("feed_forward_length")),
        "rope_parameters": _partly(metadata),
    }
    return Family("MiniMaxM2ForCausalLM", Layout(places), fields)


def _phi2(metadata: Metadata) -> Family:
    outside = {"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"}
    places = {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
    layout = Layout(_without(usual(places), "ffn_norm"), outside=outside)
    fields = {"rope_parameters": _partly(metadata)}
    return Family("PhiForCausalLM", layout, fields, eps=("layer_norm_eps", LAYER))


def _stablelm(metadata: Metadata) -> Family:
    """llama.cpp goes by the norm, too: without one before the feed-forward, that stands beside attention."""
    fields = {
        "head_dim": None,
        "use_qkv_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "use_parallel_residual": not metadata.has_tensor("blk.0.ffn_norm.weight"),
        "rope_parameters": _partly(metadata),
    }
    return Family("StableLmForCausalLM", Layout(usual(DENSE)), fields, eps=("layer_norm_eps", LAYER))


def _nemotron(metadata: Metadata) -> Family:
    layout = Layout(_without(usual(DENSE), "ffn_gate"), norm_offset=1.0)
    fields = {"mlp_bias": metadata.has_tensor("blk.0.ffn_up.bias"), "rope_parameters": _partly(metadata)}
    return Family("NemotronForCausalLM", layout, fields, eps=("norm_eps", LAYER))


def _smollm3(metadata: Metadata) -> Family:
    return Family("SmolLM3ForCausalLM", Layout(usual(DENSE), orders=_turned(metadata)), {"no_rope_layer_interval": 4})


def _starcoder2(metadata: Metadata) -> Family:
    places = usual({"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"})
    fields = {"use_bias": metadata.has_tensor("blk.0.attn_q.bias"), "sliding_window": None}
    return Family("Starcoder2ForCausalLM", Layout(places), fields, eps=("norm_epsilon", LAYER))


def _gpt_neox(metadata: Metadata) -> Family:
    layout = Layout(
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        outside={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        layer="gpt_neox.layers.{}.",
        orders={"attn_qkv": by_head(metadata.num_heads)},
    )
    fields = {
        "head_dim": None,
        "attention_bias": metadata.has_tensor("blk.0.attn_qkv.bias"),
        "use_parallel_residual": bool(metadata.value("use_parallel_residual")),
        "rope_parameters": _partly(metadata),
    }
    return Family("GPTNeoXForCausalLM", layout, fields, eps=("layer_norm_eps", LAYER))


def _cohere(metadata: Metadata) -> Family:
    layout = Layout(_without(usual(DENSE, QK_NORMS), "ffn_norm"))
    has_norms = metadata.has_tensor("blk.0.attn_q_norm.weight")
    fields = {"logit_scale": metadata.number("logit_scale"), "use_qk_norm": has_norms}
    return Family("CohereForCausalLM", layout, fields, eps=("layer_norm_eps", LAYER))


def _cohere2(metadata: Metadata) -> Family:
    places = _without(usual(DENSE), "ffn_norm")
    fields = {"logit_scale": metadata.number("logit_scale")} | _windows(metadata, every=4)
    return Family("Cohere2ForCausalLM", Layout(places), fields, eps=("layer_norm_eps", LAYER))


def _experts(metadata: Metadata) -> dict[str, object]:
    return {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": _chosen(metadata),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
    }


def _windows(metadata: Metadata, *, every: int, default: int = 0) -> dict[str, object]:
    """Of ``every`` so many layers the last one has no window, or as a list says."""
    window = metadata.integer("attention.sliding_window", default, low=0)
    pattern = metadata.value("attention.sliding_window_pattern", every)
    if isinstance(pattern, int):
        pattern = [bool((index + 1) % pattern) if pattern else True for index in range(metadata.num_layers)]
    kinds = ["sliding_attention" if window and is_near else "full_attention" for is_near in pattern]
    return {"sliding_window": window or None, "layer_types": kinds}


FAMILIES: Mapping[str, Callable[[Metadata], Family]] = {
    "arcee": _arcee,
    "bloom": bloom,
    "cohere2": _cohere2,
    "command-r": _cohere,
    "deepseek2": _deepseek,
    "dots1": _dots1,
    "ernie4_5": _ernie,
    "ernie4_5-moe": _ernie_moe,
    "exaone4": _exaone4,
    "falcon": falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "glm4": _glm4,
    "glm4moe": _glm4_moe,
    "gpt-oss": _gpt_oss,
    "gpt2": gpt2,
    "gptneox": _gpt_neox,
    "granite": _granite,
    "granitehybrid": granite_hybrid,
    "granitemoe": _granite_moe,
    "hunyuan-dense": _hunyuan,
    "hunyuan-moe": _hunyuan_moe,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "llama": _llama,
    "llama4": _llama4,
    "minimax-m2": _minimax_m2,
    "mistral3": _mistral3,
    "mpt": mpt,
    "nemotron": _nemotron,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "phi2": _phi2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2_moe,
    "qwen2vl": _qwen2,
    "qwen3": _qwen3,
    "qwen35": qwen3_5,
    "qwen35moe": qwen3_5,
    "qwen3moe": _qwen3_moe,
    "qwen3next": qwen3_next,
    "qwen3vl": _qwen3,
    "qwen3vlmoe": _qwen3_moe,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder": starcoder,
    "starcoder2": _starcoder2,
}
"""By ``general.architecture``. Positions of Qwen-VL are three numbers, which in a text are the same."""
