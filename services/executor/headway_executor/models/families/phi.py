"""Phi 1 to 2: layer norms, attention beside the feed-forward.

Phi-3 and Phi-4 have fused projections, and longrope up to the context before its scaling.
"""

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig, NormConfig, RopeConfig, TensorNames
from headway_executor.models.families.positions import original_context_of, read_rope, rope_section, rotary_factor
from headway_executor.models.families.reading import (
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    read_rms_norm,
    refuse_unless,
    window_of,
)

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
    rope = _read_rope(fields, context, attention.rotary_dim // 2)
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


def _read_rope(fields: ConfigFields, context: int, num_pairs: int) -> RopeConfig:
    section = rope_section(fields)
    field = "rope_type" if "rope_type" in section.values else "type"
    kind = section.values.get(field, "default")
    if kind == "default":
        return read_rope(fields, context)
    if kind not in _LONG:
        raise section.refuse(field, "default, longrope")
    original = original_context_of(fields, section, _CONTEXT)
    return RopeConfig(
        kind="longrope",
        theta=section.number("rope_theta", fields.number("rope_theta", 10_000.0)),
        factor=section.number("factor", context / original),
        original_context=original,
        attention_factor=section.optional_number("attention_factor"),
        factors=section.numbers("short_factor", num_pairs),
    )
