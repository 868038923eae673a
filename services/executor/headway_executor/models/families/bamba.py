"""Bamba: a state of Mamba 2 in most layers, attention with partly rotated heads in the others."""

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig
from headway_executor.models.families.mamba import read_state
from headway_executor.models.families.positions import rotary_factor
from headway_executor.models.families.reading import (
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    read_rms_norm,
    refuse_unless,
)
from headway_executor.models.families.routing import layers_named
from headway_executor.models.tensor_names import TensorNames

BAMBA_NAMES = TensorNames(
    final_norm="model.final_layernorm",
    mlp_norm="pre_ff_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)


def read_bamba(fields: ConfigFields) -> ModelConfig:
    """``BambaForCausalLM``: half of each head is rotated, whatever a file says."""
    has_bias, in_mlp = (fields.flag(field, default=False) for field in ("attention_bias", "mlp_bias"))
    attention = read_attention(
        fields,
        num_kv_heads=8,
        partial=rotary_factor(fields, 0.5, allowed="0.5"),
        qkv_bias=has_bias,
        output_bias=has_bias,
    )
    refuse_unless(fields, "attn_rotary_emb", attention.rotary_dim)
    state, layers = read_state(fields, prefix="mamba"), range(num_layers_of(fields))
    attending = layers_named(fields, "attn_layer_indices", len(layers))
    return read_model(
        fields,
        default_context=262_144,
        attention=attention,
        feed_forward=read_feed_forward(fields, has_bias=in_mlp),
        norm=read_rms_norm(fields, eps=1e-5),
        recurrences=[None if index in attending else state for index in layers],
        names=BAMBA_NAMES,
    )
