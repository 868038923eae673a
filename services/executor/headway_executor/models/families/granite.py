"""Granite: Llama with factors on embeddings, scores, the hidden state and logits."""

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig, Scalings
from headway_executor.models.families.reading import (
    read_attention,
    read_feed_forward,
    read_model,
    refuse_partial_rotation,
)


def read_granite(fields: ConfigFields) -> ModelConfig:
    """``GraniteForCausalLM``."""
    refuse_partial_rotation(fields)
    has_bias = fields.flag("attention_bias", default=False)
    scale = fields.number("attention_multiplier", 1.0)
    return read_model(
        fields,
        default_context=2048,
        attention=read_attention(fields, scale=scale, qkv_bias=has_bias, output_bias=has_bias),
        feed_forward=read_feed_forward(fields, has_bias=fields.flag("mlp_bias", default=False)),
        scalings=Scalings(
            embedding=fields.number("embedding_multiplier", 1.0),
            residual=fields.number("residual_multiplier", 1.0),
            logits=1.0 / fields.number("logits_scaling", 1.0),
        ),
    )
