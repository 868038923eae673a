"""gpt-oss: attention sinks, a window in every second layer, biases everywhere, experts in one tensor."""

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ExpertsConfig, ModelConfig, NormConfig
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
from headway_executor.models.families.routing import read_routing
from headway_executor.models.tensor_names import ExpertNames, TensorNames

_NAMES = TensorNames(sinks="self_attn.sinks")
_EXPERT_NAMES = ExpertNames(router="mlp.router")
_WINDOW = 128


def read_gpt_oss(fields: ConfigFields) -> ModelConfig:
    """``GptOssForCausalLM``."""
    refuse_partial_rotation(fields)
    refuse_unless(fields, "hidden_act", "silu")
    refuse_unless(fields, "swiglu_alpha", 1.702)
    refuse_unless(fields, "swiglu_limit", 7.0)
    if fields.section("rope_scaling") is None and fields.section("rope_parameters") is None:
        raise fields.refuse("rope_scaling", "an object")
    has_bias = fields.flag("attention_bias", default=True)
    experts = ExpertsConfig(
        routing=read_routing(fields, ("num_local_experts", 128), chosen=4, is_normalised=True),
        has_router_bias=True,
        stack="pairs",
        names=_EXPERT_NAMES,
    )
    feed = msgspec.structs.replace(
        read_feed_forward(fields), activation="clamped_swish", has_bias=True, experts=experts
    )
    kinds = layer_types_of(fields, [FULL if i % 2 else SLIDING for i in range(num_layers_of(fields))])
    return read_model(
        fields,
        default_context=131_072,
        theta=150_000.0,
        attention=read_attention(fields, head_dim=64, num_kv_heads=8, qkv_bias=has_bias, output_bias=has_bias),
        feed_forward=feed,
        norm=NormConfig(eps=fields.number("rms_norm_eps", 1e-5)),
        windows=windows_of(fields, kinds, window_of(fields, _WINDOW)),
        names=_NAMES,
    )
