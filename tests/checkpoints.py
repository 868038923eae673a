"""Tiny random checkpoints of every supported family, made with transformers, each with a tokenizer.

``make_checkpoint(directory, name)`` writes one; ``FAMILIES`` lists the names, ``FURTHER`` some of them; ``change_head`` makes a tied one's head odd. Weights are drawn with a large standard
deviation, so that the two best logits are rarely close and greedy tokens can be compared exactly.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from texts_alone import MuseGlimmerForCausalLM

VOCAB_SIZE = 320
CONTEXT = 256
EOS_TOKEN = "<|end|>"
SPECIAL_TOKENS = (EOS_TOKEN, "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_CORPUS = (
    "the scheduler decides every step which tokens run",
    "the executor knows rows and tensors, the gateway knows text",
    "a block holds sixteen positions of keys and values",
)


def small_sizes(**changes: object) -> dict[str, object]:
    """Fields that most families have, for a model that takes no time."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.25,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    } | changes


def _rope(kind: str, **fields: object) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": 10_000.0} | fields


def _long_rope(num_pairs: int, **fields: object) -> dict[str, object]:
    return _rope(
        "longrope",
        short_factor=[1.0 + i / 8 for i in range(num_pairs)],
        long_factor=[2.0 + i for i in range(num_pairs)],
        original_max_position_embeddings=CONTEXT,
        **fields,
    )


def _of(model: type[PreTrainedModel], config: type[PreTrainedConfig]) -> Callable[..., PreTrainedModel]:
    # Only the eager attention of transformers has soft caps.
    return lambda **changes: model(config(**({"attn_implementation": "eager"} | small_sizes(**changes))))


_llama = _of(LlamaForCausalLM, LlamaConfig)
_llama4 = _of(Llama4ForCausalLM, Llama4TextConfig)
_mistral = _of(MistralForCausalLM, MistralConfig)
_ministral3 = _of(Ministral3ForCausalLM, Ministral3Config)
_qwen2 = _of(Qwen2ForCausalLM, Qwen2Config)
_qwen3 = _of(Qwen3ForCausalLM, Qwen3Config)
_gemma2 = _of(Gemma2ForCausalLM, Gemma2Config)
_gemma3 = _of(Gemma3ForCausalLM, Gemma3TextConfig)
_phi3 = _of(Phi3ForCausalLM, Phi3Config)
_olmo2 = _of(Olmo2ForCausalLM, Olmo2Config)
_muse_glimmer = _of(MuseGlimmerForCausalLM, transformers.MuseGlimmerTextConfig)
_granite = _of(GraniteForCausalLM, GraniteConfig)
_smollm3 = _of(SmolLM3ForCausalLM, SmolLM3Config)
_starcoder2 = _of(Starcoder2ForCausalLM, Starcoder2Config)
_gpt_neox = _of(GPTNeoXForCausalLM, GPTNeoXConfig)
_cohere2 = _of(Cohere2ForCausalLM, Cohere2Config)


_mixtral = _of(MixtralForCausalLM, MixtralConfig)
_qwen2_moe = _of(Qwen2MoeForCausalLM, Qwen2MoeConfig)
_qwen3_moe = _of(Qwen3MoeForCausalLM, Qwen3MoeConfig)
_olmoe = _of(OlmoeForCausalLM, OlmoeConfig)
_gpt_oss = _of(GptOssForCausalLM, GptOssConfig)
_deepseek_v2 = _of(DeepseekV2ForCausalLM, DeepseekV2Config)
_deepseek_v3 = _of(DeepseekV3ForCausalLM, DeepseekV3Config)


