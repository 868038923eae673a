"""Architectures of GGUF files without experts: the fields of config.json that each has, and where its tensors stand.

Owns: one function for each. Must not know: what most of them share, files.

Metadata is what llama.cpp's converter writes (``conversion/*.py`` of ggml-org/llama.cpp). What a file does not say is what
llama.cpp takes for it (``src/models/*.cpp``), which is what the published models have.
"""

import math
from collections.abc import Mapping

from headway.gguf_import.family import (
    HUNYUAN_NORMS,
    LAYER,
    RMS,
    Family,
    chosen,
    partial,
    partly,
    rotated_granite,
    turned,
    windows,
)
from headway.gguf_import.layout import DENSE, LATENT, QK_NORMS, Layout, by_expert, by_head, usual
from headway.gguf_import.metadata import Metadata
from headway.gguf_import.mixtures import mixtral

_WIDE_RANGE = "bfloat16"
"""The hidden states of Gemma grow beyond float16."""
_OLMO_EPS = 1e-5
_LONG_FACTORS = frozenset({"rope_factors_long", "rope_factors_short"})


def llama(metadata: Metadata) -> Family:
    """Llama, or Mixtral under its name."""
    if metadata.integer("expert_count", 0, low=0):
        return mixtral(metadata)
    has_bias = metadata.has_tensor("blk.0.ffn_up.bias")
    return Family("LlamaForCausalLM", Layout(usual(DENSE), orders=turned(metadata)), {"mlp_bias": has_bias})


def lfm2(metadata: Metadata) -> Family:
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
        "num_experts_per_tok": chosen(metadata),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
    }
    return Family("Lfm2MoeForCausalLM", layout, fields, ("norm_eps", RMS))


def qwen2(metadata: Metadata) -> Family:
    """Qwen2, Qwen2.5 and Qwen2-VL."""
    del metadata
    return Family("Qwen2ForCausalLM", Layout(usual(DENSE)))


def qwen3(metadata: Metadata) -> Family:
    """Qwen3 and Qwen3-VL."""
    del metadata
    return Family("Qwen3ForCausalLM", Layout(usual(DENSE, QK_NORMS)))


def gemma(metadata: Metadata) -> Family:
    """Gemma."""
    del metadata
    return Family("GemmaForCausalLM", Layout(usual(DENSE), norm_offset=1.0), {"dtype": _WIDE_RANGE})


def gemma2(metadata: Metadata) -> Family:
    """Gemma 2."""
    fields = {
        "dtype": _WIDE_RANGE,
        "query_pre_attn_scalar": _query_scalar(metadata, layers_of_27b=46),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }
    return Family("Gemma2ForCausalLM", _gemma_layout(), fields | windows(metadata, every=2, default=4096))


def gemma3(metadata: Metadata) -> Family:
    """Gemma 3."""
    near = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 10_000.0)}
    fields = {
        "dtype": _WIDE_RANGE,
        "query_pre_attn_scalar": _query_scalar(metadata, layers_of_27b=62),
        "rope_parameters": {"full_attention": metadata.rope(), "sliding_attention": near},
    }
    return Family("Gemma3ForCausalLM", _gemma_layout(), fields | windows(metadata, every=6))


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


def phi3(metadata: Metadata) -> Family:
    """Phi-3 and Phi-4."""
    rotary = metadata.integer("rope.dimension_count", metadata.head_dim)
    rope = _long_rope(metadata) or metadata.rope()
    places = usual({"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"})
    fields = {
        "rope_parameters": rope | partial(metadata, rotary),
        "sliding_window": metadata.integer("attention.sliding_window", 0, low=0) or None,
    }
    return Family("Phi3ForCausalLM", Layout(places, ignored=_LONG_FACTORS), fields)


