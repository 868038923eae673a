"""Mistral: every layer may have the same window; in Ministral, some; in Ministral 3, queries grow with their position."""

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.attention_config import QueryGrowth
from headway_executor.models.config import ModelConfig
from headway_executor.models.families.positions import rope_section
from headway_executor.models.families.reading import (
    FULL,
    SLIDING,
    layer_types_of,
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    refuse_partial_rotation,
    window_of,
    windows_of,
)


def read_mistral(fields: ConfigFields) -> ModelConfig:
    """``MistralForCausalLM``."""
    refuse_partial_rotation(fields)
    return read_model(
        fields,
        default_context=131_072,
        attention=read_attention(fields, num_kv_heads=8),
        feed_forward=read_feed_forward(fields),
        windows=[window_of(fields)] * num_layers_of(fields),
    )


def read_ministral(fields: ConfigFields) -> ModelConfig:
    """``MinistralForCausalLM``."""
    refuse_partial_rotation(fields)
    window = window_of(fields)
    kinds = layer_types_of(fields, [FULL if window is None else SLIDING] * num_layers_of(fields))
    return read_model(
        fields,
        default_context=131_072,
        attention=read_attention(fields, num_kv_heads=8),
        feed_forward=read_feed_forward(fields),
        windows=windows_of(fields, kinds, window),
    )


def read_ministral3(fields: ConfigFields) -> ModelConfig:
    """``Ministral3ForCausalLM``."""
    growth = growth_of(fields)
    values = {"max_position_embeddings": 262_144, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None}
    config = read_mistral(ConfigFields(fields.source, values | dict(fields.values)))
    layers = tuple(msgspec.structs.replace(layer, query_growth=growth) for layer in config.layers)
    return msgspec.structs.replace(config, layers=layers)


def growth_of(fields: ConfigFields) -> QueryGrowth:
    """How queries grow, in the section of rope."""
    section = rope_section(fields)
    return QueryGrowth(
        beta=section.number("llama_4_scaling_beta"), step=section.integer("original_max_position_embeddings")
    )
