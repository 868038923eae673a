"""LFM2 and LFM3: gated convolutions over a few tokens, and attention in some layers."""

import math
from collections.abc import Sequence

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import FeedForwardConfig, ModelConfig, NormConfig, RecurrenceConfig
from headway_executor.models.families.gemma4 import ropes_of
from headway_executor.models.families.reading import (
    FULL,
    SLIDING,
    kinds_of,
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    refuse_partial_rotation,
    refuse_unless,
    window_of,
    windows_of,
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
_NAMES3 = TensorNames(
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.gate_proj"),
    final_norm="model.embedding_norm",
    attention_norm="operator_norm",
    in_transformers=(("self_attn.g_proj.", "self_attn.gate_proj."),),
    attention_post_norm="post_operator_norm",
    mlp_norm="ffn_norm",
    mlp_post_norm="post_ffn_norm",
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
    dense = FeedForwardConfig(intermediate_size=fields.integer("intermediate_size"))
    return _read(fields, [sparse if i >= first else dense for i in range(num_layers_of(fields))])


def read_lfm3(fields: ConfigFields) -> ModelConfig:
    """``Lfm3ForCausalLM``: windows in half of the layers with attention, gates of heads, norms before and behind."""
    refuse_unless(fields, "attention_bias", False)  # Gates have none.
    names, attention = _NAMES3, read_attention(fields, head_dim=128, num_kv_heads=4, qk_norm="head")
    if fields.flag("use_attention_gate", default=True):
        attention = msgspec.structs.replace(attention, gates="of_heads")
    else:
        names = msgspec.structs.replace(names, qkv=names.qkv[:3])
    if not fields.flag("use_sandwich_norm", default=True):
        names = msgspec.structs.replace(names, attention_post_norm=None, mlp_post_norm=None)
    usual = [
        FULL if i % 4 == 2 else SLIDING if i and i % 4 == 0 else _CONVOLUTION for i in range(num_layers_of(fields))
    ]
    kinds = kinds_of(fields, usual, (FULL, SLIDING, _CONVOLUTION))
    convolution = _convolution(fields, 7)
    return read_model(
        fields,
        default_context=128_000,
        attention=attention,
        feed_forward=FeedForwardConfig(intermediate_size=fields.integer("intermediate_size")),
        norm=NormConfig(eps=fields.number("norm_eps", 1e-5), rounds_first=True),
        windows=windows_of(fields, kinds, window_of(fields, 256)),
        ropes=ropes_of(fields, kinds, 0.5),
        recurrences=[convolution if kind == _CONVOLUTION else None for kind in kinds],
        names=names,
        tied=True,
    )


def _read(fields: ConfigFields, feed_forward: FeedForwardConfig | Sequence[FeedForwardConfig]) -> ModelConfig:
    refuse_partial_rotation(fields)
    return read_model(
        fields,
        default_context=128_000,
        theta=1e6,
        attention=read_attention(fields, num_kv_heads=8, qk_norm="head"),
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
    convolution = _convolution(fields, 3)
    return [convolution if kind == _CONVOLUTION else None for kind in kinds_of(fields, usual, (FULL, _CONVOLUTION))]


def _convolution(fields: ConfigFields, taps: int) -> RecurrenceConfig:
    """``taps`` is a default."""
    return RecurrenceConfig(
        kind="gated",
        taps=fields.integer("conv_L_cache", taps, low=2),
        value_dim=fields.integer("hidden_size"),
        has_bias=(has_bias := fields.flag("conv_bias", default=False)),
        has_convolution_bias=has_bias,
        names=RecurrenceNames(inputs=("conv.in_proj",), convolution=("conv.conv",), output="conv.out_proj"),
    )


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
