"""OLMo: layer norms without weights.

In OLMo 2 and 3, norms are only behind attention and feed-forward, and over all queries and all keys of a token.
"""

from collections.abc import Sequence

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.attention_config import RopeConfig
from headway_executor.models.config import ModelConfig, NormConfig
from headway_executor.models.families.reading import (
    every_nth_full,
    read_attention,
    read_feed_forward,
    read_model,
    read_rms_norm,
    read_ropes,
    refuse_partial_rotation,
    window_of,
    windows_of,
)
from headway_executor.models.tensor_names import TensorNames

NORMS_BEHIND = TensorNames(
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
)
_CONTEXT = 2048
_THETA_3 = 500_000.0


def read_olmo1(fields: ConfigFields) -> ModelConfig:
    """``OlmoForCausalLM``."""
    refuse_partial_rotation(fields)
    has_bias = fields.flag("attention_bias", default=False)
    attention = read_attention(fields, qkv_bias=has_bias, output_bias=has_bias)
    return read_model(
        fields,
        default_context=_CONTEXT,
        attention=msgspec.structs.replace(attention, clip=fields.optional_number("clip_qkv")),
        feed_forward=read_feed_forward(fields),
        norm=NormConfig(eps=1e-5, kind="layer", has_weight=False),
    )


def read_olmo2(fields: ConfigFields) -> ModelConfig:
    """``Olmo2ForCausalLM``."""
    refuse_partial_rotation(fields)
    return _read(fields)


def read_olmo3(fields: ConfigFields) -> ModelConfig:
    """``Olmo3ForCausalLM``. Scaled positions are not for layers with windows."""
    kinds = every_nth_full(fields, 4)
    context = fields.integer("max_position_embeddings", _CONTEXT)
    ropes = read_ropes(fields, kinds, context, near=_THETA_3, far=_THETA_3)
    return _read(fields, windows=windows_of(fields, kinds, window_of(fields)), ropes=ropes)


def _read(
    fields: ConfigFields,
    *,
    windows: Sequence[int | None] | None = None,
    ropes: Sequence[RopeConfig] | None = None,
) -> ModelConfig:
    has_bias = fields.flag("attention_bias", default=False)
    return read_model(
        fields,
        default_context=_CONTEXT,
        attention=read_attention(fields, qkv_bias=has_bias, output_bias=has_bias, qk_norm="all"),
        feed_forward=read_feed_forward(fields),
        norm=read_rms_norm(fields, eps=1e-5, rounds_first=False),
        windows=windows,
        ropes=ropes,
        names=NORMS_BEHIND,
    )
