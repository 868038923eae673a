"""Molmo 2 (text): Qwen 3 or OLMo 3 by its fields, with queries, keys and values in one tensor, and ups before gates in one."""

from collections.abc import Container

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.attention_config import QkNorm, RopeConfig
from headway_executor.models.config import ModelConfig
from headway_executor.models.families.positions import read_rope, scaled_context
from headway_executor.models.families.reading import (
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    refuse_partial_rotation,
)
from headway_executor.models.families.routing import layers_named
from headway_executor.models.tensor_names import TensorNames

_CONTEXT = 36_864
_NAMES = TensorNames(
    embedding="model.transformer.wte.embedding",
    final_norm="model.transformer.ln_f",
    layer="model.transformer.blocks.{}.",
    qkv=("self_attn.att_proj",),
    output="self_attn.attn_out",
    gate_up=("mlp.ff_proj",),
    has_ups_first=True,
    down="mlp.ff_out",
    attention_norm="attn_norm",
    mlp_norm="ff_norm",
)
_NAMES_BEHIND = msgspec.structs.replace(
    _NAMES, attention_norm=None, attention_post_norm="attn_norm", mlp_norm=None, mlp_post_norm="ff_norm"
)
_NORMS: dict[str, QkNorm] = {"qwen3": "head", "olmo": "all"}


def read_molmo2(fields: ConfigFields) -> ModelConfig:
    """``Molmo2TextModel``. Nothing reads the embeddings of the tokens that stand for pictures, which are in a tensor apart."""
    refuse_partial_rotation(fields)
    fields = fields.renamed(attention_bias="qkv_bias", rms_norm_eps="layer_norm_eps")
    kind = fields.values.get("qk_norm_type") or "qwen3"
    if not isinstance(kind, str) or kind not in _NORMS:
        raise fields.refuse("qk_norm_type", " or ".join(_NORMS))
    num_layers = num_layers_of(fields)
    context = fields.integer("max_position_embeddings", _CONTEXT)
    rope = read_rope(fields, context)
    scaled: Container[int] = range(num_layers)
    if fields.values.get("rope_scaling_layers") is not None:
        scaled = layers_named(fields, "rope_scaling_layers", num_layers)
    plain = RopeConfig(theta=rope.theta)
    return read_model(
        fields,
        default_context=_CONTEXT,
        attention=read_attention(
            fields,
            head_dim=128,
            num_kv_heads=8,
            qk_norm=_NORMS[kind],
            qkv_bias=fields.flag("attention_bias", default=False),
        ),
        feed_forward=read_feed_forward(fields),
        ropes=[rope if index in scaled else plain for index in range(num_layers)],
        context=scaled_context(fields, rope, context),
        names=_NAMES_BEHIND if fields.flag("norm_after", default=False) else _NAMES,
    )
