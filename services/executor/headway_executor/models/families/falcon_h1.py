"""Falcon-H1: attention and a state of Mamba 2 side by side in every layer, with the multipliers of muP."""

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig, Multipliers, RecurrenceConfig, Scalings
from headway_executor.models.families.bamba import BAMBA_NAMES
from headway_executor.models.families.mamba import read_state
from headway_executor.models.families.reading import (
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    read_rms_norm,
    refuse_partial_rotation,
    refuse_unless,
)

_TO_STATE, _IN_MLP = 5, 2
"""Multipliers in a list."""


def read_falcon_h1(fields: ConfigFields) -> ModelConfig:
    """``FalconH1ForCausalLM``."""
    refuse_partial_rotation(fields)
    for field in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        refuse_unless(fields, field, False)
    num_layers = num_layers_of(fields)
    return read_model(
        fields,
        default_context=8192,
        attention=read_attention(fields, num_kv_heads=8),
        feed_forward=read_feed_forward(fields),
        norm=read_rms_norm(fields, eps=1e-5),
        scalings=Scalings(
            embedding=fields.number("embedding_multiplier", 1.0), logits=fields.number("lm_head_multiplier", 1.0)
        ),
        multipliers=_multipliers(fields),
        recurrences=[_state(fields)] * num_layers,
        attends=[True] * num_layers,
        names=BAMBA_NAMES,
    )


def _state(fields: ConfigFields) -> RecurrenceConfig:
    """Its norm is behind the gates, or before them, or missing."""
    width = fields.values.get("mamba_d_ssm", 1024)
    state = read_state(fields, None if width is None else fields.integer("mamba_d_ssm", 1024), prefix="mamba")
    if not fields.flag("mamba_rms_norm", default=False):
        return msgspec.structs.replace(state, norm_dim=0)
    return msgspec.structs.replace(state, gates_behind=fields.flag("mamba_norm_before_gate", default=True))


def _multipliers(fields: ConfigFields) -> Multipliers:
    attention, state = (fields.number(f"{part}_in_multiplier", 1.0) for part in ("attention", "ssm"))
    gates, values, keys, queries, steps = (state * factor for factor in _list(fields, "ssm_multipliers", _TO_STATE))
    gate, down = _list(fields, "mlp_multipliers", _IN_MLP)
    return Multipliers(
        queries=attention,
        keys=attention * fields.number("key_multiplier", 1.0),
        values=attention,
        output=fields.number("attention_out_multiplier", 1.0),
        to_state=(gates, values, keys, queries, steps),
        from_state=fields.number("ssm_out_multiplier", 1.0),
        gate=gate,
        down=down,
    )


def _list(fields: ConfigFields, field: str, count: int) -> list[float]:
    values = fields.values.get(field)
    if values is None:
        return [1.0] * count
    if not isinstance(values, list) or len(values) != count:
        raise fields.refuse(field, f"a list of {count} numbers, or absent")
    return [ConfigFields(fields.source, {field: value}).number(field) for value in values]