def _long_rope(metadata: Metadata) -> dict[str, object] | None:
    factors = _long_factors(metadata)
    if not factors:
        return None
    rope = factors | {
        "rope_theta": metadata.number("rope.freq_base", 10_000.0),
        "original_max_position_embeddings": metadata.integer("rope.scaling.original_context_length"),
    }
    metadata.refuse_unless("rope.scaling.type", "longrope")
    if "rope.scaling.attn_factor" in metadata:
        rope["attention_factor"] = metadata.number("rope.scaling.attn_factor")
    return rope


def _long_factors(metadata: Metadata) -> dict[str, object]:
    """The kind and factors of longrope, if the file has some."""
    names = [f"{name}.weight" for name in sorted(_LONG_FACTORS, reverse=True)]
    if not all(map(metadata.has_tensor, names)):
        return {}
    short, long = (metadata.file.floats(name).tolist() for name in names)
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long}


def minicpm3(metadata: Metadata) -> Family:
    """A file says neither MiniCPM3's factors nor where its long factors begin, which is behind the context."""
    width, rotary = metadata.integer("embedding_length"), metadata.integer("rope.dimension_count")
    rope, factors = metadata.rope(), _long_factors(metadata)
    if factors:
        rope |= factors | {"original_max_position_embeddings": metadata.integer("context_length")}
    fields: dict[str, object] = {
        "head_dim": None,
        "q_lora_rank": metadata.integer("attention.q_lora_rank", 0, low=0) or None,
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": metadata.integer("attention.key_length") - rotary,
        "v_head_dim": metadata.integer("attention.value_length", width // metadata.num_heads),
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "rope_parameters": rope,
    }
    return Family("MiniCPM3ForCausalLM", Layout(usual(DENSE, LATENT), ignored=_LONG_FACTORS), fields)


def olmo(metadata: Metadata) -> Family:
    """OLMo."""
    if not math.isclose(metadata.number(LAYER), _OLMO_EPS, rel_tol=1e-6):
        raise metadata.refuse(LAYER, f"{_OLMO_EPS:g}")
    places = _without(usual(DENSE), "attn_norm", "ffn_norm")
    layout = Layout(places, orders=turned(metadata))
    return Family("OlmoForCausalLM", layout, {"clip_qkv": None}, eps=("layer_norm_eps", LAYER))


def olmo2(metadata: Metadata) -> Family:
    """With a window it is OLMo 3."""
    layout = Layout(_norms_behind())
    if not metadata.integer("attention.sliding_window", 0, low=0):
        return Family("Olmo2ForCausalLM", layout)
    theta = metadata.number("rope.freq_base_swa", metadata.number("rope.freq_base", 10_000.0))
    near = {"rope_type": "default", "rope_theta": theta}
    fields = {"rope_parameters": {"full_attention": metadata.rope(), "sliding_attention": near}}
    return Family("Olmo3ForCausalLM", layout, fields | windows(metadata, every=4))


def exaone4(metadata: Metadata) -> Family:
    """EXAONE 4."""
    return Family("Exaone4ForCausalLM", Layout(_norms_behind()), windows(metadata, every=4))


def _norms_behind() -> dict[str, str]:
    behind = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
    return _without(usual(DENSE, QK_NORMS, behind), "attn_norm", "ffn_norm")


def _without(places: Mapping[str, str], *absent: str) -> dict[str, str]:
    return {place: name for place, name in places.items() if place not in absent}


def granite(metadata: Metadata) -> Family:
    """Granite."""
    has_bias = metadata.has_tensor("blk.0.ffn_up.bias")
    return Family(
        "GraniteForCausalLM",
        Layout(usual(DENSE), orders=turned(metadata)),
        rotated_granite(metadata) | {"mlp_bias": has_bias},
    )


def arcee(metadata: Metadata) -> Family:
    """Arcee."""
    places = _without(usual(DENSE), "ffn_gate")
    has_bias = metadata.has_tensor("blk.0.ffn_up.bias")
    return Family("ArceeForCausalLM", Layout(places, orders=turned(metadata)), {"mlp_bias": has_bias})


def seed_oss(metadata: Metadata) -> Family:
    """Seed-OSS."""
    del metadata
    return Family("SeedOssForCausalLM", Layout(usual(DENSE, {"post_attention_norm": "post_attention_layernorm"})))


def ernie(metadata: Metadata) -> Family:
    """ERNIE 4.5."""
    has_bias = metadata.has_tensor("blk.0.attn_q.bias")
    return Family("Ernie4_5ForCausalLM", Layout(usual(DENSE)), {"use_bias": has_bias})


def hunyuan(metadata: Metadata) -> Family:
    """Hunyuan."""
    del metadata
    return Family("HunYuanDenseV1ForCausalLM", Layout(usual(DENSE, HUNYUAN_NORMS)))


def glm4(metadata: Metadata) -> Family:
    """GLM 4."""
    places = {
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    }
    return Family("Glm4ForCausalLM", Layout(usual(places)), {"rope_parameters": partly(metadata)})


def phi2(metadata: Metadata) -> Family:
    """Phi-2."""
    outside = {"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"}
    places = {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
    layout = Layout(_without(usual(places), "ffn_norm"), outside=outside)
    fields = {"rope_parameters": partly(metadata)}
    return Family("PhiForCausalLM", layout, fields, eps=("layer_norm_eps", LAYER))


def stablelm(metadata: Metadata) -> Family:
    """llama.cpp goes by the norm, too: without one before the feed-forward, that stands beside attention."""
    fields = {
        "head_dim": None,
        "use_qkv_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "use_parallel_residual": not metadata.has_tensor("blk.0.ffn_norm.weight"),
        "rope_parameters": partly(metadata),
    }
    return Family("StableLmForCausalLM", Layout(usual(DENSE)), fields, eps=("layer_norm_eps", LAYER))


def nemotron(metadata: Metadata) -> Family:
    """Nemotron 4."""
    layout = Layout(_without(usual(DENSE), "ffn_gate"), norm_offset=1.0)
    fields = {"mlp_bias": metadata.has_tensor("blk.0.ffn_up.bias"), "rope_parameters": partly(metadata)}
    return Family("NemotronForCausalLM", layout, fields, eps=("norm_eps", LAYER))


def smollm3(metadata: Metadata) -> Family:
    """SmolLM3."""
    return Family("SmolLM3ForCausalLM", Layout(usual(DENSE), orders=turned(metadata)), {"no_rope_layer_interval": 4})


def starcoder2(metadata: Metadata) -> Family:
    """StarCoder2."""
    places = usual({"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"})
    fields = {"use_bias": metadata.has_tensor("blk.0.attn_q.bias"), "sliding_window": None}
    return Family("Starcoder2ForCausalLM", Layout(places), fields, eps=("norm_epsilon", LAYER))


def gpt_neox(metadata: Metadata) -> Family:
    """GPT-NeoX and Pythia."""
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
        "rope_parameters": partly(metadata),
    }
    return Family("GPTNeoXForCausalLM", layout, fields, eps=("layer_norm_eps", LAYER))


def cohere(metadata: Metadata) -> Family:
    """Command R."""
    layout = Layout(_without(usual(DENSE, QK_NORMS), "ffn_norm"))
    has_norms = metadata.has_tensor("blk.0.attn_q_norm.weight")
    fields = {"logit_scale": metadata.number("logit_scale"), "use_qk_norm": has_norms}
    return Family("CohereForCausalLM", layout, fields, eps=("layer_norm_eps", LAYER))


def cohere2(metadata: Metadata) -> Family:
    """Command R7B and Command A."""
    places = _without(usual(DENSE), "ffn_norm")
    fields = {"logit_scale": metadata.number("logit_scale")} | windows(metadata, every=4)
    return Family("Cohere2ForCausalLM", Layout(places), fields, eps=("layer_norm_eps", LAYER))
