"""Muse Glimmer (text): gates behind attention, norms before and behind, of embeddings too, layers without positions."""

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig, NormConfig, Scalings
from headway_executor.models.families.positions import layer_thetas, read_rope
from headway_executor.models.families.reading import (
    FULL,
    SLIDING,
    layer_types_of,
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    refuse_partial_rotation,
    refuse_unless,
    window_of,
    windows_of,
)
from headway_executor.models.tensor_names import TensorNames

_NAMES = TensorNames(
    embedding_norm="model.embed_tokens.embed_norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.gate_proj"),
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
_CONTEXT, _WINDOW, _PATTERN = 131_072, 2048, 4


def read_muse_glimmer(fields: ConfigFields) -> ModelConfig:
    """``MuseGlimmerForCausalLM``."""
    refuse_partial_rotation(fields)
    refuse_unless(fields, "attention_bias", False)  # gates have none
    is_far = [i % _PATTERN == 0 for i in reversed(range(num_layers_of(fields)))]
    kinds = layer_types_of(fields, [FULL if far else SLIDING for far in is_far])
    attention = read_attention(fields, head_dim=128, num_kv_heads=2, qk_norm="plain")
    scale = attention.scale * fields.number("qk_scale_factor", 3.87)
    return read_model(
        fields,
        default_context=_CONTEXT,
        attention=msgspec.structs.replace(attention, scale=scale, gates="apart"),
        feed_forward=read_feed_forward(fields, field="hidden_activation"),
        norm=NormConfig(
            eps=fields.number("rms_norm_eps", 1e-5),
            offset=1.0,
            final_offset=0.0,
            embedding_has_weight=False,
            post_eps=fields.number("post_norm_eps", 1e-8),
        ),
        windows=windows_of(fields, kinds, window_of(fields, _WINDOW)),
        rotates=_rotates(fields, [not far for far in is_far]),
        names=_NAMES,
        scalings=Scalings(
            logits=fields.number("output_multiplier", 0.19611613513818404),
            logits_softcap=fields.number("final_logit_softcapping", 20.0),
        ),
    )


def _rotates(fields: ConfigFields, default: list[bool]) -> list[bool]:
    """Which layers have the rope; transformers rotates by the theta of the file, whatever a layer's own is but 0."""
    thetas = layer_thetas(fields, len(default))
    theta = read_rope(fields, fields.integer("max_position_embeddings", _CONTEXT)).theta
    if not {*thetas} <= {None, 0.0, theta}:
        raise fields.refuse("layer_rope_theta", f"a list of numbers, each 0 or rope_theta, {theta:g}")
    return [usual if own is None else own > 0 for own, usual in zip(thetas, default, strict=True)]
