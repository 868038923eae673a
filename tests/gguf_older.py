"""Random models without a rope, and of Falcon, and how llama.cpp's converter writes them: see ``gguf_files``."""

from collections.abc import Callable, Iterator
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH
from numpy.typing import NDArray

Values = NDArray[np.float32]
Change = Callable[[str, Values, dict[str, Any]], Iterator[tuple[str, Values]]]

_OLD: dict[str, object] = {"num_key_value_heads": 4, "head_dim": None}
_TIED = {"tie_word_embeddings": True}
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "gpt2": ("GPT2", _OLD | _TIED | {"n_inner": 256}),
    "starcoder": ("GPTBigCode", _OLD | {"num_key_value_heads": 1, "n_inner": 256}),
    "bloom": ("Bloom", _OLD | _TIED | {"seq_length": 256}),
    "mpt": ("Mpt", _OLD | _TIED | {"max_seq_len": 256, "attn_config": {"clip_qkv": 3.0}}),
    "falcon": ("Falcon", _OLD | _TIED | {"num_key_value_heads": 1, "num_kv_heads": 1}),
    "falcon-40b": (
        "Falcon",
        {"head_dim": None, "new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": True},
    ),
}
ARCHITECTURES = {
    "GPT2": MODEL_ARCH.GPT2,
    "GPTBigCode": MODEL_ARCH.STARCODER,
    "Bloom": MODEL_ARCH.BLOOM,
    "Mpt": MODEL_ARCH.MPT,
    "Falcon": MODEL_ARCH.FALCON,
}
NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "max_position_embeddings": ("n_positions", "seq_length", "max_seq_len"),
    "layer_norm_eps": ("layer_norm_epsilon",),
}
"""What these families call what others have."""


def with_usual_names(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration under the names that most families give them."""
    family = config["architectures"][0].removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    if family not in ARCHITECTURES:
        return config
    usual = {name: config[own] for name, others in NAMES.items() for own in others if config.get(own) is not None}
    made = config | usual
    return made | {"intermediate_size": 4 * made["hidden_size"]}


def _gpt2(name: str, values: Values, _: dict[str, Any]) -> Iterator[tuple[str, Values]]:
    """``conversion/gpt2.py``: outputs first."""
    is_turned = values.ndim == 2 and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    yield name, values.T if is_turned else values


def _bloom(name: str, values: Values, config: dict[str, Any]) -> Iterator[tuple[str, Values]]:
    """``conversion/bloom.py``: all queries, then all keys, then all values."""
    if "query_key_value" in name:
        by_head = values.reshape(config["num_attention_heads"], 3, -1, *values.shape[1:])
        values = np.concatenate([by_head[:, part].reshape(-1, *values.shape[1:]) for part in range(3)])
    yield name.removeprefix("transformer."), values


def _falcon(name: str, values: Values, config: dict[str, Any]) -> Iterator[tuple[str, Values]]:
    """``conversion/falcon.py``: the same, of groups."""
    if "query_key_value" in name:
        groups, heads = config["num_kv_heads"], config["num_attention_heads"]
        by_group = values.reshape(groups, heads // groups + 2, -1, values.shape[1])
        parts = (by_group[:, :-2], by_group[:, -2:-1], by_group[:, -1:])
        values = np.concatenate([part.reshape(-1, values.shape[1]) for part in parts])
    yield name, values


CHANGES: dict[str, Change] = {"GPT2": _gpt2, "Bloom": _bloom, "Falcon": _falcon}


def add_mpt(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/mpt.py``."""
    writer.add_clamp_kqv(config["attn_config"]["clip_qkv"])
    writer.add_max_alibi_bias(8.0)
