"""BitNet: norms before the projections behind attention and within the feed-forward, for weights of three values."""

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig
from headway_executor.models.families.reading import (
    read_attention,
    read_feed_forward,
    read_model,
    read_rms_norm,
    refuse_partial_rotation,
)
from headway_executor.models.tensor_names import TensorNames

_NAMES = TensorNames(output_norm="self_attn.attn_sub_norm", down_norm="mlp.ffn_sub_norm")


def read_bitnet(fields: ConfigFields) -> ModelConfig:
    """``BitNetForCausalLM``."""
    refuse_partial_rotation(fields)
    has_bias = fields.flag("attention_bias", default=False)
    num_kv_heads = None if "num_key_value_heads" in fields.values else 5  # A null is as many as there are heads.
    return read_model(
        fields,
        default_context=2048,
        attention=read_attention(fields, num_kv_heads=num_kv_heads, qkv_bias=has_bias, output_bias=has_bias),
        feed_forward=read_feed_forward(fields, default="relu2"),
        norm=read_rms_norm(fields, eps=1e-5),
        theta=500_000.0,
        names=_NAMES,
    )
