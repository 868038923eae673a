"""GLM 4 to 4.7: a part of each head rotated, biases; in GLM 4.5 and later, and Solar, experts as DeepSeek V3 has them."""

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig
from headway_executor.models.families.positions import rotary_factor
from headway_executor.models.families.reading import (
    read_attention,
    read_feed_forward,
    read_model,
    read_rms_norm,
    refuse_unless,
)
from headway_executor.models.families.routing import behind_dense_layers, read_corrected
from headway_executor.models.tensor_names import TensorNames

_PARTIAL = 0.5
_CONTEXT = 131_072
_NAMES = TensorNames(gate_up=("mlp.gate_up_proj",))
_NAMES_4 = TensorNames(
    gate_up=("mlp.gate_up_proj",),
    attention_post_norm="post_self_attn_layernorm",
    mlp_post_norm="post_mlp_layernorm",
)


def read_glm(fields: ConfigFields) -> ModelConfig:
    """``GlmForCausalLM``."""
    return _read(fields, _NAMES)


def read_glm4(fields: ConfigFields) -> ModelConfig:
    """``Glm4ForCausalLM``: with norms behind attention and feed-forward, too."""
    return _read(fields, _NAMES_4)


def _read(fields: ConfigFields, names: TensorNames) -> ModelConfig:
    """Nothing reads the layer of GLM-OCR that predicts further tokens."""
    return read_model(
        fields,
        default_context=_CONTEXT,
        attention=read_attention(
            fields,
            head_dim=None if "head_dim" in fields.values else 128,  # GLM-4V has null
            num_kv_heads=2,
            partial=rotary_factor(fields, _PARTIAL),
            is_interleaved=True,
            qkv_bias=fields.flag("attention_bias", default=True),
        ),
        feed_forward=read_feed_forward(fields),
        norm=read_rms_norm(fields, eps=1.5625e-07),
        names=msgspec.structs.replace(names, ignored_layers=fields.integer("num_nextn_predict_layers", 0, low=0)),
    )


def read_glm4_moe(fields: ConfigFields) -> ModelConfig:
    """``Glm4MoeForCausalLM``. Nothing reads its layers that predict further tokens."""
    experts = read_corrected(fields, ("n_routed_experts", 128))
    return read_model(
        fields,
        default_context=_CONTEXT,
        attention=read_attention(
            fields,
            num_kv_heads=8,
            partial=rotary_factor(fields, _PARTIAL),
            qk_norm="head" if fields.flag("use_qk_norm", default=False) else "none",
            qkv_bias=fields.flag("attention_bias", default=False),
        ),
        feed_forward=behind_dense_layers(fields, experts, size=1408, shared=1, first=1),
        norm=read_rms_norm(fields, eps=1e-5),
        names=TensorNames(ignored_layers=fields.integer("num_nextn_predict_layers", 1, low=0)),
    )


def read_solar_open(fields: ConfigFields) -> ModelConfig:
    """``SolarOpenForCausalLM``: whole heads rotated, and experts in all layers."""
    refuse_unless(fields, "first_k_dense_replace", 0)
    size = fields.integer("moe_intermediate_size", 1280)  # Files need not say how wide a dense layer would be.
    fields = ConfigFields(fields.source, {"intermediate_size": size, **fields.values})
    experts = read_corrected(fields, ("n_routed_experts", 128))
    return read_model(
        fields,
        default_context=_CONTEXT,
        attention=read_attention(
            fields,
            head_dim=128,
            num_kv_heads=8,
            partial=rotary_factor(fields, 1.0),
            qkv_bias=fields.flag("attention_bias", default=False),
        ),
        feed_forward=behind_dense_layers(fields, experts, size=size, shared=1, first=0),
        norm=read_rms_norm(fields, eps=1e-5),
        theta=1e6,
    )