_LLAMA3_ROPE = _rope(
    "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
_LONG_ROPE = _long_rope(3, partial_rotary_factor=0.5)
_GEMMA3_ROPE = {"sliding_attention": _rope("default"), "full_attention": _rope("linear", factor=2.0)}
_YARN_ROPE = _rope("yarn", factor=4.0, original_max_position_embeddings=64)

_MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama2": lambda: _llama(num_key_value_heads=4, num_attention_heads=4),
    "llama3": lambda: _llama(rope_parameters=_LLAMA3_ROPE),
    "llama-tied": lambda: _llama(tie_word_embeddings=True, num_key_value_heads=1, rms_norm_eps=1e-5),
    "llama-linear": lambda: _llama(rope_parameters=_rope("linear", factor=3.0)),
    "llama-dynamic": lambda: _llama(rope_parameters=_rope("dynamic", factor=3.0), max_position_embeddings=80),
    "llama-yarn": lambda: _llama(rope_parameters=_YARN_ROPE),
    "llama-bias": lambda: _llama(attention_bias=True, mlp_bias=True, head_dim=20),
    "mistral": lambda: _mistral(sliding_window=24, head_dim=16),
    "mistral-full": lambda: _mistral(sliding_window=None),
    "ministral3": lambda: _ministral3(
        head_dim=16,
        rope_parameters=_rope(
            "yarn",
            factor=8.0,
            original_max_position_embeddings=16,
            llama_4_scaling_beta=0.4,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
    ),
    "qwen2": lambda: _qwen2(rope_parameters=_YARN_ROPE),
    "qwen2-window": lambda: _qwen2(use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "qwen2-tied": lambda: _qwen2(tie_word_embeddings=True),
    "qwen3": lambda: _qwen3(head_dim=16),
    "qwen3-bias": lambda: _qwen3(head_dim=24, attention_bias=True, tie_word_embeddings=True),
    "gemma2": lambda: _gemma2(
        sliding_window=20,
        head_dim=16,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=8.0,
        tie_word_embeddings=True,
    ),
    "gemma3": lambda: _gemma3(
        sliding_window=20,
        head_dim=16,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=_GEMMA3_ROPE,
        tie_word_embeddings=True,
    ),
    "phi3": lambda: _phi3(sliding_window=24),
    "phi3-long": lambda: _phi3(rope_parameters=_LONG_ROPE, max_position_embeddings=4 * CONTEXT),
    "olmo2": _olmo2,
    "granite": lambda: _granite(
        embedding_multiplier=6.0, residual_multiplier=0.4, logits_scaling=3.0, attention_multiplier=0.1
    ),
    "smollm3": lambda: _smollm3(
        no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=20, layer_types=None, pad_token_id=0
    ),
    "starcoder2": lambda: _starcoder2(sliding_window=24, tie_word_embeddings=True),
    "gpt_neox": lambda: _gpt_neox(rotary_pct=0.5, num_key_value_heads=4),
    "gpt_neox-in-turn": lambda: _gpt_neox(
        use_parallel_residual=False, rotary_pct=1.0, attention_bias=False, hidden_act="relu", num_key_value_heads=4
    ),
    "cohere2": lambda: _cohere2(sliding_window=20, sliding_window_pattern=2, logit_scale=0.5, tie_word_embeddings=True),
}


def _named(name: str, config: str = "", **changes: object) -> Callable[[], PreTrainedModel]:
    """A family by its name in transformers; its ``config`` may have another."""
    model, config = f"{name}ForCausalLM", f"{config or name}Config"
    return lambda: _of(getattr(transformers, model), getattr(transformers, config))(**changes)


def _of_llama(name: str, **changes: object) -> Callable[[], PreTrainedModel]:
    """A family that transformers has as a Llama with a configuration of its own, under the name that it was published with."""
    return lambda: _of(type(f"{name}ForCausalLM", (LlamaForCausalLM,), {}), getattr(transformers, f"{name}Config"))(
        **changes
    )


_LATENT: dict[str, object] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 14,
}
_DEEPSEEK_ROPE = _YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.9}

_MIXTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "mixtral": lambda: _mixtral(num_local_experts=4, num_experts_per_tok=2, sliding_window=24),
    "llama4": lambda: _llama4(
        head_dim=12,
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=32,
        intermediate_size_mlp=40,
        interleave_moe_layer_step=2,
        no_rope_layers=[1, 0, 1],
        floor_scale=10,
        attn_scale=0.4,
        rope_parameters=_LLAMA3_ROPE,
    ),
    "llama4-yarn": lambda: _llama4(
        head_dim=12,
        num_local_experts=4,
        num_experts_per_tok=1,
        intermediate_size=32,
        intermediate_size_mlp=40,
        rope_parameters=_YARN_ROPE,
    ),
    "qwen2_moe": lambda: _qwen2_moe(
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[1],
    ),
    "qwen3_moe": lambda: _qwen3_moe(
        num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True, head_dim=16
    ),
    "qwen3_moe-sparse": lambda: _qwen3_moe(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=2, head_dim=16
    ),
    "gpt_oss": lambda: _gpt_oss(
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=36,
        sliding_window=20,
        head_dim=16,
        rope_parameters=_YARN_ROPE | {"truncate": False},
    ),
    "deepseek_v2": lambda: _deepseek_v2(
        q_lora_rank=20,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.5,
        n_shared_experts=2,
        **_LATENT,
    ),
    "deepseek_v2-lite": lambda: _deepseek_v2(q_lora_rank=None, rope_parameters=_DEEPSEEK_ROPE, **_LATENT),
    "deepseek_v3": lambda: _deepseek_v3(
        q_lora_rank=20, n_group=2, topk_group=1, n_shared_experts=1, rope_parameters=_DEEPSEEK_ROPE, **_LATENT
    ),
    "deepseek_v3-halves": lambda: _deepseek_v3(
        q_lora_rank=20, n_group=1, topk_group=1, rope_interleave=False, **_LATENT
    ),
    "olmoe": lambda: _olmoe(num_experts=4, num_experts_per_tok=2, intermediate_size=32, clip_qkv=0.8),
}

_WINDOWS = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

_SHARED: dict[str, object] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "routed_scaling_factor": 1.5,
}
_SCALED = {"embedding_multiplier": 6.0, "residual_multiplier": 0.4, "logits_scaling": 3.0, "attention_multiplier": 0.1}
_HALF_ROPE = _rope("default", partial_rotary_factor=0.5)

