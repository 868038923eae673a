"""Cohere 2 (Command R7B, Command A): attention beside the feed-forward behind one norm; only windows have positions."""

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig, NormConfig, Scalings, TensorNames
from headway_executor.models.families.positions import read_rope, scaled_context
from headway_executor.models.families.reading import (
    SLIDING,
    every_nth_full,
    read_attention,
    read_feed_forward,
    read_model,
    refuse_partial_rotation,
    window_of,
    windows_of,
)

_CONTEXT = 8192


def read_cohere2(fields: ConfigFields) -> ModelConfig:
    """``Cohere2ForCausalLM``."""
    refuse_partial_rotation(fields)
    has_bias = fields.flag("attention_bias", default=False)
    kinds = every_nth_full(fields, 4)
    context = fields.integer("max_position_embeddings", _CONTEXT)
    rope = read_rope(fields, context)
    return read_model(
        fields,
        default_context=_CONTEXT,
        context=scaled_context(fields, rope, context),
        attention=read_attention(fields, is_interleaved=True, qkv_bias=has_bias, output_bias=has_bias),
        feed_forward=read_feed_forward(fields),
        norm=NormConfig(eps=fields.number("layer_norm_eps", 1e-5), kind="layer"),
        windows=windows_of(fields, kinds, window_of(fields)),
        ropes=[rope if kind == SLIDING else None for kind in kinds],
        scalings=Scalings(logits=fields.number("logit_scale", 0.0625)),
        names=TensorNames(mlp_norm="input_layernorm"),
        is_parallel=True,
        tied=True,
    )
