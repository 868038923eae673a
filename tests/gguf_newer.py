"""Random models of families that came late, and how llama.cpp's converter writes them: see ``gguf_files``."""

from collections.abc import Callable, Iterator
from typing import Any

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH
from numpy.typing import NDArray

from checkpoints import VOCAB_SIZE
from gguf_gemma4 import unread_keys

Values = NDArray[np.float32]
Change = Callable[[str, Values, dict[str, Any]], Iterator[tuple[str, Values]]]

_CONTEXT = 256
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + i / 8 for i in range(4)],
    "long_factor": [2.0 + i for i in range(4)],
    "original_max_position_embeddings": _CONTEXT,
}
_MINICPM3: dict[str, object] = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 32,
    "v_head_dim": 16,
    "tie_word_embeddings": True,
    "rope_parameters": _LONG_ROPE,
}
_MIMO: dict[str, object] = {
    "head_dim": 32,
    "v_head_dim": 16,
    "num_key_value_heads": 2,
    "num_hidden_layers": 7,
    "sliding_window": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
_DBRX: dict[str, object] = {
    "head_dim": None,
    "d_model": 64,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.8, "rope_theta": 10_000.0},
    "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 6, "moe_top_k": 3},
}
_GEMMA3N: dict[str, object] = {
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    "sliding_window": 20,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "altup_num_inputs": 3,
    "laurel_rank": 32,
    "activation_sparsity_pattern": [0.8, 0.0, 0.6, 0.0, 0.0],
    "intermediate_size": [96, 96, 128, 96, 96],
    "pad_token_id": 1,
    "final_logit_softcapping": 8.0,
    "tie_word_embeddings": True,
}

MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "minicpm3": ("MiniCPM3", _MINICPM3),
    "dbrx": ("Dbrx", _DBRX),
    "gemma3n": ("Gemma3n", _GEMMA3N),
    "mimo2": ("MiMoV2Flash", _MIMO),
}
ARCHITECTURES = {
    "MiniCPM3": MODEL_ARCH.MINICPM3,
    "MiMoV2Flash": MODEL_ARCH.MIMO2,
    "Dbrx": MODEL_ARCH.DBRX,
    "Gemma3n": MODEL_ARCH.GEMMA3N,
}


def _add_minicpm3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/minicpm.py``."""
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    for length in ("long", "short"):
        factors = np.array(config["rope_parameters"][f"{length}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{length}.weight", factors)


def _add_mimo(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/mimo.py``: published files have windows without the token itself."""
    near = [kind == "sliding_attention" for kind in config["layer_types"]]
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([2 * heads if is_near else heads for is_near in near])
    writer.add_sliding_window(config["sliding_window"] - 1)
    writer.add_sliding_window_pattern(near)
    writer.add_value_length(config["v_head_dim"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    share = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(config["head_dim"] * share))


def _mimo(name: str, values: Values, _: dict[str, Any]) -> Iterator[tuple[str, Values]]:
    """The same: sinks and corrections get an end."""
    if name.endswith("e_score_correction_bias"):
        name = name.replace("_bias", ".bias")
    yield f"{name}.weight" if name.endswith("attention_sink_bias") else name, values


def _add_gemma3n(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/gemma.py``."""
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    shares = torch.tensor(config["activation_sparsity_pattern"])
    writer.add_activation_sparsity_scale(torch.distributions.Normal(0, 1).icdf(shares).tolist())
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _gemma3n(name: str, values: Values, config: dict[str, Any]) -> Iterator[tuple[str, Values]]:
    """The same; the products of further states are stacks, which come from ``in_stacks``. Layers that share keys and values
    have some of their own, which nothing reads.
    """
    yield from unread_keys(name, values, config, ("k", "v"))
    yield f"{name}.weight" if name.endswith("_scale") else name, values


def with_usual_names(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of DBRX under the names that most families give them."""
    if config["architectures"] != ["DbrxForCausalLM"]:
        return config
    names = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
    }
    experts = config["ffn_config"]
    return config | {
        **{name: config[own] for name, own in names.items()},
        "intermediate_size": experts["ffn_hidden_size"],
        "num_experts": experts["moe_num_experts"],
        "num_experts_per_tok": experts["moe_top_k"],
    }


def _add_dbrx(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/dbrx.py``."""
    writer.add_clamp_kqv(config["attn_config"]["clip_qkv"])
    writer.add_layer_norm_eps(1e-5)


def _dbrx(name: str, values: Values, config: dict[str, Any]) -> Iterator[tuple[str, Values]]:
    """The same: a stack of each matrix, outputs first."""
    if ".experts." in name:
        experts = config["ffn_config"]
        stack = values.reshape(experts["moe_num_experts"], experts["ffn_hidden_size"], -1)
        yield f"{name}.weight", stack.swapaxes(1, 2) if name.endswith("w2") else stack
    else:
        yield name, values


CHANGES: dict[str, Change] = {"MiMoV2Flash": _mimo, "Dbrx": _dbrx, "Gemma3n": _gemma3n}
SETTINGS: dict[str, Callable[[gguf.GGUFWriter, dict[str, Any]], None]] = {
    "MiniCPM3": _add_minicpm3,
    "Dbrx": _add_dbrx,
    "Gemma3n": _add_gemma3n,
    "MiMoV2Flash": _add_mimo,
}
