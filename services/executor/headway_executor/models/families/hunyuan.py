"""Hunyuan: norms of heads behind their rotation; the mixtures have one shared expert. Hunyuan V3 is a mixture of another kind."""

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.attention_config import RopeConfig
from headway_executor.models.config import ExpertsConfig, FeedForwardConfig, ModelConfig
from headway_executor.models.families.positions import THETA, rope_section
from headway_executor.models.families.reading import (
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    read_rms_norm,
    refuse_others,
    refuse_partial_rotation,
)
from headway_executor.models.families.routing import behind_dense_layers, read_routing
from headway_executor.models.tensor_names import ExpertNames, TensorNames
from headway_kernels.routing import Scoring

_NAMES = TensorNames(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")
_EXPERT_NAMES = ExpertNames(router="mlp.gate.wg", shared="mlp.shared_mlp.")
_EXPERT_NAMES_OF_V3 = ExpertNames(router="mlp.router.gate", correction="mlp.expert_bias", shared="mlp.shared_mlp.")
_ONE_WAY: Mapping[str, object] = {
    "mlp_bias": False,
    "qk_norm": True,
    "route_norm": True,
    "moe_router_use_sigmoid": True,
    "moe_router_enable_expert_bias": True,
}
"""Fields that have one value, also of files that are older than transformers' own model."""
_BY_LAYER = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")


def read_hunyuan(fields: ConfigFields) -> ModelConfig:
    """``HunYuanDenseV1ForCausalLM``."""
    return _read(fields, read_feed_forward(fields))


def read_hunyuan_moe(fields: ConfigFields) -> ModelConfig:
    """``HunYuanMoEV1ForCausalLM``. Some numbers may be lists, with one for each layer, and have to be equal there."""
    fields = _with_one_number(fields)
    dense = read_feed_forward(fields)
    refuse_others(
        fields,
        {
            "moe_intermediate_size": dense.intermediate_size,
            "num_shared_expert": 1,
            "use_mixed_mlp_moe": True,
            "moe_layer_num_skipped": 0,
            "norm_topk_prob": True,
        },
    )
    routing = read_routing(fields, ("num_experts", 1), chosen=1, is_normalised=True, chosen_field="moe_topk")
    experts = ExpertsConfig(routing=routing, shared_size=dense.intermediate_size, names=_EXPERT_NAMES)
    return _read(fields, msgspec.structs.replace(dense, experts=experts))


def read_hunyuan_v3(fields: ConfigFields) -> ModelConfig:
    """``HYV3ForCausalLM``: experts by corrected sigmoid scores, norms of queries and keys before their rotation.

    Nothing reads its layers that predict further tokens.
    """
    refuse_partial_rotation(fields)
    refuse_others(fields, _ONE_WAY)
    routing = read_routing(fields, ("num_experts", 192), chosen=8, is_normalised=True)
    routing = replace(routing, scoring=Scoring.SIGMOID, scaling=fields.number("router_scaling_factor", 2.826))
    experts = ExpertsConfig(routing=routing, names=_EXPERT_NAMES_OF_V3)
    has_bias = fields.flag("attention_bias", default=False)
    return read_model(
        fields,
        default_context=131_072,
        theta=11_158_840.0,
        attention=read_attention(
            fields, head_dim=128, num_kv_heads=8, qk_norm="head", qkv_bias=has_bias, output_bias=has_bias
        ),
        feed_forward=behind_dense_layers(
            fields, experts, size=1536, shared=1, shared_field="num_shared_experts", first=1
        ),
        norm=read_rms_norm(fields, eps=1e-5),
        names=TensorNames(ignored_layers=fields.integer("num_nextn_predict_layers", 1, low=0)),
    )


def _with_one_number(fields: ConfigFields) -> ConfigFields:
    values = dict(fields.values)
    for field in _BY_LAYER:
        of_layers = values.get(field)
        if not isinstance(of_layers, list):
            continue
        if not of_layers or any(value != of_layers[0] for value in of_layers):
            raise fields.refuse(field, "a number, or a list of equal ones")
        values[field] = of_layers[0]
    return ConfigFields(fields.source, values)


def _read(fields: ConfigFields, feed_forward: FeedForwardConfig) -> ModelConfig:
    refuse_partial_rotation(fields)
    refuse_others(fields, {"use_qk_norm": True, "use_cla": False, "use_mla": False})
    has_bias = fields.flag("attention_bias", default=False)
    attention = read_attention(fields, qk_norm="head", qkv_bias=has_bias, output_bias=has_bias)
    rope = _stretched(fields, attention.head_dim)
    return read_model(
        fields,
        default_context=2048,
        attention=msgspec.structs.replace(attention, norms_rotated=True),
        feed_forward=feed_forward,
        norm=read_rms_norm(fields, eps=1e-5),
        ropes=None if rope is None else [rope] * num_layers_of(fields),
        names=_NAMES,
    )


def _stretched(fields: ConfigFields, head_dim: int) -> RopeConfig | None:
    """With ``alpha``, what is called dynamic has one theta for any length."""
    section = rope_section(fields)
    kind = section.values.get("rope_type", section.values.get("type"))
    alpha = section.values.get("alpha")
    if kind != "dynamic" or not alpha:
        return None
    theta = section.number("rope_theta", fields.number("rope_theta", THETA))
    return RopeConfig(theta=theta * section.number("alpha") ** (head_dim / (head_dim - 2)))
