"""OLMo 2: norms only behind attention and feed-forward, and over all queries and all keys of a token."""

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig, TensorNames
from headway_executor.models.families.reading import (
    read_attention,
    read_feed_forward,
    read_model,
    read_rms_norm,
    refuse_partial_rotation,
)

_NAMES = TensorNames(
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
)


def read_olmo2(fields: ConfigFields) -> ModelConfig:
    """``Olmo2ForCausalLM``."""
    refuse_partial_rotation(fields)
    has_bias = fields.flag("attention_bias", default=False)
    return read_model(
        fields,
        default_context=2048,
        attention=read_attention(fields, qkv_bias=has_bias, output_bias=has_bias, qk_norm="all"),
        feed_forward=read_feed_forward(fields),
        norm=read_rms_norm(fields, eps=1e-5, rounds_first=False),
        names=_NAMES,
    )
