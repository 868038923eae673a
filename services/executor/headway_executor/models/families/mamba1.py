"""Mamba and FalconMamba: layers of a state alone, with a step for each channel."""

import math
from typing import Any

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import FeedForwardConfig, ModelConfig, NormConfig, RecurrenceConfig
from headway_executor.models.families.mamba2 import MAMBA_CONTEXT, MAMBA_NAMES, NO_ATTENTION
from headway_executor.models.families.reading import num_layers_of, read_model, refuse_unless
from headway_executor.models.tensor_names import RecurrenceNames

_CHANNELS_OF_A_RANK = 16


def read_mamba(fields: ConfigFields) -> ModelConfig:
    """``MambaForCausalLM``, as transformers has it and not as its authors published it first."""
    return _read(fields, read_scanned_state(fields))


def read_falcon_mamba(fields: ConfigFields) -> ModelConfig:
    """``FalconMambaForCausalLM``: what is selected is normalised."""
    norm: dict[str, Any] = {"selection_norm": "plain", "norm_eps": fields.number("mixer_rms_eps", 1e-6)}
    return _read(fields, read_scanned_state(fields, **norm))


def read_scanned_state(fields: ConfigFields, **changes: Any) -> RecurrenceConfig:
    """From fields with the names that Mamba gave them; ``changes``: further fields of the result."""
    inner = fields.integer("intermediate_size", int(fields.number("expand", 2) * fields.integer("hidden_size")))
    return scanned_state(
        "mixer",
        taps=fields.integer("conv_kernel", 4, low=2),
        key_dim=fields.integer("state_size", 16),
        value_dim=inner,
        step_rank=rank_of(fields, "time_step_rank"),
        has_bias=fields.flag("use_bias", default=False),
        has_convolution_bias=fields.flag("use_conv_bias", default=True),
        **changes,
    )


def rank_of(fields: ConfigFields, field: str) -> int:
    """How many numbers steps are made of."""
    is_usual = fields.values.get(field, "auto") == "auto"
    return math.ceil(fields.integer("hidden_size") / _CHANNELS_OF_A_RANK) if is_usual else fields.integer(field)


def scanned_state(prefix: str, *, norms: tuple[str, ...] = (), **sizes: Any) -> RecurrenceConfig:
    """A state whose tensors have the usual names behind ``prefix``."""
    names = RecurrenceNames(
        inputs=(f"{prefix}.in_proj",),
        convolution=(f"{prefix}.conv1d",),
        output=f"{prefix}.out_proj",
        decay=f"{prefix}.A_log",
        step_bias=f"{prefix}.dt_proj.bias",
        skip=f"{prefix}.D",
        selection=f"{prefix}.x_proj",
        steps=f"{prefix}.dt_proj",
        selection_norms=tuple(f"{prefix}.{name}" for name in norms),
    )
    return RecurrenceConfig(kind="scanned", names=names, **sizes)


def _read(fields: ConfigFields, state: RecurrenceConfig) -> ModelConfig:
    refuse_unless(fields, "hidden_act", "silu")
    return read_model(
        fields,
        default_context=MAMBA_CONTEXT,
        attention=NO_ATTENTION,
        feed_forward=FeedForwardConfig(intermediate_size=0),
        norm=NormConfig(eps=fields.number("layer_norm_epsilon", 1e-5), rounds_first=True),
        recurrences=[state] * num_layers_of(fields),
        names=MAMBA_NAMES,
        tied=True,
    )
