"""ERNIE 4.5: Llama with neighbouring channels rotated; the mixtures choose experts by corrected scores."""

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig
from headway_executor.models.families.reading import (
    read_attention,
    read_feed_forward,
    read_model,
    read_rms_norm,
    refuse_partial_rotation,
)


def read_ernie(fields: ConfigFields) -> ModelConfig:
    """``Ernie4_5ForCausalLM``."""
    refuse_partial_rotation(fields)
    has_bias = fields.flag("use_bias", default=False)
    return read_model(
        fields,
        default_context=131_072,
        attention=read_attention(
            fields, head_dim=128, num_kv_heads=2, is_interleaved=True, qkv_bias=has_bias, output_bias=has_bias
        ),
        feed_forward=read_feed_forward(fields, has_bias=has_bias),
        norm=read_rms_norm(fields, eps=1e-5),
        theta=500_000.0,
        tied=True,
    )