_FURTHER: dict[str, Callable[[], PreTrainedModel]] = {
    "gemma1": _named("Gemma", head_dim=16, tie_word_embeddings=True),
    "glm": _named("Glm", head_dim=16),
    "glm4": _named("Glm4", head_dim=12, rope_parameters=_rope("default", partial_rotary_factor=1.0)),
    "cohere": _named("Cohere", logit_scale=0.5, tie_word_embeddings=True),
    "exaone4": _named("Exaone4", head_dim=16, **_WINDOWS),
    "olmo3": _named(
        "Olmo3", rope_parameters={"full_attention": _YARN_ROPE, "sliding_attention": _rope("default")}, **_WINDOWS
    ),
    "internlm3": _of_llama("InternLM3", head_dim=16, attention_bias=True, mlp_bias=True),
    "iquest_coder": _of_llama("IQuestCoder", head_dim=16),
    "minicpm3": _named(
        "MiniCPM3",
        q_lora_rank=20,
        rope_parameters=_long_rope(4),
        max_position_embeddings=2 * CONTEXT,
        tie_word_embeddings=True,
        **_LATENT | {"v_head_dim": 12},
    ),
    "hunyuan_v3": _named(
        "HYV3", num_experts=6, num_experts_per_tok=2, num_shared_experts=2, moe_intermediate_size=20, head_dim=16
    ),
    "mimo_v2": _named(
        "MiMoV2Flash",
        head_dim=24,
        v_head_dim=12,
        sliding_window=20,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        routed_scaling_factor=1.5,
    ),
    "cohere-norms": _named("Cohere", logit_scale=0.5, tie_word_embeddings=True, use_qk_norm=True),
    "persimmon": _named("Persimmon", rope_parameters=_HALF_ROPE, num_key_value_heads=4),
    "stablelm-norms": _named("StableLm", rope_parameters=_HALF_ROPE, qk_layernorm=True),
    "laguna": _named(
        "Laguna",
        head_dim=16,
        num_attention_heads_per_layer=[6, 4, 6],
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=24,
        moe_routed_scaling_factor=1.5,
        rope_parameters={
            "full_attention": _YARN_ROPE | {"partial_rotary_factor": 0.5},
            "sliding_attention": _rope("default", partial_rotary_factor=1.0),
        },
        **_WINDOWS,
    ),
    "laguna-channels": _named(
        "Laguna",
        head_dim=12,
        gating="per-element",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=24,
        sliding_window=20,
    ),
    "dbrx": _named(
        "Dbrx",
        d_model=48,
        attn_config={"kv_n_heads": 2, "clip_qkv": 0.8, "rope_theta": 10_000.0},
        ffn_config={"ffn_hidden_size": 20, "moe_num_experts": 6, "moe_top_k": 2},
    ),
    "arcee": _named("Arcee", mlp_bias=True),
    "seed_oss": _named("SeedOss", head_dim=16, attention_out_bias=True),
    "ernie4_5": _named("Ernie4_5", head_dim=16, use_bias=True),
    "stablelm": _named("StableLm", rope_parameters=_HALF_ROPE, use_qkv_bias=True),
    "stablelm-parallel": _named("StableLm", rope_parameters=_HALF_ROPE, use_parallel_residual=True),
    "nemotron": _named("Nemotron", head_dim=16),
    "youtu": _named("Youtu", q_lora_rank=20, **_LATENT),
    "ministral": _named("Ministral", head_dim=12, **_WINDOWS),
    "helium": _named("Helium", head_dim=12),
    "cwm": _named("Cwm", head_dim=16, sliding_window=20, bos_token_id=1),
    "jais2": _named("Jais2"),
    "olmo": _named("Olmo"),
    "olmo-clipped": _named("Olmo", clip_qkv=0.8),
    "apertus": _named("Apertus", head_dim=16),
    "phi": _named("Phi", rope_parameters=_HALF_ROPE),
    "hunyuan": _named("HunYuanDenseV1", head_dim=16),
    "hyperclovax": _named("HyperCLOVAX", **_SCALED),
    "glm4_moe": _named("Glm4Moe", use_qk_norm=True, head_dim=16, **_SHARED),
    "solar_open": _named("SolarOpen", head_dim=16, **_SHARED | {"num_experts_per_tok": 6}),
    "dots1": _named("Dots1", n_shared_experts=2, n_group=4, topk_group=2, **_WINDOWS | _SHARED),
    "cohere2_moe": _named(
        "Cohere2Moe",
        head_dim=12,
        num_experts=6,
        num_shared_experts=2,
        mlp_layer_types=["dense", "sparse", "sparse"],
        prefix_dense_intermediate_size=40,
        sliding_window=20,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        logit_scale=0.5,
        rms_norm_eps=1e-5,
    ),
    "cohere2_moe-sigmoid": _named(
        "Cohere2Moe",
        head_dim=12,
        num_experts=6,
        num_shared_experts=1,
        expert_selection_fn="sigmoid",
        shared_expert_combination_strategy="sum",
        sliding_window=20,
        sliding_window_pattern=2,
        tie_word_embeddings=True,
    ),
    "glm4_moe_lite": _named("Glm4MoeLite", q_lora_rank=20, n_group=2, topk_group=1, **_LATENT),
    "mistral4": _named(
        "Mistral4",
        q_lora_rank=20,
        n_group=2,
        topk_group=1,
        rope_parameters=_DEEPSEEK_ROPE | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.4},
        **_LATENT,
    ),
    "phimoe": _named(
        "Phimoe",
        num_local_experts=6,
        router_jitter_noise=0.2,
        attention_bias=True,
        lm_head_bias=True,
        sliding_window=24,
    ),
    "phimoe-long": _named(
        "Phimoe",
        num_local_experts=4,
        rope_parameters=_long_rope(6, short_mscale=1.2, long_mscale=1.3),
        max_position_embeddings=4 * CONTEXT,
    ),
    "afmoe": _named(
        "Afmoe",
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        route_scale=1.5,
        mup_enabled=True,
        **_WINDOWS,
    ),
    "exaone_moe": _named("ExaoneMoe", head_dim=16, num_experts=8, **_WINDOWS | _SHARED),
    "ernie4_5_moe": _named("Ernie4_5_Moe", moe_num_experts=6, moe_k=2, moe_intermediate_size=20),
    "minimax_m2": _named(
        "MiniMaxM2", num_local_experts=6, num_experts_per_tok=2, head_dim=16, rope_parameters=_HALF_ROPE
    ),
    "mellum": _named(
        "Mellum",
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        head_dim=16,
        mlp_layer_types=["dense", "sparse", "sparse"],
        rope_parameters=_GEMMA3_ROPE,
        **_WINDOWS,
    ),
    "flex_olmo": _named("FlexOlmo", num_experts=4, num_experts_per_tok=3, intermediate_size=32),
    "hunyuan_moe": _named("HunYuanMoEV1", num_experts=5, moe_topk=2, head_dim=16, intermediate_size=32),
    "granite_moe": _named("GraniteMoe", num_local_experts=5, intermediate_size=32, **_SCALED),
    "granite_moe-shared": _named(
        "GraniteMoeShared", num_local_experts=5, intermediate_size=32, shared_intermediate_size=40, **_SCALED
    ),
}

