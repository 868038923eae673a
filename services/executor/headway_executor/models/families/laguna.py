"""Laguna: gates of heads by softplus behind attention, layers that differ in their heads and ropes, experts."""

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.attention_config import AttentionConfig, Gates
from headway_executor.models.config import ExpertsConfig, FeedForwardConfig, ModelConfig
from headway_executor.models.families.positions import read_rope, scaled_context
from headway_executor.models.families.reading import (
    FULL,
    SLIDING,
    layer_types_of,
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    refuse_others,
    refuse_unless,
    windows_of,
    with_attentions,
)
from headway_executor.models.families.routing import by_mlp_type, read_routing
from headway_executor.models.tensor_names import ExpertNames, TensorNames
from headway_kernels.routing import Scoring

_NAMES = TensorNames(qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.g_proj"))
_EXPERTS = ExpertNames(correction="mlp.experts.e_score_correction_bias", shared="mlp.shared_expert.")
_CONTEXT = 131_072
_ROPES: Mapping[str, Mapping[str, object]] = {
    FULL: {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}
_GATES: Mapping[object, Gates] = {True: "of_heads", "per-head": "of_heads", "per-element": "apart"}
_ONE_WAY: Mapping[str, object] = {
    "moe_apply_router_weight_on_input": False,
    "moe_router_logit_softcapping": 0.0,
    "moe_router_use_sigmoid": True,
    "norm_topk_prob": True,
    "qkv_bias": False,
}
"""Fields that have one value, also of files that are older than transformers' own model."""


def read_laguna(fields: ConfigFields) -> ModelConfig:
    """``LagunaForCausalLM``."""
    refuse_others(fields, _ONE_WAY)
    count, context = num_layers_of(fields), fields.integer("max_position_embeddings", _CONTEXT)
    kinds = layer_types_of(fields, [FULL] * count)
    sections = {kind: _rope_section(fields, kind) for kind in _ROPES}
    ropes = {kind: read_rope(fields, context, section=section) for kind, section in sections.items()}
    usual = _attention_of(fields, sections[FULL], fields.integer("num_attention_heads"))
    attentions = [
        _attention_of(fields, sections[kind], heads)
        for kind, heads in zip(kinds, _heads_of(fields, count), strict=True)
    ]
    model = read_model(
        fields,
        default_context=_CONTEXT,
        context=max(scaled_context(fields, ropes[kind], context) for kind in kinds),
        attention=usual,
        feed_forward=_feeds_of(fields, count),
        windows=windows_of(fields, kinds, fields.integer("sliding_window", 512)),
        ropes=[ropes[kind] for kind in kinds],
        names=_NAMES,
    )
    return with_attentions(model, attentions)


def _rope_section(fields: ConfigFields, kind: str) -> ConfigFields:
    parameters = fields.section("rope_parameters")
    if parameters is None:
        return ConfigFields(fields.source, {"rope_type": "default", **_ROPES[kind]})
    section = parameters.section(kind) or ConfigFields(parameters.source, {})
    return ConfigFields(section.source, {"partial_rotary_factor": 1.0, **section.values})


def _heads_of(fields: ConfigFields, count: int) -> list[int]:
    """How many of each layer."""
    field = "num_attention_heads_per_layer"
    heads = fields.values.get(field)
    if heads is None:
        return [fields.integer("num_attention_heads")] * count
    if not isinstance(heads, list) or len(heads) != count:
        raise fields.refuse(field, f"a list of {count} numbers")
    return [int(number) for number in fields.numbers(field, count)]


def _attention_of(fields: ConfigFields, rope: ConfigFields, num_heads: int) -> AttentionConfig:
    gating = fields.values.get("gating", True)
    if not isinstance(gating, bool | str) or gating not in _GATES:
        raise fields.refuse("gating", "true, per-head, per-element")
    refuse_unless(fields, "attention_bias", False)  # Gates have none.
    read = read_attention(
        ConfigFields(fields.source, {**fields.values, "num_attention_heads": num_heads}),
        head_dim=128,
        num_kv_heads=8,
        partial=rope.number("partial_rotary_factor"),
        qk_norm="head",
    )
    return msgspec.structs.replace(read, gates=_GATES[gating], gate_kind="softplus")


def _feeds_of(fields: ConfigFields, count: int) -> list[FeedForwardConfig]:
    dense = read_feed_forward(fields)
    routing = read_routing(fields, ("num_experts", 256), chosen=8, is_normalised=True)
    routing = replace(routing, scoring=Scoring.SIGMOID, scaling=fields.number("moe_routed_scaling_factor", 1.0))
    shared_size = fields.integer("shared_expert_intermediate_size", 512)
    experts = ExpertsConfig(routing=routing, shared_size=shared_size, names=_EXPERTS)
    inner = fields.integer("moe_intermediate_size", 512)
    sparse = msgspec.structs.replace(dense, intermediate_size=inner, experts=experts)
    return by_mlp_type(fields, dense, sparse, [index > 0 for index in range(count)])
