"""ERNIE 4.5: Llama with neighbouring channels rotated; the mixtures choose experts by corrected scores."""

from collections.abc import Sequence

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ExpertsConfig, FeedForwardConfig, ModelConfig
from headway_executor.models.families.reading import (
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    read_rms_norm,
    refuse_partial_rotation,
    refuse_unless,
)
from headway_executor.models.families.routing import read_routing
from headway_executor.models.tensor_names import ExpertNames, TensorNames

_NAMES = ExpertNames(correction="mlp.moe_statics.e_score_correction_bias")
_FURTHER_TOKENS = ("model.mtp_",)
"""Layers that predict further tokens, which nothing reads."""


def read_ernie(fields: ConfigFields) -> ModelConfig:
    """``Ernie4_5ForCausalLM``."""
    return _read(fields, read_feed_forward(fields, has_bias=fields.flag("use_bias", default=False)), 128, 2)


def read_ernie_moe(fields: ConfigFields) -> ModelConfig:
    """``Ernie4_5_MoeForCausalLM``: every so many layers between two has experts."""
    refuse_unless(fields, "use_bias", False)
    refuse_unless(fields, "moe_norm_min", 1e-12)
    dense, num_layers = read_feed_forward(fields), num_layers_of(fields)
    inner = fields.integer("moe_intermediate_size", 1536)
    routing = read_routing(fields, ("moe_num_experts", 64), chosen=6, is_normalised=True, chosen_field="moe_k")
    experts = ExpertsConfig(
        routing=routing,
        shared_size=inner * fields.integer("moe_num_shared_experts", 2, low=0, high=64),
        has_correction_row=True,
        names=_NAMES,
    )
    sparse = msgspec.structs.replace(dense, intermediate_size=inner, experts=experts)
    first, step = fields.integer("moe_layer_start_index", 1, low=0), fields.integer("moe_layer_interval", 1)
    last = fields.integer("moe_layer_end_index", -1, low=-1)
    ends = range(first, num_layers if last == -1 else last + 1)
    return _read(fields, [sparse if i in ends and (i + 1) % step == 0 else dense for i in range(num_layers)], None, 4)


def _read(
    fields: ConfigFields,
    feed_forward: FeedForwardConfig | Sequence[FeedForwardConfig],
    head_dim: int | None,
    num_kv_heads: int,
) -> ModelConfig:
    refuse_partial_rotation(fields)
    has_bias = fields.flag("use_bias", default=False)
    return read_model(
        fields,
        default_context=131_072,
        attention=read_attention(
            fields,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            is_interleaved=True,
            qkv_bias=has_bias,
            output_bias=has_bias,
        ),
        feed_forward=feed_forward,
        norm=read_rms_norm(fields, eps=1e-5),
        theta=500_000.0,
        names=TensorNames(ignored_prefixes=_FURTHER_TOKENS),
        tied=True,
    )