_MAMBA: dict[str, object] = _SCALED | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 40,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 20,
    "mamba_proj_bias": True,
}

DELTA: dict[str, object] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 40,
}

_OLD: dict[str, object] = {"num_key_value_heads": 4}
"""Of families that know no groups of heads."""
_WITHOUT_ROPE: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": lambda: _of(transformers.GPT2LMHeadModel, transformers.GPT2Config)(
        n_inner=96, tie_word_embeddings=True, **_OLD
    ),
    "opt": _named("OPT", ffn_dim=96, init_std=0.25, **_OLD),
    "opt-350m": _named(
        "OPT",
        ffn_dim=96,
        init_std=0.25,
        do_layer_norm_before=False,
        word_embed_proj_dim=32,
        tie_word_embeddings=True,
        **_OLD,
    ),
    "falcon-rw": _named(
        "Falcon",
        attn_implementation="sdpa",  # The eager one adds biases twice.
        ffn_hidden_size=96,
        alibi=True,
        multi_query=False,
        parallel_attn=False,
        bias=True,
        num_attention_heads=6,
        num_key_value_heads=6,
    ),
    "bloom": _named("Bloom", seq_length=CONTEXT, tie_word_embeddings=True, **_OLD),
    "mpt": _named(
        "Mpt",
        max_seq_len=CONTEXT,
        tie_word_embeddings=True,
        attn_config={"clip_qkv": 3.0, "softmax_scale": 0.2},
        num_attention_heads=6,
        num_key_value_heads=6,
    ),
    "gptj": _named("GPTJ", n_inner=96, rotary_dim=8, **_OLD),
    "codegen": _named("CodeGen", "CodeGen", n_inner=96, rotary_dim=4, num_attention_heads=8, num_key_value_heads=8),
    "gpt_neo": _named("GPTNeo", attention_types=[[["global", "local", "local"], 1]], window_size=20, **_OLD),
    "biogpt": _named("BioGpt", layer_norm_eps=1e-5, **_OLD),
    "xglm": _named("XGLM", ffn_dim=96, init_std=0.25, tie_word_embeddings=True, **_OLD),
    "gpt_bigcode": _named("GPTBigCode", n_inner=96, num_key_value_heads=1),
    "gpt_bigcode-heads": _named("GPTBigCode", n_inner=96, multi_query=False, **_OLD),
}

_MODERNBERT: dict[str, object] = _OLD | {"local_attention": 40, "pad_token_id": 1, "bos_token_id": 2}

