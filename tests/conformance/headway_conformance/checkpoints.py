"""Tiny checkpoints with random weights, one per family of models.

Every value is exact in bfloat16, so all dtypes load the same weights. Wide weights make logits lie far apart and depend
on every token.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway_conformance.sizes import Size

LLAMA = "llama"
MISTRAL = "mistral"
QWEN2 = "qwen2"
QWEN3 = "qwen3"

EOS_TOKEN_ID = 0
_END = "<end>"
_CHARACTERS = "".join(chr(code) for code in range(0x20, 0x7F))

_ARCHITECTURES = {
    LLAMA: "LlamaForCausalLM",
    MISTRAL: "MistralForCausalLM",
    QWEN2: "Qwen2ForCausalLM",
    QWEN3: "Qwen3ForCausalLM",
}

_Shapes = Iterator[tuple[str, tuple[int, ...]]]


def write_checkpoint(directory: Path, family: str, size: Size) -> Path:
    """Write a checkpoint into ``directory/family-size``, always with the same bytes."""
    from safetensors.numpy import save_file

    target = directory / f"{family}-{size.name}"
    if not (target / "config.json").exists():
        target.mkdir(parents=True, exist_ok=True)
        save_file(_tensors(family, size), target / "model.safetensors")
        (target / "tokenizer.json").write_text(json.dumps(_tokenizer(size), indent=1))
        (target / "config.json").write_text(json.dumps(_config(family, size), indent=2))
    return target


def text_of(token_ids: Sequence[int]) -> str:
    """The text of tokens; those without a character give nothing."""
    return "".join(_CHARACTERS[token_id - 1] for token_id in token_ids if 0 < token_id <= len(_CHARACTERS))


def _tokenizer(size: Size) -> dict[str, Any]:
    """Token 0 ends a text; each later one is a printable character."""
    characters = ["Ġ" if character == " " else character for character in _CHARACTERS[: size.vocab_size - 1]]
    kind = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {"id": EOS_TOKEN_ID, "content": _END, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [end | flags],
        "pre_tokenizer": kind,
        "decoder": kind,
        "model": {
            "type": "BPE",
            "vocab": {token: token_id for token_id, token in enumerate([_END, *characters])},
            "merges": [],
        },
    }


def _config(family: str, size: Size) -> dict[str, Any]:
    return {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "hidden_act": "silu",
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": size.max_model_len,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": EOS_TOKEN_ID,
    } | ({"sliding_window": size.sliding_window} if family == MISTRAL else {})


def _shapes(family: str, size: Size) -> _Shapes:
    yield "model.embed_tokens.weight", (size.vocab_size, size.hidden_size)
    for layer in range(size.num_layers):
        for name, shape in _layer_shapes(family, size):
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (size.hidden_size,)
    yield "lm_head.weight", (size.vocab_size, size.hidden_size)


def _layer_shapes(family: str, size: Size) -> _Shapes:
    queries, keys = size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim
    for name, width in (("q", queries), ("k", keys), ("v", keys)):
        yield f"self_attn.{name}_proj.weight", (width, size.hidden_size)
        if family == QWEN2:
            yield f"self_attn.{name}_proj.bias", (width,)
    yield "self_attn.o_proj.weight", (size.hidden_size, queries)
    if family == QWEN3:
        yield "self_attn.q_norm.weight", (size.head_dim,)
        yield "self_attn.k_norm.weight", (size.head_dim,)
    for name in ("gate", "up"):
        yield f"mlp.{name}_proj.weight", (size.intermediate_size, size.hidden_size)
    yield "mlp.down_proj.weight", (size.hidden_size, size.intermediate_size)
    yield "input_layernorm.weight", (size.hidden_size,)
    yield "post_attention_layernorm.weight", (size.hidden_size,)


def _tensors(family: str, size: Size) -> dict[str, NDArray[np.float32]]:
    draw = np.random.default_rng(zlib.crc32(f"{family} {size.name}".encode()))
    return {name: _in_bfloat16(_values(draw, name, shape)) for name, shape in _shapes(family, size)}


def _values(draw: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    if "norm" in name:
        return draw.uniform(0.6, 1.6, shape)
    if name.endswith(".bias"):
        return draw.normal(0.0, 0.3, shape)
    # Scale per input, so that outputs are about as large at any size, and attention weighs as much as the rest.
    gain = 2.0 if "v_proj" in name or "o_proj" in name else 1.0
    if "embed" in name:
        return draw.normal(0.0, 1.0, shape)
    return draw.normal(0.0, gain * 1.4 / np.sqrt(shape[-1]), shape)


def _in_bfloat16(values: NDArray[np.float64]) -> NDArray[np.float32]:
    bits = values.astype(np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFF_0000)).view(np.float32)
