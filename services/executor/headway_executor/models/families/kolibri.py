"""Kolibri 1: experts beside a shared one, norms of heads, norms before and behind; only layers with windows have positions."""

from dataclasses import replace

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ExpertsConfig, ModelConfig
from headway_executor.models.families.mixtures import count_field
from headway_executor.models.families.reading import (
    FULL,
    SLIDING,
    layer_types_of,
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    refuse_others,
    refuse_partial_rotation,
    window_of,
    windows_of,
)
from headway_executor.models.families.routing import read_routing
from headway_executor.models.tensor_names import ExpertNames, TensorNames
from headway_kernels.routing import Scoring

_NAMES = TensorNames(attention_post_norm="post_attn_norm", mlp_post_norm="post_ffn_norm")


def read_kolibri1(fields: ConfigFields) -> ModelConfig:
    """``Kolibri1ForCausalLM``. Without a window at all, every layer has positions."""
    refuse_partial_rotation(fields)
    refuse_others(fields, {"attention_bias": False, "decoder_sparse_step": 1})
    window = window_of(fields, 513)
    kinds = layer_types_of(fields, [SLIDING if (i + 1) % 5 else FULL for i in range(num_layers_of(fields))])
    inner = fields.integer("moe_intermediate_size", 512)
    fields = ConfigFields(fields.source, {**fields.values, "intermediate_size": inner})
    is_normalised = fields.flag("norm_topk_prob", default=False)
    routing = read_routing(fields, (count_field(fields), 384), chosen=6, is_normalised=is_normalised)
    experts = ExpertsConfig(
        routing=replace(routing, scoring=Scoring.SIGMOID, corrects_outputs=True),
        shared_size=fields.integer("shared_expert_intermediate_size", 512),
        names=ExpertNames(correction="moe.router.expert_bias"),
    )
    return read_model(
        fields,
        default_context=262_144,
        attention=read_attention(fields, head_dim=128, num_kv_heads=4, qk_norm="head"),
        feed_forward=msgspec.structs.replace(read_feed_forward(fields), experts=experts),
        windows=windows_of(fields, kinds, window),
        rotates=[window is None or kind == SLIDING for kind in kinds],
        names=_NAMES,
    )
