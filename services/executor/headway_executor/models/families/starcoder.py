"""StarCoder2: layer norms, biases everywhere, and a feed-forward without a gate."""

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig, NormConfig
from headway_executor.models.families.reading import (
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    refuse_partial_rotation,
    window_of,
)
from headway_executor.models.tensor_names import TensorNames

_NAMES = TensorNames(gate_up=("mlp.c_fc",), down="mlp.c_proj")


def read_starcoder2(fields: ConfigFields) -> ModelConfig:
    """``Starcoder2ForCausalLM``."""
    refuse_partial_rotation(fields)
    has_bias = fields.flag("use_bias", default=True)
    return read_model(
        fields,
        default_context=4096,
        attention=read_attention(fields, num_kv_heads=2, qkv_bias=has_bias, output_bias=has_bias),
        feed_forward=read_feed_forward(fields, default="gelu_pytorch_tanh", is_gated=False, has_bias=has_bias),
        norm=NormConfig(eps=fields.number("norm_epsilon", 1e-5), kind="layer", has_bias=True),
        windows=[window_of(fields, None)] * num_layers_of(fields),
        names=_NAMES,
        tied=True,
    )
