"""LFM2: gated convolutions over a few tokens, and attention in some layers."""

import math
from collections.abc import Sequence

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import FeedForwardConfig, ModelConfig, NormConfig, RecurrenceConfig
from headway_executor.models.families.reading import (
    FULL,
    kinds_of,
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    refuse_partial_rotation,
)
from headway_executor.models.families.routing import layers_named, read_corrected
from headway_executor.models.tensor_names import ExpertNames, RecurrenceNames, TensorNames

_CONVOLUTION = "conv"

_NAMES = TensorNames(
    final_norm="model.embedding_norm",
    output="self_attn.out_proj",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
)
_EXPERT_NAMES = ExpertNames(
    router="feed_forward.gate",
    correction="feed_forward.expert_bias",
    expert="feed_forward.experts.{}.",
    gate_up=("w1", "w3"),
    down="w2",
)


def read_lfm2(fields: ConfigFields) -> ModelConfig:
    """``Lfm2ForCausalLM``."""
    return _read(fields, _feed_forward(fields))


def read_lfm2_moe(fields: ConfigFields) -> ModelConfig:
    """``Lfm2MoeForCausalLM``: experts behind the first layers."""
    experts = read_corrected(fields, ("num_experts", 32), chosen=4)
    names = _EXPERT_NAMES
    if not fields.flag("use_expert_bias", default=True):
        names = msgspec.structs.replace(names, correction=None)
    sparse = FeedForwardConfig(
        intermediate_size=fields.integer("moe_intermediate_size", 1792),
        experts=msgspec.structs.replace(experts, names=names),
    )
    first = fields.integer("num_dense_layers", 2, low=0)
    dense = read_feed_forward(fields)
    return _read(fields, [sparse if i >= first else dense for i in range(num_layers_of(fields))])


def _read(fields: ConfigFields, feed_forward: FeedForwardConfig | Sequence[FeedForwardConfig]) -> ModelConfig:
    refuse_partial_rotation(fields)
    return read_model(
        fields,
        default_context=128_000,
        theta=1e6,
        attention=read_attention(fields, qk_norm="head"),
        feed_forward=feed_forward,
        norm=NormConfig(eps=fields.number("norm_eps", 1e-5), rounds_first=True),
        recurrences=_recurrences(fields),
        names=_NAMES,
        tied=fields.flag("tie_embedding", default=True),
    )


def _recurrences(fields: ConfigFields) -> list[RecurrenceConfig | None]:
    """``layer_types``, or which layers have attention: ``full_attn_idxs``."""
    layers = range(num_layers_of(fields))
    has_names = fields.values.get("full_attn_idxs") is not None
    attending = layers_named(fields, "full_attn_idxs", len(layers)) if has_names else layers
    usual = [FULL if i in attending else _CONVOLUTION for i in layers]
    convolution = RecurrenceConfig(
        kind="gated",
        taps=fields.integer("conv_L_cache", 3, low=2),
        value_dim=fields.integer("hidden_size"),
        has_bias=(has_bias := fields.flag("conv_bias", default=False)),
        has_convolution_bias=has_bias,
        names=RecurrenceNames(inputs=("conv.in_proj",), convolution=("conv.conv",), output="conv.out_proj"),
    )
    return [convolution if kind == _CONVOLUTION else None for kind in kinds_of(fields, usual, (FULL, _CONVOLUTION))]


def _feed_forward(fields: ConfigFields) -> FeedForwardConfig:
    """Its width is given, or a multiple that is computed of it."""
    plain = read_feed_forward(fields)
    inner = fields.integer("block_ff_dim", plain.intermediate_size)
    if fields.flag("block_auto_adjust_ff_dim", default=True):
        inner = int(2 * inner / 3)
        if fields.values.get("block_ffn_dim_multiplier", 1.0) is not None:
            factor, multiple = fields.number("block_ffn_dim_multiplier", 1.0), fields.integer("block_multiple_of", 256)
            inner = multiple * math.ceil(int(factor * inner) / multiple)
    return FeedForwardConfig(intermediate_size=inner)
