"""Jamba: a state as in Mamba in most layers, attention without positions in the others; experts in some."""

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ExpertsConfig, ModelConfig, RecurrenceConfig
from headway_executor.models.families.bamba import BAMBA_NAMES
from headway_executor.models.families.mamba1 import rank_of, scanned_state
from headway_executor.models.families.reading import (
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    refuse_unless,
)
from headway_executor.models.families.routing import read_routing
from headway_executor.models.tensor_names import ExpertNames

_EXPERT_NAMES = ExpertNames(router="feed_forward.router", expert="feed_forward.experts.{}.")


def read_jamba(fields: ConfigFields) -> ModelConfig:
    """``JambaForCausalLM``."""
    refuse_unless(fields, "sliding_window", None)
    refuse_unless(fields, "hidden_act", "silu")
    layers = range(num_layers_of(fields))
    state, dense = _state(fields), read_feed_forward(fields)
    routing = read_routing(fields, ("num_experts", 16), chosen=2, is_normalised=False)
    sparse = msgspec.structs.replace(dense, experts=ExpertsConfig(routing=routing, names=_EXPERT_NAMES))
    attends = _every(fields, "attn_layer", 8, 4)
    has_experts = _every(fields, "expert_layer", 2, 1) if routing.num_experts > 1 else frozenset()
    return read_model(
        fields,
        default_context=262_144,
        attention=read_attention(fields, num_kv_heads=8),
        feed_forward=[sparse if index in has_experts else dense for index in layers],
        recurrences=[None if index in attends else state for index in layers],
        rotates=[False] * len(layers),
        names=BAMBA_NAMES,
    )


def _every(fields: ConfigFields, name: str, period: int, offset: int) -> frozenset[int]:
    """The layers that a period and an offset say; both are defaults."""
    period = fields.integer(f"{name}_period", period)
    first = fields.integer(f"{name}_offset", offset, low=0)
    if first >= period:
        raise fields.refuse(f"{name}_offset", f"an integer below {name}_period, {period}")
    return frozenset(range(first, num_layers_of(fields), period))


def _state(fields: ConfigFields) -> RecurrenceConfig:
    return scanned_state(
        "mamba",
        norms=("dt_layernorm", "b_layernorm", "c_layernorm"),
        selection_norm="weighed",
        taps=fields.integer("mamba_d_conv", 4, low=2),
        key_dim=fields.integer("mamba_d_state", 16),
        value_dim=fields.integer("mamba_expand", 2) * fields.integer("hidden_size"),
        step_rank=rank_of(fields, "mamba_dt_rank"),
        has_bias=fields.flag("mamba_proj_bias", default=False),
        has_convolution_bias=fields.flag("mamba_conv_bias", default=True),
    )
