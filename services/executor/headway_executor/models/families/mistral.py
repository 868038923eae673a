"""Mistral: every layer may have the same window."""

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig
from headway_executor.models.families.reading import (
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    refuse_partial_rotation,
    window_of,
)


def read_mistral(fields: ConfigFields) -> ModelConfig:
    """``MistralForCausalLM``."""
    refuse_partial_rotation(fields)
    return read_model(
        fields,
        default_context=131_072,
        attention=read_attention(fields),
        feed_forward=read_feed_forward(fields),
        windows=[window_of(fields)] * num_layers_of(fields),
    )
