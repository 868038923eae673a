"""BLOOM: ALiBi, a norm of embeddings."""

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.attention_config import AlibiConfig
from headway_executor.models.config import FeedForwardConfig, ModelConfig
from headway_executor.models.families.reading import (
    num_layers_of,
    read_attention,
    read_layer_norm,
    read_model,
    refuse_groups,
    refuse_unless,
)
from headway_executor.models.tensor_names import TensorNames

_NAMES = TensorNames(
    embedding="transformer.word_embeddings.weight",
    embedding_norm="transformer.word_embeddings_layernorm",
    final_norm="transformer.ln_f",
    layer="transformer.h.{}.",
    qkv=("self_attention.query_key_value",),
    is_fused_by_head=True,
    output="self_attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)


def read_bloom(fields: ConfigFields) -> ModelConfig:
    """``BloomForCausalLM``. ``seq_length`` is how long its texts were while it learned."""
    fields = fields.renamed(
        hidden_size="n_embed",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="seq_length",
    )
    refuse_groups(fields)
    refuse_unless(fields, "apply_residual_connection_post_layernorm", False)
    attention = read_attention(fields, qkv_bias=True, output_bias=True)
    return read_model(
        fields,
        default_context=2048,
        attention=msgspec.structs.replace(attention, alibi=AlibiConfig()),
        feed_forward=FeedForwardConfig(
            intermediate_size=4 * fields.integer("hidden_size"), activation="gelu_tanh", is_gated=False, has_bias=True
        ),
        norm=read_layer_norm(fields),
        ropes=[None] * num_layers_of(fields),
        names=_NAMES,
        tied=True,
    )
