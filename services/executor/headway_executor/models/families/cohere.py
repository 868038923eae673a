"""Command R and Command A: attention beside the feed-forward behind one norm; in Cohere 2, only windows have positions."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.attention_config import QkNorm
from headway_executor.models.config import ExpertsConfig, FeedForwardConfig, ModelConfig, NormConfig, Scalings
from headway_executor.models.families.reading import (
    FULL,
    SLIDING,
    every_nth_full,
    layer_types_of,
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    read_rms_norm,
    refuse_partial_rotation,
    window_of,
    windows_of,
)
from headway_executor.models.families.routing import by_mlp_type, read_routing
from headway_executor.models.tensor_names import TensorNames
from headway_kernels.routing import Scoring

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


def read_cohere2_moe(fields: ConfigFields) -> ModelConfig:
    """``Cohere2MoeForCausalLM``: the first layers are dense, and may all have positions."""
    num_layers = num_layers_of(fields)
    first = fields.integer("first_k_dense_replace", 0, low=0, high=num_layers)
    of_dense, of_others = (
        fields.integer(field, usual)
        for field, usual in (("prefix_dense_sliding_window_pattern", 1), ("sliding_window_pattern", 4))
    )
    patterns = [(i, of_dense) for i in range(first)] + [(i, of_others) for i in range(num_layers - first)]
    kinds = layer_types_of(fields, [SLIDING if (i + 1) % pattern else FULL for i, pattern in patterns])
    feed = read_feed_forward(fields)
    dense_size = fields.integer("prefix_dense_intermediate_size", feed.intermediate_size)
    feeds = by_mlp_type(
        fields,
        msgspec.structs.replace(feed, intermediate_size=dense_size),
        msgspec.structs.replace(feed, experts=_read_experts(fields, feed.intermediate_size)),
        [i >= first for i in range(num_layers)],
    )
    return _read(
        fields,
        theta=10_000.0,
        head_dim=128,
        windows=windows_of(fields, kinds, window_of(fields)),
        rotates=[
            kind == SLIDING or (feed.experts is None and of_dense == 1) for kind, feed in zip(kinds, feeds, strict=True)
        ],
        feed_forward=feeds,
        norm=None if fields.values.get("rms_norm_eps") is None else read_rms_norm(fields),
    )


def _read_experts(fields: ConfigFields, size: int) -> ExpertsConfig:
    """A softmax over what a token chooses is one over all with the chosen ones' shares."""
    scoring = fields.values.get("expert_selection_fn") or "softmax"
    combination = fields.values.get("shared_expert_combination_strategy") or "average"
    if scoring not in ("softmax", "sigmoid"):
        raise fields.refuse("expert_selection_fn", "softmax, sigmoid")
    if combination not in ("average", "sum"):
        raise fields.refuse("shared_expert_combination_strategy", "average, sum")
    num_shared = fields.integer("num_shared_experts", 0, low=0, high=64)
    is_normalised = scoring == "softmax" or fields.flag("norm_topk_prob", default=True)
    routing = read_routing(fields, ("num_experts", 8), chosen=2, is_normalised=is_normalised)
    if scoring == "sigmoid":
        routing = replace(routing, scoring=Scoring.SIGMOID)
    halves = bool(num_shared) and combination == "average"
    return ExpertsConfig(
        routing=replace(routing, scaling=0.5 if halves else 1.0), shared_size=size * num_shared, halves_shared=halves
    )


def _read(
    fields: ConfigFields,
    *,
    theta: float,
    qk_norm: QkNorm = "none",
    head_dim: int | None = None,
    feed_forward: Sequence[FeedForwardConfig] | None = None,
    norm: NormConfig | None = None,
    windows: Sequence[int | None] | None = None,
    rotates: Sequence[bool] | None = None,
) -> ModelConfig:
    refuse_partial_rotation(fields)
    has_bias = fields.flag("attention_bias", default=False)
    return read_model(
        fields,
        default_context=_CONTEXT,
        attention=read_attention(
            fields, head_dim=head_dim, is_interleaved=True, qk_norm=qk_norm, qkv_bias=has_bias, output_bias=has_bias
        ),
        feed_forward=feed_forward or read_feed_forward(fields),
        norm=norm or NormConfig(eps=fields.number("layer_norm_eps", 1e-5), kind="layer"),
        windows=windows,
        theta=theta,
        rotates=rotates,
        scalings=Scalings(logits=fields.number("logit_scale", 0.0625)),
        names=TensorNames(mlp_norm="input_layernorm"),
        is_parallel=True,
        tied=True,
    )
