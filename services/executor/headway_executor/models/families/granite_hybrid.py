"""Granite 4: Granite with a state, of Mamba 2, in most layers."""

import math

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig, RecurrenceConfig, RecurrenceNames, TensorNames
from headway_executor.models.families.granite import read_mixture, read_scaled
from headway_executor.models.families.reading import (
    FULL,
    LINEAR,
    is_of_gguf,
    kinds_of,
    num_layers_of,
    read_feed_forward,
    refuse_unless,
)

_DENSE_NAMES = TensorNames(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
_NAMES_APART = TensorNames(gate_up=("shared_mlp.gate_proj", "shared_mlp.up_proj"), down="shared_mlp.down_proj")
_STATE_NAMES = RecurrenceNames(
    inputs=("mamba.in_proj",),
    convolution="mamba.conv1d",
    output="mamba.out_proj",
    decay="mamba.A_log",
    step_bias="mamba.dt_bias",
    skip="mamba.D",
    norm="mamba.norm",
)
_OLDER_KINDS = {"mamba": LINEAR, "attention": FULL}
_INFINITIES = (math.inf, {"__float__": "Infinity"})
"""As Python writes it in JSON, and as transformers 5 does."""


def read_granite_hybrid(fields: ConfigFields) -> ModelConfig:
    """``GraniteMoeHybridForCausalLM``: without experts, what is shared elsewhere is the feed-forward."""
    kinds = kinds_of(fields, [LINEAR] * num_layers_of(fields), (LINEAR, FULL, *_OLDER_KINDS))
    recurrence = _state(fields)
    recurrences = [recurrence if _OLDER_KINDS.get(kind, kind) == LINEAR else None for kind in kinds]
    positions = fields.values.get("position_embedding_type")
    if positions not in (None, "rope", "nope"):
        raise fields.refuse("position_embedding_type", "rope, nope, or absent")
    rotates = [positions == "rope"] * len(kinds)
    if fields.integer("num_local_experts", 8, low=0):
        return read_scaled(fields, read_mixture(fields), recurrences=recurrences, rotates=rotates)
    names = _NAMES_APART if is_of_gguf(fields) else _DENSE_NAMES
    width = fields.integer("shared_intermediate_size", 1024)
    dense = msgspec.structs.replace(read_feed_forward(fields), intermediate_size=width)
    return read_scaled(fields, dense, names=names, recurrences=recurrences, rotates=rotates)


def _state(fields: ConfigFields) -> RecurrenceConfig:
    heads = fields.integer("mamba_n_heads", 128)
    inner, groups = (
        fields.integer("mamba_expand", 2) * fields.integer("hidden_size"),
        fields.integer("mamba_n_groups", 1),
    )
    if inner % heads or heads % groups:
        raise fields.refuse("mamba_n_heads", f"a divisor of {inner} and a multiple of mamba_n_groups, {groups}")
    if fields.values.get("mamba_d_head") not in (None, "auto"):
        refuse_unless(fields, "mamba_d_head", inner // heads)
    refuse_unless(fields, "hidden_act", "silu")
    if fields.values.get("time_step_limit") not in (None, *([0.0, infinity] for infinity in _INFINITIES)):
        raise fields.refuse("time_step_limit", "from 0 to infinity, or absent")
    return RecurrenceConfig(
        kind="selective",
        taps=fields.integer("mamba_d_conv", 4, low=2),
        num_heads=heads,
        num_key_heads=groups,
        key_dim=fields.integer("mamba_d_state", 256),
        value_dim=inner // heads,
        norm_dim=inner // groups,
        has_bias=fields.flag("mamba_proj_bias", default=False),
        has_convolution_bias=fields.flag("mamba_conv_bias", default=True),
        names=_STATE_NAMES,
    )
