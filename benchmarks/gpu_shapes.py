"""The models whose steps are measured on a device, and the sizes that are tried with each.

Owns: the shapes. Must not know: how a step is run or measured.
"""

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from headway_executor.models.config import ModelConfig
from headway_executor.models.families import read_model_config


@dataclass(frozen=True)
class Shape:
    """A model's config.json, and the sizes that are tried with it."""

    config: dict[str, object]
    max_model_len: int
    decode_batches: tuple[int, ...]
    decode_context: int
    chunk: int
    mixed: tuple[int, int]
    attention_decode: tuple[int, int]
    attention_prefill: int
    swapped_tokens: int
    repetitions: int


LLAMA3_8B = Shape(
    config={
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 128001,
        "torch_dtype": "bfloat16",
    },
    max_model_len=8192,
    decode_batches=(1, 64, 256),
    decode_context=1024,
    chunk=2048,
    mixed=(64, 1024),
    attention_decode=(64, 8192),
    attention_prefill=4096,
    swapped_tokens=4096,
    repetitions=40,
)
TINY = Shape(
    config={
        **LLAMA3_8B.config,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
        "max_position_embeddings": 128,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    },
    max_model_len=128,
    decode_batches=(1, 4),
    decode_context=32,
    chunk=32,
    mixed=(3, 16),
    attention_decode=(2, 64),
    attention_prefill=32,
    swapped_tokens=32,
    repetitions=3,
)
QWEN3_30B = replace(
    LLAMA3_8B,
    config={
        **LLAMA3_8B.config,
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
)
TINY_MIXTURE = replace(
    TINY,
    config={
        **TINY.config,
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
)
QWEN3_5_9B = replace(
    LLAMA3_8B,
    config={
        **LLAMA3_8B.config,
        "architectures": ["Qwen3_5ForCausalLM"],
        "intermediate_size": 12288,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "vocab_size": 248320,
    },
)
TINY_STATES = replace(
    TINY,
    config={
        **TINY.config,
        "architectures": ["Qwen3_5ForCausalLM"],
        "num_hidden_layers": 4,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
)
DEEPSEEK_V2_LITE = replace(
    LLAMA3_8B,
    config={
        **LLAMA3_8B.config,
        "architectures": ["DeepseekV2ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "vocab_size": 102400,
        "eos_token_id": 100001,
        "rope_theta": 10000.0,
    },
)
TINY_LATENT = replace(
    TINY,
    config={
        **DEEPSEEK_V2_LITE.config,
        **{name: TINY.config[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")},
        **{name: TINY.config[name] for name in ("max_position_embeddings", "eos_token_id", "torch_dtype")},
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
)
SHAPES = {
    "llama3-8b": LLAMA3_8B,
    "qwen3-30b-a3b": QWEN3_30B,
    "qwen3.5-9b": QWEN3_5_9B,
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
    "tiny": TINY,
    "tiny-mixture": TINY_MIXTURE,
    "tiny-states": TINY_STATES,
    "tiny-latent": TINY_LATENT,
}


def config_of(shape: Shape) -> ModelConfig:
    """Read the shape's config.json as a model's."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(shape.config))
        return read_model_config(Path(directory))
