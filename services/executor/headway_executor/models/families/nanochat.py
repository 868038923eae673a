"""NanoChat: norms without weights, also of embeddings and of rotated queries and keys; rotations turn back."""

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig, NormConfig, Scalings
from headway_executor.models.families.reading import (
    read_attention,
    read_feed_forward,
    read_model,
    refuse_partial_rotation,
)
from headway_executor.models.tensor_names import TensorNames

_SOFTCAP = 15.0
_NAMES = TensorNames(embedding_norm="model.norm", gate_up=("mlp.fc1",), down="mlp.fc2")


def read_nanochat(fields: ConfigFields) -> ModelConfig:
    """``NanoChatForCausalLM``."""
    refuse_partial_rotation(fields)
    has_bias = fields.flag("attention_bias", default=False)
    attention = read_attention(fields, qk_norm="plain", qkv_bias=has_bias, output_bias=has_bias)
    bounds = "final_logit_softcapping" in fields.values
    softcap = fields.optional_number("final_logit_softcapping") if bounds else _SOFTCAP
    return read_model(
        fields,
        default_context=2048,
        attention=msgspec.structs.replace(attention, turns_back=True, norms_rotated=True),
        feed_forward=read_feed_forward(fields, default="relu2", size=8192, is_gated=False),
        norm=NormConfig(eps=fields.number("rms_norm_eps", 1e-6), has_weight=False),
        names=_NAMES,
        scalings=Scalings(logits_softcap=softcap),
    )
