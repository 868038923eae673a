"""Qwen2, Qwen2.5 and Qwen3 (dense): biases or a norm of each head, and windows from some layer on."""

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig
from headway_executor.models.families.reading import (
    FULL,
    SLIDING,
    layer_types_of,
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    refuse_partial_rotation,
    window_of,
)

QWEN_CONTEXT = 32_768
_FIRST_WINDOW = 28
_QWEN3_HEAD_DIM = 128


def read_qwen2(fields: ConfigFields) -> ModelConfig:
    """``Qwen2ForCausalLM``."""
    refuse_partial_rotation(fields)
    return read_model(
        fields,
        default_context=QWEN_CONTEXT,
        attention=read_attention(fields, qkv_bias=True),
        feed_forward=read_feed_forward(fields),
        windows=qwen_windows(fields),
    )


def read_qwen3(fields: ConfigFields) -> ModelConfig:
    """``Qwen3ForCausalLM``."""
    refuse_partial_rotation(fields)
    has_bias = fields.flag("attention_bias", default=False)
    return read_model(
        fields,
        default_context=QWEN_CONTEXT,
        attention=read_attention(
            fields, head_dim=_QWEN3_HEAD_DIM, qkv_bias=has_bias, output_bias=has_bias, qk_norm="head"
        ),
        feed_forward=read_feed_forward(fields),
        windows=qwen_windows(fields),
    )


def qwen_windows(fields: ConfigFields) -> list[int | None]:
    """The window of each layer."""
    window = window_of(fields) if fields.flag("use_sliding_window", default=False) else None
    first = fields.integer("max_window_layers", _FIRST_WINDOW, low=0)
    usual = [SLIDING if window is not None and i >= first else FULL for i in range(num_layers_of(fields))]
    kinds = layer_types_of(fields, usual)
    if SLIDING in kinds and window is None:
        raise fields.refuse("use_sliding_window", f"true with a sliding_window, as layer_types names {SLIDING}")
    return [window if kind == SLIDING else None for kind in kinds]
