"""Llama 2, 3 and 3.x."""

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig
from headway_executor.models.families.reading import (
    read_attention,
    read_feed_forward,
    read_model,
    refuse_partial_rotation,
)


def read_llama(fields: ConfigFields) -> ModelConfig:
    """``LlamaForCausalLM``."""
    refuse_partial_rotation(fields)
    has_bias = fields.flag("attention_bias", default=False)
    return read_model(
        fields,
        default_context=2048,
        attention=read_attention(fields, qkv_bias=has_bias, output_bias=has_bias),
        feed_forward=read_feed_forward(fields, has_bias=fields.flag("mlp_bias", default=False)),
    )