_FURTHER |= {
    "bitnet": _named("BitNet", hidden_size=64),
    "kolibri1": _named(
        "Kolibri1",
        head_dim=16,
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=40,
    ),
    "modernbert_decoder": _named("ModernBertDecoder", tie_word_embeddings=True, **_MODERNBERT),
    "modernbert_decoder-bias": _named(
        "ModernBertDecoder",
        norm_bias=True,
        attention_bias=True,
        mlp_bias=True,
        classifier_bias=True,
        decoder_bias=False,
        **_MODERNBERT,
    ),
    "nanochat": _named("NanoChat", head_dim=16),
    "persimmon-plain": _named("Persimmon", rope_parameters=_HALF_ROPE, qk_layernorm=False, **_OLD),
    "falcon": _named("Falcon", ffn_hidden_size=96, num_key_value_heads=1, tie_word_embeddings=True),
    "falcon-40b": _named("Falcon", ffn_hidden_size=96, new_decoder_architecture=True, num_kv_heads=2, bias=True),
    "falcon-11b": _named(
        "Falcon",
        ffn_hidden_size=96,
        new_decoder_architecture=True,
        num_kv_heads=2,
        num_ln_in_parallel_attn=1,
        activation="relu",
    ),
}

_OLMO_HYBRID: dict[str, object] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "pad_token_id": 0,
}

GEMMA4: dict[str, object] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 20,
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
}

GEMMA4_EXPERTS = GEMMA4 | {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 20,
}
GEMMA4_SMALL = GEMMA4 | {
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "num_key_value_heads": 1,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "pad_token_id": 1,
}

_FURTHER |= {
    "granite_swa": _named(
        "GraniteSWA",
        sliding_window=20,
        layer_rope_theta=[0, 10_000.0, 10_000.0],
        attention_multiplier=0.2,
        logits_scaling=2.0,
    ),
    "granite_moe_swa": _named(
        "GraniteMoeSWA",
        sliding_window=20,
        num_local_experts=5,
        intermediate_size=32,
        shared_intermediate_size=40,
        attention_multiplier=0.2,
    ),
    "vaultgemma": _named(
        "VaultGemma",
        head_dim=16,
        sliding_window=20,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=8.0,
        tie_word_embeddings=True,
    ),
    "gemma4": _named("Gemma4", "Gemma4Text", final_logit_softcapping=8.0, **GEMMA4),
    "gemma4-shared": _named("Gemma4", "Gemma4Text", **GEMMA4_SMALL),
    "gemma4-experts": _named("Gemma4", "Gemma4Text", **GEMMA4_EXPERTS),
    "gemma4-keys": _named(
        "Gemma4", "Gemma4Text", attention_k_eq_v=True, num_global_key_value_heads=1, **GEMMA4 | {"global_head_dim": 32}
    ),
}

MUSE_GLIMMER: dict[str, object] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": 20,
    "layer_rope_theta": [10_000.0, 0, 10_000.0, 0],
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
    "qk_scale_factor": 1.7,
    "output_multiplier": 0.6,
    "final_logit_softcapping": 8.0,
    "post_norm_eps": 0.5,
}
_FURTHER["muse_glimmer"] = lambda: _muse_glimmer(**MUSE_GLIMMER)

_FALCON_H1: dict[str, object] = {
    "mamba_d_ssm": 60,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 20,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.5,
    "mlp_multipliers": [0.6, 0.8],
    "ssm_multipliers": [0.5, 0.7, 1.2, 1.5, 0.4],
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "key_multiplier": 0.3,
}

_NEMOTRON_H: dict[str, object] = {
    "layers_block_type": ["moe", "linear_attention", "full_attention", "mlp", "linear_attention", "mlp", "mlp"],
    "head_dim": 16,
    "ssm_state_size": 20,
    "mamba_num_heads": 6,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "n_routed_experts": 6,
    "n_group": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.5,
    "use_bias": True,
}

_LFM3: dict[str, object] = {
    "layer_types": ["conv", "full_attention", "sliding_attention"],
    "head_dim": 16,
    "sliding_window": 20,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": _rope("proportional", rope_theta=1e6, partial_rotary_factor=0.5),
        "sliding_attention": _rope("default"),
    },
}

_MAMBA1: dict[str, object] = {"state_size": 6, "num_attention_heads": 1, "num_key_value_heads": 1}

_KDA: dict[str, object] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
}

_PARTS = ("full_attn", "linear_attn", "mlp")
_MINIMAX: dict[str, object] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 12,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "block_size": 16,
}

