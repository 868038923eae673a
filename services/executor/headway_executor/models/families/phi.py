"""Phi 1 to 2: layer norms, attention beside the feed-forward.

Phi-3 and Phi-4 have fused projections, and longrope up to the context before its scaling, as have the mixtures.
"""

from dataclasses import replace

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.attention_config import RopeConfig
from headway_executor.models.config import ExpertsConfig, ModelConfig, NormConfig
from headway_executor.models.families.mixtures import MIXTRAL_NAMES
from headway_executor.models.families.positions import read_long_rope, read_rope, rope_section, rotary_factor
from headway_executor.models.families.reading import (
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    read_rms_norm,
    refuse_partial_rotation,
    refuse_unless,
    window_of,
)
from headway_executor.models.families.routing import read_routing
from headway_executor.models.tensor_names import TensorNames
from headway_kernels.routing import Scoring

_CONTEXT = 4096
_LONG = ("longrope", "su", "yarn")
_NAMES = TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
_OLD_NAMES = TensorNames(
    final_norm="model.final_layernorm",
    output="self_attn.dense",
    gate_up=("mlp.fc1",),
    down="mlp.fc2",
    mlp_norm="input_layernorm",
)


def read_phi(fields: ConfigFields) -> ModelConfig:
    """``PhiForCausalLM``: biases everywhere, behind the head too."""
    refuse_unless(fields, "qk_layernorm", False)
    config = read_model(
        fields,
        default_context=2048,
        attention=read_attention(fields, partial=rotary_factor(fields, 0.5), qkv_bias=True, output_bias=True),
        feed_forward=read_feed_forward(fields, default="gelu_new", is_gated=False, has_bias=True),
        norm=NormConfig(eps=fields.number("layer_norm_eps", 1e-5), kind="layer", has_bias=True),
        names=_OLD_NAMES,
        is_parallel=True,
    )
    return msgspec.structs.replace(config, has_head_bias=True)


def read_phi3(fields: ConfigFields) -> ModelConfig:
    """``Phi3ForCausalLM``.

    Beyond the original context, longrope has other frequencies for all positions, also of keys that are cached: such
    sequences are not served.
    """
    attention = read_attention(fields, partial=rotary_factor(fields, 1.0))
    num_layers = num_layers_of(fields)
    context = fields.integer("max_position_embeddings", _CONTEXT)
    rope = _read_rope(fields, context, attention.rotary_dim // 2, "attention_factor", 10_000.0)
    return read_model(
        fields,
        default_context=_CONTEXT,
        context=min(context, rope.original_context) if rope.factors else context,
        attention=attention,
        feed_forward=read_feed_forward(fields),
        norm=read_rms_norm(fields, eps=1e-5),
        windows=[window_of(fields, None)] * num_layers,
        ropes=[rope] * num_layers,
        names=_NAMES,
    )


def read_phimoe(fields: ConfigFields) -> ModelConfig:
    """``PhimoeForCausalLM``: layer norms, biases, and two experts that have shares of near scores."""
    refuse_partial_rotation(fields)
    refuse_unless(fields, "num_experts_per_tok", 2)
    has_bias = fields.flag("attention_bias", default=False)
    attention = read_attention(fields, num_kv_heads=8, qkv_bias=has_bias, output_bias=has_bias)
    num_layers, context = num_layers_of(fields), fields.integer("max_position_embeddings", 131_072)
    rope = _read_rope(fields, context, attention.rotary_dim // 2, "short_mscale", 1e6)
    routing = read_routing(fields, ("num_local_experts", 16), chosen=2, is_normalised=False)
    jitter = fields.number("router_jitter_noise", 0.01)
    experts = ExpertsConfig(routing=replace(routing, scoring=Scoring.NEAR, tolerance=2 * jitter), names=MIXTRAL_NAMES)
    config = read_model(
        fields,
        default_context=131_072,
        context=min(context, rope.original_context) if rope.factors else context,
        attention=attention,
        feed_forward=msgspec.structs.replace(read_feed_forward(fields), experts=experts),
        norm=NormConfig(eps=fields.number("rms_norm_eps", 1e-5), kind="layer", has_bias=True),
        windows=[window_of(fields, None)] * num_layers,
        ropes=[rope] * num_layers,
    )
    return msgspec.structs.replace(config, has_head_bias=fields.flag("lm_head_bias", default=False))


def _read_rope(fields: ConfigFields, context: int, num_pairs: int, factor_field: str, theta: float) -> RopeConfig:
    """``factor_field`` is what cosines and sines are multiplied by; ``theta`` a default."""
    long = read_long_rope(
        fields, context, num_pairs, original=_CONTEXT, theta=theta, factor_field=factor_field, names=_LONG
    )
    if long is not None:
        return long
    section = rope_section(fields)
    field = "rope_type" if "rope_type" in section.values else "type"
    if section.values.get(field, "default") != "default":
        raise section.refuse(field, "default, longrope")
    return read_rope(fields, context, theta=theta)
