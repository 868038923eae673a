"""Random models of families that came late, and how llama.cpp's converter writes them: see ``gguf_files``."""

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH

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

MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "minicpm3": ("MiniCPM3", _MINICPM3),
}
ARCHITECTURES = {"MiniCPM3": MODEL_ARCH.MINICPM3}


def _add_minicpm3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/minicpm.py``."""
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    for length in ("long", "short"):
        factors = np.array(config["rope_parameters"][f"{length}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{length}.weight", factors)


SETTINGS: dict[str, Callable[[gguf.GGUFWriter, dict[str, Any]], None]] = {"MiniCPM3": _add_minicpm3}
