"""Qwen3-Next and Qwen3.5: gated attention in every fourth layer, and a state of the gated delta rule in the others."""

from collections.abc import Sequence

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ExpertsConfig, FeedForwardConfig, ModelConfig, NormConfig, RecurrenceConfig
from headway_executor.models.families.mixtures import SHARED_EXPERT, sparse_layers
from headway_executor.models.families.positions import rotary_factor
from headway_executor.models.families.qwen import QWEN_CONTEXT
from headway_executor.models.families.reading import (
    FULL,
    LINEAR,
    is_of_gguf,
    kinds_of,
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    refuse_unless,
)
from headway_executor.models.families.routing import read_routing
from headway_executor.models.tensor_names import RecurrenceNames, TensorNames

_FUSED, _APART = ("in_proj_qkvz", "in_proj_ba"), ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


def read_qwen3_next(fields: ConfigFields) -> ModelConfig:
    """``Qwen3NextForCausalLM``: some layers may be dense. What ``headway gguf`` makes has inputs as Qwen3.5 does."""
    is_normalised = fields.flag("norm_topk_prob", default=True)
    feeds = sparse_layers(fields, _experts(fields, count=512, chosen=10, is_normalised=is_normalised), 512)
    return _read(fields, feeds, _APART if is_of_gguf(fields) else _FUSED, num_kv_heads=2)


def read_qwen3_5(fields: ConfigFields) -> ModelConfig:
    """``Qwen3_5ForCausalLM``."""
    return _read(fields, read_feed_forward(fields), _APART, num_kv_heads=4, keys_take_turns=is_of_gguf(fields))


def read_qwen3_5_moe(fields: ConfigFields) -> ModelConfig:
    """``Qwen3_5MoeForCausalLM``."""
    inner = fields.integer("moe_intermediate_size", 512)
    sparse = FeedForwardConfig(
        intermediate_size=inner, experts=_experts(fields, count=256, chosen=8, is_normalised=True)
    )
    return _read(fields, sparse, _APART, num_kv_heads=2, keys_take_turns=is_of_gguf(fields))


def _experts(fields: ConfigFields, *, count: int, chosen: int, is_normalised: bool) -> ExpertsConfig:
    """``count`` and ``chosen`` are defaults."""
    return ExpertsConfig(
        routing=read_routing(fields, ("num_experts", count), chosen=chosen, is_normalised=is_normalised),
        shared_size=fields.integer("shared_expert_intermediate_size", 512),
        names=SHARED_EXPERT,
    )


def _read(
    fields: ConfigFields,
    feed_forward: FeedForwardConfig | Sequence[FeedForwardConfig],
    inputs: Sequence[str],
    *,
    num_kv_heads: int,
    keys_take_turns: bool = False,
) -> ModelConfig:
    """``num_kv_heads`` is a default. In files of llama.cpp, ``keys_take_turns`` in Qwen3.5, but not in Qwen3-Next."""
    refuse_unless(fields, "attention_bias", False)
    refuse_unless(fields, "hidden_act", "silu")
    partial = rotary_factor(fields, 0.25)
    attention = read_attention(fields, head_dim=256, num_kv_heads=num_kv_heads, partial=partial, qk_norm="head")
    interval, num_layers = fields.integer("full_attention_interval", 4), num_layers_of(fields)
    usual = [LINEAR if (i + 1) % interval else FULL for i in range(num_layers)]
    recurrence = msgspec.structs.replace(_state(fields, inputs), keys_take_turns=keys_take_turns)
    return read_model(
        fields,
        default_context=QWEN_CONTEXT,
        attention=msgspec.structs.replace(attention, gates="by_head"),
        feed_forward=feed_forward,
        norm=NormConfig(eps=fields.number("rms_norm_eps", 1e-6), offset=1.0),
        recurrences=[recurrence if kind == LINEAR else None for kind in kinds_of(fields, usual, (LINEAR, FULL))],
        names=TensorNames(ignored_prefixes=("mtp.",)),
    )


def _state(fields: ConfigFields, inputs: Sequence[str]) -> RecurrenceConfig:
    heads, key_heads = fields.integer("linear_num_value_heads", 32), fields.integer("linear_num_key_heads", 16)
    if heads % key_heads:
        raise fields.refuse("linear_num_value_heads", f"a multiple of linear_num_key_heads, {key_heads}")
    value_dim = fields.integer("linear_value_head_dim", 128)
    return RecurrenceConfig(
        kind="delta",
        taps=fields.integer("linear_conv_kernel_dim", 4, low=2),
        num_heads=heads,
        num_key_heads=key_heads,
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=value_dim,
        norm_dim=value_dim,
        names=RecurrenceNames(
            inputs=tuple(f"linear_attn.{name}" for name in inputs),
            convolution=("linear_attn.conv1d",),
            output="linear_attn.out_proj",
            decay="linear_attn.A_log",
            step_bias="linear_attn.dt_bias",
            norm="linear_attn.norm",
        ),
    )
