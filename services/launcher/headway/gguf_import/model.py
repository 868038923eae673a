"""The model of a GGUF file, as config.json and tensors of a checkpoint directory.

Owns: their names, the order of rows. Must not know: files that are written, tokenizers.

llama.cpp turns neighbouring channels of queries and keys, and stores the rows of Llama's in that order; here they are
put back.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from headway.gguf_import.file import GgufFile


class _Family(NamedTuple):
    architecture: str
    turns_neighbours: bool
    has_experts: bool = False


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", turns_neighbours=True),
    "qwen2": _Family("Qwen2ForCausalLM", turns_neighbours=False),
    "qwen3": _Family("Qwen3ForCausalLM", turns_neighbours=False),
    "qwen3moe": _Family("Qwen3MoeForCausalLM", turns_neighbours=False, has_experts=True),
}
_FLOATS = ("f32", "f16", "bf16")
_BLOCKS = ("q4_0", "q8_0", "q4_k", "q6_k")
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
"""Braces: a stack of weights, one of each expert."""

_EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config_of(file: GgufFile) -> dict[str, object]:
    """The fields of config.json. Raises ``ConfigurationError``: a model that cannot be served."""
    family = _family_of(file)
    name = str(file.value("general.architecture"))

    def number(key: str, default: float | None = None) -> float:
        value = file.value(f"{name}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise file.refuse(f"{name}.{key} {value!r:.64} is not supported; allowed: a number above 0")
        return value

    heads = number("attention.head_count")
    hidden = number("embedding_length")
    head_dim = number("attention.key_length", hidden // heads)
    _check_sizes(file, name, head_dim, family)
    fields: dict[str, object] = {}
    if family.has_experts:
        fields |= {field: number(key) for field, key in _EXPERTS.items()}
        fields["norm_topk_prob"] = True
    return fields | {
        "architectures": [family.architecture],
        "vocab_size": file.shape("token_embd.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": number("context_length"),
        "rope_parameters": {"rope_theta": number("rope.freq_base", 10_000.0)} | _rope_scaling(file, name, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensor_names,
        "attention_bias": "blk.0.attn_q.bias" in file.tensor_names,
        "bos_token_id": file.value("tokenizer.ggml.bos_token_id", -1)
        if "tokenizer.ggml.bos_token_id" in file
        else None,
        "eos_token_id": _end_tokens(file),
        "dtype": "float16",
        "quantization_config": {"quant_method": "gguf"},
    }


def tensors_of(file: GgufFile) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the checkpoint; blocks as they are. Raises ``ConfigurationError``: some other tensor."""
    family, name = _family_of(file), str(file.value("general.architecture"))
    heads = int(file.value(f"{name}.attention.head_count"))
    counts = {"attn_q": heads, "attn_k": int(file.value(f"{name}.attention.head_count_kv", heads))}
    for tensor in file.tensor_names:
        if tensor == _ROPE_FACTORS:
            continue
        base, place, suffix = _place_of(file, tensor)
        kind = file.kind(tensor)
        if kind not in (*_FLOATS, *_BLOCKS):
            raise file.refuse(f"tensor {tensor} is of kind {kind}; allowed: {', '.join((*_FLOATS, *_BLOCKS))}")
        found = file.floats(tensor) if kind in _FLOATS else file.blocks(tensor)
        if family.turns_neighbours and place in counts:
            found = _by_halves(found, counts[place])
        end = suffix if kind in _FLOATS else kind
        if "{}" not in base:
            yield f"{base}.{end}", found.contiguous()
            continue
        for number, of_expert in enumerate(found):
            yield f"{base.format(number)}.{end}", of_expert.clone()


def _family_of(file: GgufFile) -> _Family:
    name = file.value("general.architecture")
    if not isinstance(name, str) or name not in _FAMILIES:
        raise file.refuse(f"general.architecture {name!r:.64} is not supported; allowed: {', '.join(_FAMILIES)}")
    return _FAMILIES[name]


def _check_sizes(file: GgufFile, name: str, head_dim: float, family: _Family) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.value(f"{name}.{key}", head_dim) != head_dim:
            raise file.refuse(f"{name}.{key} {file.value(f'{name}.{key}')} is not supported; allowed: {head_dim}")
    for key in ("attention.sliding_window", *(() if family.has_experts else ("expert_count",))):
        if file.value(f"{name}.{key}", 0) != 0:
            raise file.refuse(f"{name}.{key} {file.value(f'{name}.{key}')} is not supported; allowed: none")


def _rope_scaling(file: GgufFile, name: str, head_dim: float) -> dict[str, object]:
    if _ROPE_FACTORS in file.tensor_names:
        return _llama_3_rope(file, float(file.value(f"{name}.rope.freq_base", 10_000.0)), int(head_dim))
    kind = file.value(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default"}
    if kind != "linear":
        raise file.refuse(f"{name}.rope.scaling.type {kind!r:.64} is not supported; allowed: none, linear")
    return {"rope_type": "linear", "factor": float(file.value(f"{name}.rope.scaling.factor"))}


def _llama_3_rope(file: GgufFile, theta: float, head_dim: int) -> dict[str, object]:
    """The factors of Llama 3.1 and later are stored one by one; the largest is the one that they come from."""
    stored = file.floats(_ROPE_FACTORS).double()
    factor, context = float(stored.max()), float(_LLAMA_3["original_max_position_embeddings"])
    low, high = _LLAMA_3["low_freq_factor"], _LLAMA_3["high_freq_factor"]
    turns = context / (2 * math.pi * theta ** (torch.arange(0, head_dim, 2).double() / head_dim))
    share = ((turns - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - share) / factor + share)
    if stored.shape != expected.shape or not torch.allclose(stored, expected, rtol=1e-3):
        raise file.refuse(f"{_ROPE_FACTORS} is not supported; allowed: the factors of Llama 3")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA_3}


def _end_tokens(file: GgufFile) -> list[int]:
    keys = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
    return sorted({int(file.value(key)) for key in keys if key in file})


def _place_of(file: GgufFile, tensor: str) -> tuple[str, str, str]:
    """The checkpoint's name without its end, the place in a layer, and the end."""
    stem, _, suffix = tensor.rpartition(".")
    if suffix in ("weight", "bias"):
        if stem in _OUTSIDE:
            return _OUTSIDE[stem], stem, suffix
        inside = re.fullmatch(r"blk\.(\d{1,4})\.(\w+)", stem)
        if inside is not None and inside[2] in _INSIDE:
            return f"model.layers.{int(inside[1])}.{_INSIDE[inside[2]]}", inside[2], suffix
    raise file.refuse(f"tensor {tensor[:64]} is not supported; allowed: those of a decoder")


def _by_halves(rows: Tensor, heads: int) -> Tensor:
    """Rows of ``heads`` heads with paired channels side by side, as rows with the pairs half a head apart."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).flatten(0, 2)
