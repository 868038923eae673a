"""Llama 4 (text): attention in chunks, layers without positions whose queries grow, experts that get weighed inputs."""

from dataclasses import replace

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.attention_config import QueryGrowth
from headway_executor.models.config import ExpertsConfig, ModelConfig
from headway_executor.models.families.positions import read_rope
from headway_executor.models.families.reading import (
    CHUNKED,
    FULL,
    layer_types_of,
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    read_rms_norm,
    refuse_partial_rotation,
)
from headway_executor.models.families.routing import layers_named, read_routing
from headway_executor.models.families.smollm import rotating_layers
from headway_executor.models.tensor_names import ExpertNames, TensorNames
from headway_kernels.routing import Scoring

_NAMES = TensorNames(gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"), down="feed_forward.down_proj")
_EXPERT_NAMES = ExpertNames(
    router="feed_forward.router", expert="feed_forward.experts.{}.", shared="feed_forward.shared_expert."
)
_CONTEXT = 131_072
_STEP = 8192
_THETA = 500_000.0


def read_llama4(fields: ConfigFields) -> ModelConfig:
    """``Llama4ForCausalLM``."""
    refuse_partial_rotation(fields)
    has_bias = fields.flag("attention_bias", default=False)
    rotates = rotating_layers(fields)
    kinds = layer_types_of(fields, [CHUNKED if rotated else FULL for rotated in rotates])
    if not {CHUNKED, FULL}.issuperset(kinds):
        raise fields.refuse("layer_types", f"{CHUNKED}, {FULL}")
    rope = read_rope(fields, fields.integer("max_position_embeddings", _CONTEXT), theta=_THETA)
    is_normed = fields.flag("use_qk_norm", default=True)
    if is_normed:  # behind the rotation, so that its length does not count
        rope = msgspec.structs.replace(rope, attention_factor=1.0)
    dense = read_feed_forward(fields)
    routing = read_routing(fields, ("num_local_experts", 16), chosen=1, is_normalised=False)
    experts = ExpertsConfig(
        routing=replace(routing, scoring=Scoring.SIGMOID, weighs_inputs=True),
        shared_size=dense.intermediate_size,
        names=_EXPERT_NAMES,
    )
    sparse = msgspec.structs.replace(dense, experts=experts)
    dense = msgspec.structs.replace(dense, intermediate_size=fields.integer("intermediate_size_mlp", 16_384))
    with_experts = _sparse_layers(fields)
    config = read_model(
        fields,
        default_context=_CONTEXT,
        attention=read_attention(
            fields,
            head_dim=128,
            num_kv_heads=8,
            is_interleaved=True,
            qk_norm="plain_if_rotated" if is_normed else "none",
            qkv_bias=has_bias,
            output_bias=has_bias,
        ),
        feed_forward=[sparse if i in with_experts else dense for i in range(len(rotates))],
        norm=read_rms_norm(fields, eps=1e-5),
        ropes=[rope if rotated else None for rotated in rotates],
        names=_NAMES,
    )
    chunk, growth = fields.integer("attention_chunk_size", _STEP), _growth(fields)
    layers = (
        msgspec.structs.replace(
            layer, chunk=chunk if kind == CHUNKED else None, query_growth=growth if layer.rope is None else None
        )
        for layer, kind in zip(config.layers, kinds, strict=True)
    )
    return msgspec.structs.replace(config, layers=tuple(layers))


def _growth(fields: ConfigFields) -> QueryGrowth | None:
    """Published files have 4 for true."""
    if fields.values.get("attn_temperature_tuning") != 4 and not fields.flag("attn_temperature_tuning", default=True):
        return None
    return QueryGrowth(beta=fields.number("attn_scale", 0.1), step=fields.integer("floor_scale", _STEP), first=1)


def _sparse_layers(fields: ConfigFields) -> frozenset[int]:
    num_layers = num_layers_of(fields)
    if fields.values.get("moe_layers") is not None:
        return layers_named(fields, "moe_layers", num_layers)
    step = fields.integer("interleave_moe_layer_step", 1)
    return frozenset(range(step - 1, num_layers, step))