_STATES: dict[str, Callable[[], PreTrainedModel]] = {
    "lfm2": _named("Lfm2", layer_types=["conv", "full_attention", "conv"], tie_word_embeddings=True),
    "lfm2-bias": _named("Lfm2", layer_types=["conv", "full_attention", "conv"], conv_bias=True, conv_L_cache=4),
    "lfm2_moe": _named(
        "Lfm2Moe",
        layer_types=["conv", "full_attention", "conv"],
        num_dense_layers=1,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
    ),
    "lfm3": _named("Lfm3", **_LFM3),
    "lfm3-plain": _named("Lfm3", **_LFM3, use_attention_gate=False, use_sandwich_norm=False, conv_bias=True),
    "qwen3_next": _named("Qwen3Next", mlp_only_layers=[1], **DELTA),
    "qwen3_5": _named("Qwen3_5", "Qwen3_5Text", **DELTA),
    "qwen3_5_moe": _named("Qwen3_5Moe", "Qwen3_5MoeText", **DELTA),
    "olmo_hybrid": _named("OlmoHybrid", **_OLMO_HYBRID, rope_parameters={"rope_type": "default", "rope_theta": None}),
    "olmo_hybrid-rope": _named("OlmoHybrid", **_OLMO_HYBRID, linear_allow_neg_eigval=False),
    "granitehybrid": _named(
        "GraniteMoeHybrid", num_local_experts=0, position_embedding_type="rope", **_MAMBA | {"mamba_n_groups": 1}
    ),
    "falcon_h1": _named("FalconH1", **_FALCON_H1),
    "falcon_h1-norms": _named("FalconH1", mamba_rms_norm=True, **_FALCON_H1 | {"mamba_d_ssm": None}),
    "bamba": _named(
        "Bamba", attn_layer_indices=[1], mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=20, mlp_bias=True
    ),
    "mamba2": _named(
        "Mamba2",
        num_heads=8,
        head_dim=12,
        n_groups=2,
        state_size=20,
        use_bias=True,
        num_attention_heads=1,
        num_key_value_heads=1,
    ),
    "mamba": _named("Mamba", time_step_rank=5, use_bias=True, **_MAMBA1),
    "falcon_mamba": _named("FalconMamba", mixer_rms_eps=1e-3, tie_word_embeddings=True, **_MAMBA1),
    "jamba": _named(
        "Jamba",
        attn_layer_period=3,
        attn_layer_offset=1,
        num_experts=4,
        mamba_d_state=6,
        mamba_dt_rank=5,
    ),
    "kimi_linear": _named("KimiLinear", linear_head_dim=12, linear_num_heads=3, **_KDA),
    "bailing_hybrid": _named("BailingHybrid", head_dim=12, n_group=2, topk_group=1, **_KDA),
    "bailing_hybrid-soft": _named(
        "BailingHybrid", head_dim=12, n_group=1, topk_group=1, kda_safe_gate=False, short_conv_kernel_size=3, **_KDA
    ),
    "minimax": _named("MiniMax", **_MINIMAX),
    "minimax-factors": _named(
        "MiniMax",
        **{f"{kind}_{part}_factor": factor for kind in _PARTS for part, factor in (("alpha", 3.5), ("beta", 0.8))},
        **_MINIMAX,
    ),
    "recurrent_gemma": _named(
        "RecurrentGemma",
        attention_window_size=20,
        block_types=["recurrent", "attention"],
        tie_word_embeddings=True,
    ),
    "nemotron_h": _named("NemotronH", **_NEMOTRON_H),
    "granitehybrid-experts": _named("GraniteMoeHybrid", num_local_experts=6, num_experts_per_tok=2, **_MAMBA),
}

