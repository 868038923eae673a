"""Persimmon: layer norms, of heads too, a part of each head rotated, a feed-forward without a gate."""

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig
from headway_executor.models.families.positions import rotary_factor
from headway_executor.models.families.reading import (
    read_attention,
    read_feed_forward,
    read_layer_norm,
    read_model,
    refuse_groups,
)
from headway_executor.models.tensor_names import TensorNames

_NAMES = TensorNames(
    final_norm="model.final_layernorm",
    qkv=("self_attn.query_key_value",),
    is_fused_by_head=True,
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    output="self_attn.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)


def read_persimmon(fields: ConfigFields) -> ModelConfig:
    """``PersimmonForCausalLM``."""
    refuse_groups(fields)
    has_norms = fields.flag("qk_layernorm", default=True)
    attention = read_attention(
        fields,
        partial=rotary_factor(fields, 0.5),
        qk_norm="layer" if has_norms else "none",
        qkv_bias=True,
        output_bias=True,
    )
    return read_model(
        fields,
        default_context=16_384,
        attention=msgspec.structs.replace(attention, shares_head_norms=has_norms),
        feed_forward=read_feed_forward(fields, default="relu2", size=16_384, is_gated=False, has_bias=True),
        norm=read_layer_norm(fields, field="layer_norm_eps"),
        names=_NAMES,
    )
