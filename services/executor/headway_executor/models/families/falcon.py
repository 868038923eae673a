"""Falcon: attention beside the feed-forward with one head of keys (7B) or some (40B, 180B), or in turn with ALiBi (RW)."""

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.attention_config import AlibiConfig
from headway_executor.models.config import ModelConfig
from headway_executor.models.families.reading import (
    num_layers_of,
    read_attention,
    read_layer_norm,
    read_model,
    read_plain_feed_forward,
    refuse_unless,
)
from headway_executor.models.tensor_names import TensorNames

_NAMES = TensorNames(
    embedding="transformer.word_embeddings.weight",
    final_norm="transformer.ln_f",
    layer="transformer.h.{}.",
    qkv=("self_attention.query_key_value",),
    output="self_attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    ignored=("self_attention.rotary_emb.inv_freq",),
)


def read_falcon(fields: ConfigFields) -> ModelConfig:
    """``FalconForCausalLM``."""
    fields = fields.renamed(
        hidden_size="n_embed", num_key_value_heads="num_kv_heads", intermediate_size="ffn_hidden_size"
    )
    refuse_unless(fields, "apply_residual_connection_post_layernorm", False)
    is_new = fields.flag("new_decoder_architecture", default=False)
    is_parallel = fields.flag("parallel_attn", default=True)
    if is_new and not is_parallel:
        raise fields.refuse("parallel_attn", "true, with new_decoder_architecture")
    num_norms = fields.integer("num_ln_in_parallel_attn", 2 if is_new else 1, high=2)
    if num_norms == 2 and not is_new:
        raise fields.refuse("num_ln_in_parallel_attn", "1, without new_decoder_architecture")
    has_bias, alibi = fields.flag("bias", default=False), fields.flag("alibi", default=False)
    is_fused_by_head = is_new or not fields.flag("multi_query", default=True)
    norms = ("ln_attn", "ln_mlp") if num_norms == 2 else ("input_layernorm", "post_attention_layernorm")
    if is_parallel and num_norms == 1:
        norms = (norms[0], norms[0])
    attention = read_attention(fields, qkv_bias=has_bias, output_bias=has_bias)
    if not is_new:  # It has one head of keys for all, or one for each, whatever the file says.
        num_kv_heads = attention.num_heads if is_fused_by_head else 1
        attention = msgspec.structs.replace(attention, num_kv_heads=num_kv_heads)
    return read_model(
        fields,
        default_context=2048,
        attention=msgspec.structs.replace(attention, alibi=AlibiConfig(is_rounded=True)) if alibi else attention,
        feed_forward=read_plain_feed_forward(fields, field="activation", default="gelu", has_bias=has_bias),
        norm=read_layer_norm(fields),
        ropes=[None] * num_layers_of(fields) if alibi else None,
        names=msgspec.structs.replace(
            _NAMES, is_fused_by_head=is_fused_by_head, attention_norm=norms[0], mlp_norm=norms[1]
        ),
        is_parallel=is_parallel,
        tied=True,
    )
