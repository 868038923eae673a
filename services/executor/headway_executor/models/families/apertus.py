"""Apertus: a feed-forward without a gate, whose activation has numbers of its own in each layer."""

from collections.abc import Mapping

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import FeedForwardConfig, ModelConfig
from headway_executor.models.families.positions import rope_section
from headway_executor.models.families.reading import (
    read_attention,
    read_model,
    read_rms_norm,
    refuse_others,
    refuse_partial_rotation,
)
from headway_executor.models.tensor_names import TensorNames

_NAMES = TensorNames(
    gate_up=("mlp.up_proj",),
    attention_norm="attention_layernorm",
    mlp_norm="feedforward_layernorm",
    ignored=("mlp.act_fn.eps",),  # a millionth, from which on the curve is a line
)
_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_ONE_WAY: Mapping[str, object] = {"hidden_act": "xielu", "mlp_bias": False, "post_norm": False, "qk_norm": True}


def read_apertus(fields: ConfigFields) -> ModelConfig:
    """``ApertusForCausalLM``."""
    refuse_partial_rotation(fields)
    refuse_others(fields, _ONE_WAY)
    if not rope_section(fields).values:
        fields = ConfigFields(fields.source, {**fields.values, "rope_parameters": _ROPE})
    has_bias = fields.flag("attention_bias", default=False)
    return read_model(
        fields,
        default_context=65_536,
        attention=read_attention(fields, qk_norm="head", qkv_bias=has_bias, output_bias=has_bias),
        feed_forward=FeedForwardConfig(
            intermediate_size=fields.integer("intermediate_size"), activation="xielu", is_gated=False
        ),
        norm=read_rms_norm(fields, eps=1e-5),
        theta=12e6,
        names=_NAMES,
    )
