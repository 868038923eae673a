"""The architectures of GGUF files: the fields of config.json that each has, and where its tensors stand.

Owns: one function for each. Must not know: what most of them share, files.

Metadata is what llama.cpp's converter writes (``conversion/*.py`` of ggml-org/llama.cpp). What a file does not say is what
llama.cpp takes for it (``src/models/*.cpp``), which is what the published models have.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from headway.gguf_import.layout import (
    DENSE,
    EXPERTS,
    QK_NORMS,
    Joined,
    Layout,
    Order,
    alone,
    as_matrix,
    by_halves,
    by_head,
    keys_and_values,
    side_by_side,
    usual,
)
from headway.gguf_import.metadata import Metadata

_WIDE_RANGE = "bfloat16"
"""The hidden states of Gemma grow beyond float16."""
_EXPERTS_OF_MAVERICK = 128
"""Of the model that does not normalise queries and keys."""
RMS, LAYER = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"


class Family(NamedTuple):
    """``fields`` win over those that most families share.

    ``eps`` is the name of the norms' epsilon in config.json and its key in the file.
    """

    architecture: str
    layout: Layout
    fields: Mapping[str, object] = {}
    eps: tuple[str, str] = ("rms_norm_eps", RMS)


def _llama(metadata: Metadata) -> Family:
    if metadata.integer("expert_count", 0, low=0):
        return _mixtral(metadata)
    has_bias = metadata.has_tensor("blk.0.ffn_up.bias")
    return Family("LlamaForCausalLM", Layout(usual(DENSE), orders=_turned(metadata)), {"mlp_bias": has_bias})


def _mixtral(metadata: Metadata) -> Family:
    names = {"gate": "w1", "up": "w3", "down": "w2"}
    experts = {f"ffn_{place}_exps": f"block_sparse_moe.experts.{{}}.{name}" for place, name in names.items()}
    places = usual({"ffn_gate_inp": "block_sparse_moe.gate"}, experts)
    fields = {"num_local_experts": metadata.integer("expert_count"), "num_experts_per_tok": _chosen(metadata)}
    return Family("MixtralForCausalLM", Layout(places, orders=_turned(metadata)), fields | {"sliding_window": None})


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
    shared = {f"{place}_shexp": name.replace("mlp.", "mlp.shared_expert.") for place, name in DENSE.items()}
    places = usual(EXPERTS, shared, {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"})
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
        {f"{place}_shexp": name.replace("mlp.", "mlp.shared_experts.") for place, name in DENSE.items()},
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


def _olmo2(metadata: Metadata) -> Family:
    del metadata
    behind = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
    places = usual(DENSE, QK_NORMS, behind)
    return Family(
        "Olmo2ForCausalLM", Layout({place: places[place] for place in places.keys() - {"attn_norm", "ffn_norm"}})
    )


def _granite(metadata: Metadata) -> Family:
    metadata.refuse_unless("rope.scaling.finetuned", allowed=True)
    fields = {
        "mlp_bias": metadata.has_tensor("blk.0.ffn_up.bias"),
        "attention_multiplier": metadata.value("attention.scale", 0.0) or metadata.head_dim**-0.5,
        "embedding_multiplier": metadata.value("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": metadata.value("residual_scale", 0.0) or 1.0,
        "logits_scaling": metadata.number("logit_scale"),
    }
    return Family("GraniteForCausalLM", Layout(usual(DENSE), orders=_turned(metadata)), fields)


def _smollm3(metadata: Metadata) -> Family:
    return Family("SmolLM3ForCausalLM", Layout(usual(DENSE), orders=_turned(metadata)), {"no_rope_layer_interval": 4})


def _starcoder2(metadata: Metadata) -> Family:
    places = usual({"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"})
    fields = {"use_bias": metadata.has_tensor("blk.0.attn_q.bias"), "sliding_window": None}
    return Family("Starcoder2ForCausalLM", Layout(places), fields, eps=("norm_epsilon", LAYER))


def _gpt_neox(metadata: Metadata) -> Family:
    rotary = metadata.integer("rope.dimension_count", metadata.head_dim)
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
        "rope_parameters": metadata.rope() | _partial(metadata, rotary),
    }
    return Family("GPTNeoXForCausalLM", layout, fields, eps=("layer_norm_eps", LAYER))


def _cohere2(metadata: Metadata) -> Family:
    places = {place: name for place, name in usual(DENSE).items() if place != "ffn_norm"}
    fields = {"logit_scale": metadata.number("logit_scale")} | _windows(metadata, every=4)
    return Family("Cohere2ForCausalLM", Layout(places), fields, eps=("layer_norm_eps", LAYER))


def _turned(metadata: Metadata) -> dict[str, Order]:
    return {"attn_q": by_halves(metadata.num_heads), "attn_k": by_halves(metadata.num_kv_heads)}


def _chosen(metadata: Metadata) -> int:
    return metadata.integer("expert_used_count")


def _experts(metadata: Metadata) -> dict[str, object]:
    return {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": _chosen(metadata),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
    }


def _partial(metadata: Metadata, rotary: int) -> dict[str, object]:
    """The share of a head that is rotated; somewhat more, for who reads it rounds the product down."""
    head_dim = metadata.head_dim
    return {"partial_rotary_factor": 1.0 if rotary == head_dim else (rotary + 0.25) / head_dim}


def _windows(metadata: Metadata, *, every: int, default: int = 0) -> dict[str, object]:
    """Of ``every`` so many layers the last one has no window, or as a list says."""
    window = metadata.integer("attention.sliding_window", default, low=0)
    pattern = metadata.value("attention.sliding_window_pattern", every)
    if isinstance(pattern, int):
        pattern = [bool((index + 1) % pattern) if pattern else True for index in range(metadata.num_layers)]
    kinds = ["sliding_attention" if window and is_near else "full_attention" for is_near in pattern]
    return {"sliding_window": window or None, "layer_types": kinds}


FAMILIES: Mapping[str, Callable[[Metadata], Family]] = {
    "cohere2": _cohere2,
    "deepseek2": _deepseek,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "gptneox": _gpt_neox,
    "granite": _granite,
    "llama": _llama,
    "llama4": _llama4,
    "mistral3": _mistral3,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2_moe,
    "qwen2vl": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "qwen3vl": _qwen3,
    "qwen3vlmoe": _qwen3_moe,
    "smollm3": _smollm3,
    "starcoder2": _starcoder2,
}
"""By ``general.architecture``. Positions of Qwen-VL are three numbers, which in a text are the same."""
