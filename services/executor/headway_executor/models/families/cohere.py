"""Command R and Command A: attention beside the feed-forward behind one norm; in Cohere 2, only windows have positions."""

from collections.abc import Sequence

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig, NormConfig, QkNorm, Scalings, TensorNames
from headway_executor.models.families.reading import (
    SLIDING,
    every_nth_full,
    read_attention,
    read_feed_forward,
    read_model,
    refuse_partial_rotation,
    window_of,
    windows_of,
)

_CONTEXT = 8192


def read_cohere(fields: ConfigFields) -> ModelConfig:
    """``CohereForCausalLM``. Command R was trained on longer contexts than ``max_position_embeddings`` says."""
    context = fields.integer("model_max_length", fields.integer("max_position_embeddings", _CONTEXT))
    fields = ConfigFields(fields.source, {**fields.values, "max_position_embeddings": context})
    qk_norm: QkNorm = "layer" if fields.flag("use_qk_norm", default=False) else "none"
    return _read(fields, theta=500_000.0, qk_norm=qk_norm)


def read_cohere2(fields: ConfigFields) -> ModelConfig:
    """``Cohere2ForCausalLM``."""
    kinds = every_nth_full(fields, 4)
    windows = windows_of(fields, kinds, window_of(fields))
    return _read(fields, theta=10_000.0, windows=windows, rotates=[kind == SLIDING for kind in kinds])


def _read(
    fields: ConfigFields,
    *,
    theta: float,
    qk_norm: QkNorm = "none",
    windows: Sequence[int | None] | None = None,
    rotates: Sequence[bool] | None = None,
) -> ModelConfig:
    refuse_partial_rotation(fields)
    has_bias = fields.flag("attention_bias", default=False)
    return read_model(
        fields,
        default_context=_CONTEXT,
        attention=read_attention(fields, is_interleaved=True, qk_norm=qk_norm, qkv_bias=has_bias, output_bias=has_bias),
        feed_forward=read_feed_forward(fields),
        norm=NormConfig(eps=fields.number("layer_norm_eps", 1e-5), kind="layer"),
        windows=windows,
        theta=theta,
        rotates=rotates,
        scalings=Scalings(logits=fields.number("logit_scale", 0.0625)),
        names=TensorNames(mlp_norm="input_layernorm"),
        is_parallel=True,
        tied=True,
    )
