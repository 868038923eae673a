"""Architectures of GGUF files of models without a rope, and of Falcon: the fields of config.json, and where tensors stand.

Owns: one function for each. Must not know: what most of them share, files.

The converter puts queries, keys and values one behind the other, and weights of GPT-2 outputs first; that one stays.
"""

from collections.abc import Mapping

from headway.gguf_import.family import LAYER, Family
from headway.gguf_import.layout import Layout, by_group, by_head
from headway.gguf_import.metadata import Metadata

_EPS = ("layer_norm_epsilon", LAYER)
_LAYER = "transformer.h.{}."
_MOST_BIAS = 8.0
_NO_ROPE: Mapping[str, object] = {"rope_parameters": None, "head_dim": None}
_OUTSIDE = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_INSIDE = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_OF_BLOOM = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_OUTSIDE_OF_BLOOM = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}


def gpt2(_: Metadata) -> Family:
    """GPT-2."""
    return Family("GPT2LMHeadModel", Layout(_INSIDE, outside=_OUTSIDE, layer=_LAYER), _NO_ROPE, eps=_EPS)


def starcoder(metadata: Metadata) -> Family:
    """GPT-BigCode, which has one head of keys."""
    metadata.refuse_unless("attention.head_count_kv", 1)
    fields = {**_NO_ROPE, "num_key_value_heads": 1}
    return Family("GPTBigCodeForCausalLM", Layout(_INSIDE, outside=_OUTSIDE, layer=_LAYER), fields, eps=_EPS)


def bloom(metadata: Metadata) -> Family:
    """BLOOM, whose biases of scores are not in the file."""
    layout = Layout(
        _OF_BLOOM, outside=_OUTSIDE_OF_BLOOM, layer=_LAYER, orders={"attn_qkv": by_head(metadata.num_heads)}
    )
    return Family("BloomForCausalLM", layout, _NO_ROPE, eps=_EPS)


def mpt(metadata: Metadata) -> Family:
    """MPT with ALiBi."""
    if metadata.value("attention.max_alibi_bias", 0.0) != _MOST_BIAS:
        raise metadata.refuse("attention.max_alibi_bias", f"{_MOST_BIAS:g}")
    places = {
        "attn_norm": "norm_1",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "ffn_norm": "norm_2",
        "ffn_up": "ffn.up_proj",
        "ffn_down": "ffn.down_proj",
    }
    outside = {"token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head"}
    attention = {"clip_qkv": metadata.value("attention.clamp_kqv", 0.0) or None}
    return Family(
        "MptForCausalLM",
        Layout(places, outside=outside, layer="transformer.blocks.{}."),
        {**_NO_ROPE, "attn_config": attention},
        eps=_EPS,
    )


def falcon(metadata: Metadata) -> Family:
    """Falcon. A second norm tells the newer form, as several heads of keys do."""
    has_two = metadata.has_tensor("blk.0.attn_norm_2.weight")
    num_kv_heads = metadata.num_kv_heads
    norms = {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"} if has_two else {"attn_norm": "input_layernorm"}
    places = {place: name for place, name in _OF_BLOOM.items() if not place.endswith("_norm")} | norms
    orders = {"attn_qkv": by_group(metadata.num_heads, num_kv_heads)}
    fields = {
        "new_decoder_architecture": has_two or num_kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if has_two else 1,
        "num_kv_heads": num_kv_heads,
        "bias": metadata.has_tensor("blk.0.attn_qkv.bias"),
        "head_dim": None,
    }
    layout = Layout(places, outside=_OUTSIDE_OF_BLOOM, layer=_LAYER, orders=orders)
    return Family("FalconForCausalLM", layout, fields, eps=_EPS)
