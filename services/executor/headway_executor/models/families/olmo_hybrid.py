"""OLMo Hybrid: OLMo 3's attention in every fourth layer, and a state of the gated delta rule in the others."""

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig, RecurrenceConfig
from headway_executor.models.families.olmo import NORMS_BEHIND
from headway_executor.models.families.reading import (
    FULL,
    LINEAR,
    kinds_of,
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    read_rms_norm,
    refuse_partial_rotation,
    refuse_unless,
)
from headway_executor.models.tensor_names import LayerNormNames, RecurrenceNames

_EPS_OF_STATES = 1e-5
_NAMES = msgspec.structs.replace(
    NORMS_BEHIND,
    state_norms=LayerNormNames(attention="input_layernorm", mlp="post_attention_layernorm"),
    renamed=(("input_layernorm", "attention_layer_norm"), ("post_attention_layernorm", "feedforward_layer_norm")),
)
"""transformers writes them under the other names."""


def read_olmo_hybrid(fields: ConfigFields) -> ModelConfig:
    """``OlmoHybridForCausalLM``: norms stand before a state, but behind attention."""
    refuse_partial_rotation(fields)
    has_bias = fields.flag("attention_bias", default=False)
    num_layers = num_layers_of(fields)
    usual = [FULL if index % 4 == 3 else LINEAR for index in range(num_layers)]
    if FULL not in usual:
        usual[-1] = FULL
    kinds, state = kinds_of(fields, usual, (LINEAR, FULL)), _state(fields)
    rope = fields.section("rope_parameters")
    has_rope = rope is None or rope.values.get("rope_theta", True) is not None
    return read_model(
        fields,
        default_context=65_536,
        attention=read_attention(fields, qkv_bias=has_bias, output_bias=has_bias, qk_norm="all"),
        feed_forward=read_feed_forward(fields),
        norm=read_rms_norm(fields, rounds_first=False),
        recurrences=[state if kind == LINEAR else None for kind in kinds],
        rotates=[has_rope] * num_layers,
        names=_NAMES,
    )


def _state(fields: ConfigFields) -> RecurrenceConfig:
    """Each part of its inputs has a tensor."""
    refuse_unless(fields, "hidden_act", "silu")
    num_heads = fields.integer("num_attention_heads")
    heads, key_heads = (fields.integer(f"linear_num_{kind}_heads", num_heads) for kind in ("value", "key"))
    if heads % key_heads:
        raise fields.refuse("linear_num_value_heads", f"a multiple of linear_num_key_heads, {key_heads}")
    key_dim = fields.integer("linear_key_head_dim", 3 * fields.integer("hidden_size") // (4 * key_heads))
    value_dim = fields.integer("linear_value_head_dim", 2 * key_dim)
    return RecurrenceConfig(
        kind="delta",
        taps=fields.integer("linear_conv_kernel_dim", 4, low=2),
        num_heads=heads,
        num_key_heads=key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        norm_dim=value_dim,
        norm_eps=_EPS_OF_STATES,
        doubles_strengths=fields.flag("linear_allow_neg_eigval", default=True),
        names=RecurrenceNames(
            inputs=tuple(f"linear_attn.{part}_proj" for part in ("q", "k", "v", "g", "b", "a")),
            convolution=tuple(f"linear_attn.{part}_conv1d" for part in ("q", "k", "v")),
            output="linear_attn.o_proj",
            decay="linear_attn.A_log",
            step_bias="linear_attn.dt_bias",
            norm="linear_attn.o_norm",
        ),
    )