_INDEX: dict[str, object] = {"q_lora_rank": 20, "index_n_heads": 32, "index_head_dim": 10, "index_topk": 7}
_ON_OPERATORS: dict[str, Callable[[], PreTrainedModel]] = {
    "deepseek_v32": _named("DeepseekV32", n_group=2, topk_group=1, rope_parameters=_DEEPSEEK_ROPE, **_LATENT, **_INDEX),
    "glm_moe_dsa": _named("GlmMoeDsa", indexer_types=["full", "shared", "full"], **_LATENT, **_INDEX),
    "gemma3n": _named(
        "Gemma3n",
        "Gemma3nText",
        num_hidden_layers=5,
        layer_types=["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        head_dim=12,
        sliding_window=20,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=12,
        vocab_size_per_layer_input=VOCAB_SIZE,
        altup_num_inputs=3,
        laurel_rank=8,
        activation_sparsity_pattern=[0.8, 0.0, 0.6, 0.0, 0.0],
        pad_token_id=1,
        final_logit_softcapping=8.0,
        tie_word_embeddings=True,
    ),
    "nemotron_h-latent": _named("NemotronH", moe_latent_size=24, **_NEMOTRON_H),
}

_FURTHER |= _WITHOUT_ROPE | _STATES
_MAKERS |= _MIXTURES | _FURTHER
FAMILIES = tuple(_MAKERS)
"""Names that ``make_checkpoint`` knows."""
_MAKERS |= _ON_OPERATORS
ON_OPERATORS = tuple(_ON_OPERATORS)
"""Others, which have what the kernels lack."""
WITHOUT_ROPE = tuple(_WITHOUT_ROPE)
"""Of these, those whose file says nothing about one."""
STATES = (*_STATES, "nemotron_h-latent")
"""Of all, those with a state in some layers."""
FURTHER = tuple(_FURTHER)
"""Of these, those that put parts together which others have, too. Tests with many settings take some for them."""


def make_model(name: str, *, seed: int = 0) -> PreTrainedModel:
    """The model of one family, float32, in evaluation mode; biases and norms are random too, not their usual 0 and 1."""
    torch.manual_seed(seed)
    return randomise(_MAKERS[name](), name)


def randomise(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Draw biases, norms, corrections and what begins with zeros or alike of a model of the family ``name``; in evaluation mode."""
    with torch.no_grad():
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
            elif buffer_name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith((".router.scale", ".per_expert_scale")):
                parameter.uniform_(0.6, 1.6)
            elif parameter_name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif parameter_name.endswith("sinks"):
                parameter.normal_(0.0, 1.0)
            elif "norm" in parameter_name.replace("norm_attn_norm", "") or ".ln_" in parameter_name:
                # Gemma up to 3 and Nemotron add 1 to the weight, and Muse Glimmer within layers.
                plain = name.startswith(("gemma3n", "gemma4"))
                adds_1 = name.startswith(("gemma", "vaultgemma", "recurrent_gemma")) and not plain
                adds_1 = adds_1 or (name == "muse_glimmer" and "layers." in parameter_name)
                parameter.uniform_(0.6, 1.6).sub_(1.0 if adds_1 or name == "nemotron" else 0.0)
            elif not parameter.any() or ".act_fn." in parameter_name:
                parameter.normal_(0.0, 0.3)
    return model.eval()


def make_checkpoint(directory: Path, name: str, *, seed: int = 0, max_shard_size: str = "5GB") -> PreTrainedModel:
    """Write the checkpoint of one family with its tokenizer into ``directory`` and return the model itself.

    A small ``max_shard_size`` ("50KB") gives several shards and an index.
    """
    model = make_model(name, seed=seed)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    tokenizer().save_pretrained(directory)
    return model


def change_head(directory: Path, kind: str) -> None:
    """Store a head in a tied checkpoint: "other" than the embedding, the "same", or "alone", without an embedding.

    "bare" stores none, and names the decoder's tensors without ``model.`` or ``transformer.`` in front.
    """
    tensors = load_file(directory / "model.safetensors")
    if kind == "bare":
        fronts = ("model.", "transformer.")
        bare = {name[len(next(filter(name.startswith, fronts), "")) :]: tensor for name, tensor in tensors.items()}
        save_file(bare, directory / "model.safetensors", metadata={"format": "pt"})
        return
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.flip(0) if kind == "other" else embedding.clone()
    if kind == "alone":
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most ``VOCAB_SIZE`` entries, with a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        _CORPUS,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=EOS_TOKEN, chat_template=CHAT_TEMPLATE, model_max_length=CONTEXT
    )
