"""RecurrentGemma (Griffin): a real-gated linear recurrent unit in most layers, attention with a window in the others."""

import struct

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig, NormConfig, RecurrenceConfig, Scalings
from headway_executor.models.families.positions import rotary_factor
from headway_executor.models.families.reading import (
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    refuse_unless,
)
from headway_executor.models.tensor_names import RecurrenceNames, TensorNames

_RECURRENT, _ATTENTION = "recurrent", "attention"
_BLOCK = "temporal_block."
_NAMES = TensorNames(
    final_norm="model.final_norm",
    qkv=tuple(f"{_BLOCK}{part}_proj" for part in "qkv"),
    output=f"{_BLOCK}o_proj",
    gate_up=("mlp_block.gate_proj", "mlp_block.up_proj"),
    down="mlp_block.down_proj",
    attention_norm="temporal_pre_norm",
    mlp_norm="channel_pre_norm",
)
_STATE = RecurrenceNames(
    inputs=(f"{_BLOCK}linear_x", f"{_BLOCK}linear_y"),
    convolution=(f"{_BLOCK}conv_1d",),
    output=f"{_BLOCK}linear_out",
    decay=f"{_BLOCK}rg_lru.recurrent_param",
    blocks=(f"{_BLOCK}rg_lru.input_gate", f"{_BLOCK}rg_lru.recurrent_gate"),
)


def _in_bfloat16(number: float) -> float:
    """The nearest one, of two the even: the upper half of a float32. What reads files needs no torch."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    upper = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    (rounded,) = struct.unpack("<f", struct.pack("<I", upper))
    return float(rounded)


def read_recurrent_gemma(fields: ConfigFields) -> ModelConfig:
    """``RecurrentGemmaForCausalLM``."""
    refuse_unless(fields, "hidden_activation", "gelu_pytorch_tanh")
    hidden, window = fields.integer("hidden_size"), fields.integer("attention_window_size", 2048)
    feed = read_feed_forward(fields, field="hidden_activation", default="gelu_pytorch_tanh", has_bias=True)
    if feed.intermediate_size % 2:
        raise fields.refuse("intermediate_size", "an even number, of gates and ups")
    attends = _attending(fields)
    state = _state(fields)
    return read_model(
        fields,
        default_context=8192,
        attention=read_attention(
            fields,
            partial=rotary_factor(fields, 0.5),
            qkv_bias=fields.flag("attention_bias", default=False),
            output_bias=True,
        ),
        feed_forward=msgspec.structs.replace(feed, intermediate_size=feed.intermediate_size // 2),
        norm=NormConfig(eps=fields.number("rms_norm_eps", 1e-6), offset=1.0),
        windows=[window if has_it else None for has_it in attends],
        scalings=Scalings(
            # Rounded, whatever the model's dtype.
            embedding=_in_bfloat16(hidden**0.5),
            logits_softcap=fields.number("logits_soft_cap", 30.0),
        ),
        recurrences=[None if has_it else state for has_it in attends],
        names=_NAMES,
        tied=True,
    )


def _attending(fields: ConfigFields) -> list[bool]:
    """By layer; ``block_types`` are repeated."""
    kinds = fields.values.get("block_types", [_RECURRENT, _RECURRENT, _ATTENTION])
    if not isinstance(kinds, list) or not kinds or any(kind not in (_RECURRENT, _ATTENTION) for kind in kinds):
        raise fields.refuse("block_types", f"a list of names, each {_RECURRENT} or {_ATTENTION}")
    return [kinds[index % len(kinds)] == _ATTENTION for index in range(num_layers_of(fields))]


def _state(fields: ConfigFields) -> RecurrenceConfig:
    width, blocks = fields.optional_integer("lru_width"), fields.integer("num_attention_heads")
    inner = fields.integer("hidden_size") if width is None else width
    if inner % blocks:
        raise fields.refuse("lru_width", f"a multiple of num_attention_heads, {blocks}")
    return RecurrenceConfig(
        kind="unit",
        taps=fields.integer("conv1d_width", 4, low=2),
        key_dim=1,
        value_dim=inner,
        gate="gelu_tanh",
        num_blocks=blocks,
        has_bias=True,
        has_convolution_bias=True,
        names=_STATE,
    )
