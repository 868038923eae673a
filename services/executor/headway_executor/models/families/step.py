"""Step 3.5 and 3.7 (text): layers that differ in their heads and ropes, a gate for each head, experts with limits.

Files that are older than transformers' own model have a list for what differs by layer, also of the layers behind the last
one, which predict further tokens. Nothing reads these.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.attention_config import AttentionConfig
from headway_executor.models.config import ExpertsConfig, FeedForwardConfig, ModelConfig, NormConfig
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
    window_of,
    windows_of,
    with_attentions,
)
from headway_executor.models.families.routing import by_mlp_type, read_routing
from headway_executor.models.tensor_names import ExpertNames, TensorNames
from headway_kernels.routing import Scoring

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.g_proj")
_EXPERTS = ExpertNames(
    router="moe.gate",
    correction="moe.router_bias",
    expert="moe.experts.{}.",
    shared="share_expert.",
    stacks=("moe.gate_proj.weight", "moe.up_proj.weight", "moe.down_proj.weight"),
)
_CONTEXT, _FIRST_SPARSE = 128_000, 3
_ONE_WAY: Mapping[str, object] = {
    "mlp_bias": False,
    "use_bidirectional_attention": False,
    "use_head_wise_attn_gate": True,
    "use_moe_router_bias": True,
    "moe_router_activation": "sigmoid",
    "norm_expert_weight": True,
    "use_qk_norm": True,
    "zero_centered": True,
    "sink": False,
    "yarn_only_types": [FULL],
    "use_rope_layers": [],
}
"""Fields that have one value, most of them of older files."""


def read_step(fields: ConfigFields) -> ModelConfig:
    """``Step3p5ForCausalLM``, and the text of ``Step3p7ForConditionalGeneration``."""
    fields = fields.renamed(
        num_key_value_heads="num_attention_groups",
        n_routed_experts="moe_num_experts",
        num_experts_per_tok="moe_top_k",
        share_expert_dim="share_expert_dims",
    )
    refuse_others(fields, _ONE_WAY)
    count, context = num_layers_of(fields), fields.integer("max_position_embeddings", _CONTEXT)
    further = fields.integer("num_nextn_predict_layers", 0, low=0)
    kinds = layer_types_of(fields, [FULL] * count)
    sections = {kind: _rope_section(fields, kinds, kind) for kind in dict.fromkeys(kinds)}
    ropes = {kind: read_rope(section, context, section=section) for kind, section in sections.items()}
    heads = {FULL: fields.integer("num_attention_heads"), SLIDING: _heads_with_windows(fields)}
    attentions = {kind: _attention_of(fields, section, heads[kind]) for kind, section in sections.items()}
    own = {str(index): {"num_attention_heads": heads[kind]} for index, kind in enumerate(kinds) if kind == SLIDING}
    refuse_unless(fields, "per_layer_config", own)
    usual = attentions.get(FULL) or _attention_of(fields, sections[SLIDING], heads[FULL])
    model = read_model(
        fields,
        default_context=_CONTEXT,
        context=max(scaled_context(fields, rope, context) for rope in ropes.values()),
        attention=usual,
        feed_forward=_feeds_of(fields, count),
        norm=NormConfig(eps=fields.number("rms_norm_eps", 1e-5), offset=1.0),
        windows=windows_of(fields, kinds, window_of(fields, None)),
        ropes=[ropes[kind] for kind in kinds],
        names=TensorNames(qkv=_QKV, ignored_layers=further),
    )
    return with_attentions(model, [attentions[kind] for kind in kinds])


def _each(fields: ConfigFields, field: str, count: int) -> list[Any] | None:
    """A list with something for each layer, or None."""
    values = fields.values.get(field)
    further = fields.integer("num_nextn_predict_layers", 0, low=0)
    if values is None:
        return None
    if not isinstance(values, list) or len(values) not in (count, count + further):
        raise fields.refuse(field, f"a list of {count}, one for each layer")
    return values[:count]


def _rope_section(fields: ConfigFields, kinds: list[str], kind: str) -> ConfigFields:
    """Layers of a kind have one rope."""
    parameters = fields.section("rope_parameters")
    section = None if parameters is None else parameters.section(kind)
    if section is not None:
        return section
    values: dict[str, Any] = {"rope_type": "default"}
    for field, name in (("rope_theta", "rope_theta"), ("partial_rotary_factors", "partial_rotary_factor")):
        if not isinstance(fields.values.get(field), list):
            values |= {} if fields.values.get(field) is None else {name: fields.values[field]}
            continue
        of_layers = _each(fields, field, len(kinds)) or []
        own = [value for value, of_kind in zip(of_layers, kinds, strict=True) if of_kind == kind]
        if any(value != own[0] for value in own):
            raise fields.refuse(field, f"one number for all layers of {kind}")
        values[name] = own[0]
    scaling = fields.section("rope_scaling")
    if scaling is not None and kind == FULL:
        values |= scaling.values
    return ConfigFields(fields.source, values)


def _heads_with_windows(fields: ConfigFields) -> int:
    usual = fields.integer("num_attention_heads")
    other = fields.section("attention_other_setting")
    if other is None:
        return fields.integer("num_sliding_attention_heads", usual)
    width = fields.integer("head_dim", 128)
    refuse_others(
        other,
        {
            "attention_type": SLIDING,
            "num_attention_groups": fields.integer("num_key_value_heads", 8),
            "head_dim": width,
            "true_head_dim": width,
        },
    )
    return fields.integer("num_sliding_attention_heads", other.integer("num_attention_heads", usual))


def _attention_of(fields: ConfigFields, rope: ConfigFields, num_heads: int) -> AttentionConfig:
    has_bias = fields.flag("attention_bias", default=False)
    read = read_attention(
        ConfigFields(fields.source, {**fields.values, "num_attention_heads": num_heads}),
        head_dim=128,
        num_kv_heads=8,
        partial=rope.number("partial_rotary_factor", 1.0),
        qk_norm="head",
        qkv_bias=has_bias,
        output_bias=has_bias,
    )
    scale = fields.number("query_pre_attn_scalar", float(read.head_dim)) ** -0.5
    return msgspec.structs.replace(read, scale=scale, gates="of_heads")


def _feeds_of(fields: ConfigFields, count: int) -> list[FeedForwardConfig]:
    """Of each layer; a dense one has the limit of shared experts."""
    dense = read_feed_forward(fields, size=11_264)
    routing = read_routing(fields, ("n_routed_experts", 288), chosen=8, is_normalised=True)
    scaling = fields.number("moe_router_scaling_factor", 1.0)
    experts = ExpertsConfig(
        routing=replace(routing, scoring=Scoring.SIGMOID, scaling=scaling),
        shared_size=fields.integer("share_expert_dim", 1280),
        stack="apart",
        names=_EXPERTS,
    )
    inner = fields.integer("moe_intermediate_size", 1280)
    sparse = msgspec.structs.replace(dense, intermediate_size=inner, experts=experts)
    kinds = _each(fields, "mlp_layer_types", count)
    named = ConfigFields(fields.source, {**fields.values, "mlp_layer_types": kinds})
    feeds = by_mlp_type(named, dense, sparse, [index in _sparse_layers(fields, count) for index in range(count)])
    limits, of_shared = (_limits_of(fields, field, count) for field in ("swiglu_limits", "swiglu_limits_shared"))
    if any(limit < math.inf for limit in (*limits, *of_shared)) and dense.activation != "silu":
        raise fields.refuse("hidden_act", "silu, with limits")
    return [_limited(feed, *pair) for feed, *pair in zip(feeds, limits, of_shared, strict=True)]


def _sparse_layers(fields: ConfigFields, count: int) -> frozenset[int]:
    """Older files have a list of numbers, or a text of such."""
    field = "moe_layers_enum"
    named = fields.values.get(field)
    if named is None:
        return frozenset(range(_FIRST_SPARSE, count))
    items = named.split(",") if isinstance(named, str) else named
    if not isinstance(items, list) or not all(str(item).strip().isdecimal() for item in items):
        raise fields.refuse(field, "a list of layers, or their numbers with commas between")
    return frozenset(int(item) for item in items)


def _limits_of(fields: ConfigFields, field: str, count: int) -> list[float]:
    """A null or 0 is none."""
    values = _each(fields, field, count) or [None] * count
    section = {str(index): value or None for index, value in enumerate(values)}
    limits = ConfigFields(f"{fields.source}: {field}", section)
    return [limits.number(index, math.inf) for index in section]


def _limited(feed: FeedForwardConfig, limit: float, shared_limit: float) -> FeedForwardConfig:
    own = shared_limit if feed.experts is None else limit
    if min(own, shared_limit) == math.inf:
        return feed
    experts = feed.experts
    if experts is not None:
        experts = msgspec.structs.replace(experts, shared_limit=shared_limit)
    return msgspec.structs.replace(feed, activation="limited_silu", limit=own, experts=experts)
