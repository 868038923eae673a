"""Mixtures whose decoder is that of a dense family: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, FlexOlmo, Mellum, MiniMax, dots."""

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.attention_config import AttentionConfig
from headway_executor.models.config import ExpertsConfig, FeedForwardConfig, ModelConfig
from headway_executor.models.families.olmo import NORMS_BEHIND
from headway_executor.models.families.positions import rotary_factor
from headway_executor.models.families.qwen import QWEN_CONTEXT
from headway_executor.models.families.reading import (
    FULL,
    SLIDING,
    layer_types_of,
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    read_rms_norm,
    read_ropes,
    refuse_others,
    refuse_partial_rotation,
    window_of,
    windows_of,
)
from headway_executor.models.families.routing import (
    behind_dense_layers,
    by_mlp_type,
    layers_named,
    read_corrected,
    read_routing,
)
from headway_executor.models.tensor_names import ExpertNames, TensorNames
from headway_kernels.routing import Scoring

MIXTRAL_NAMES = ExpertNames(
    router="block_sparse_moe.gate", expert="block_sparse_moe.experts.{}.", gate_up=("w1", "w3"), down="w2"
)
SHARED_EXPERT = ExpertNames(shared="mlp.shared_expert.", shared_gate="mlp.shared_expert_gate")
_MINIMAX: Mapping[str, object] = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
}
"""Fields of files that are older than transformers' own model."""
_FIRST_WINDOW = 28


def read_mixtral(fields: ConfigFields) -> ModelConfig:
    """``MixtralForCausalLM``."""
    refuse_partial_rotation(fields)
    routing = read_routing(fields, ("num_local_experts", 8), chosen=2, is_normalised=True)
    experts = ExpertsConfig(routing=routing, names=MIXTRAL_NAMES)
    return read_model(
        fields,
        default_context=131_072,
        theta=1e6,
        attention=read_attention(fields, num_kv_heads=8),
        feed_forward=msgspec.structs.replace(read_feed_forward(fields), experts=experts),
        norm=read_rms_norm(fields, eps=1e-5),
        windows=[window_of(fields, None)] * num_layers_of(fields),
    )


def read_qwen2_moe(fields: ConfigFields) -> ModelConfig:
    """``Qwen2MoeForCausalLM``."""
    routing = read_routing(fields, ("num_experts", 60), chosen=4, is_normalised=_normalises(fields))
    shared_size = fields.integer("shared_expert_intermediate_size", 5632)
    experts = ExpertsConfig(routing=routing, shared_size=shared_size, names=SHARED_EXPERT)
    window, first = _qwen_window(fields), fields.integer("max_window_layers", _FIRST_WINDOW, low=0)
    # Not as in Qwen2: every second layer, up to some layer.
    usual = [FULL if window is None or i % 2 or i >= first else SLIDING for i in range(num_layers_of(fields))]
    windows = windows_of(fields, layer_types_of(fields, usual), window)
    has_bias = fields.flag("qkv_bias", default=True)
    return _read_qwen(fields, experts, 1408, read_attention(fields, qkv_bias=has_bias), windows)


def read_qwen3_moe(fields: ConfigFields) -> ModelConfig:
    """``Qwen3MoeForCausalLM``."""
    experts = ExpertsConfig(
        routing=read_routing(fields, (count_field(fields), 128), chosen=8, is_normalised=_normalises(fields))
    )
    has_bias = fields.flag("attention_bias", default=False)
    attention = read_attention(fields, num_kv_heads=4, qkv_bias=has_bias, output_bias=has_bias, qk_norm="head")
    return _read_qwen(fields, experts, 768, attention, [_qwen_window(fields)] * num_layers_of(fields))


def read_olmoe(fields: ConfigFields) -> ModelConfig:
    """``OlmoeForCausalLM``."""
    refuse_partial_rotation(fields)
    routing = read_routing(fields, ("num_experts", 64), chosen=8, is_normalised=_normalises(fields))
    has_bias = fields.flag("attention_bias", default=False)
    attention = read_attention(fields, qkv_bias=has_bias, output_bias=has_bias, qk_norm="all")
    return read_model(
        fields,
        default_context=4096,
        attention=msgspec.structs.replace(attention, clip=fields.optional_number("clip_qkv"), clips_normed=True),
        feed_forward=msgspec.structs.replace(read_feed_forward(fields), experts=ExpertsConfig(routing=routing)),
        norm=read_rms_norm(fields, eps=1e-5),
    )


def read_flex_olmo(fields: ConfigFields) -> ModelConfig:
    """``FlexOlmoForCausalLM``: OLMo 2 with experts."""
    refuse_partial_rotation(fields)
    routing = read_routing(fields, ("num_experts", 7), chosen=5, is_normalised=_normalises(fields))
    has_bias = fields.flag("attention_bias", default=False)
    return read_model(
        fields,
        default_context=4096,
        attention=read_attention(fields, qkv_bias=has_bias, output_bias=has_bias, qk_norm="all"),
        feed_forward=msgspec.structs.replace(read_feed_forward(fields), experts=ExpertsConfig(routing=routing)),
        norm=read_rms_norm(fields, rounds_first=False),
        theta=500_000.0,
        names=NORMS_BEHIND,
    )


def read_mellum(fields: ConfigFields) -> ModelConfig:
    """``MellumForCausalLM``: Qwen3-MoE with windows that have a rope of their own.

    Nothing reads its layers that predict further tokens.
    """
    num_layers, context = num_layers_of(fields), fields.integer("max_position_embeddings", 131_072)
    is_normalised = fields.flag("norm_topk_prob", default=True)
    experts = ExpertsConfig(
        routing=read_routing(fields, (count_field(fields), 64), chosen=8, is_normalised=is_normalised)
    )
    dense, inner = read_feed_forward(fields), fields.integer("moe_intermediate_size", 896)
    sparse = msgspec.structs.replace(dense, intermediate_size=inner, experts=experts)
    kinds = layer_types_of(fields, [FULL] * num_layers)
    has_bias = fields.flag("attention_bias", default=False)
    return read_model(
        fields,
        default_context=context,
        attention=read_attention(
            fields, head_dim=128, num_kv_heads=4, qkv_bias=has_bias, output_bias=has_bias, qk_norm="head"
        ),
        feed_forward=by_mlp_type(fields, dense, sparse, [True] * num_layers),
        windows=windows_of(fields, kinds, window_of(fields, 1024)),
        ropes=read_ropes(fields, kinds, context, near=10_000.0, far=500_000.0),
        names=TensorNames(ignored_prefixes=("mtp.",)),
    )


def read_dots1(fields: ConfigFields) -> ModelConfig:
    """``Dots1ForCausalLM``: Qwen3 with experts as DeepSeek V3 has them."""
    refuse_partial_rotation(fields)
    window, first = window_of(fields), fields.integer("max_window_layers", 62, low=0)
    usual = [SLIDING if window is not None and i >= first else FULL for i in range(num_layers_of(fields))]
    experts = read_corrected(fields, ("n_routed_experts", None), chosen=None, is_normalised=False)
    has_bias = fields.flag("attention_bias", default=False)
    return read_model(
        fields,
        default_context=2048,
        attention=read_attention(fields, num_kv_heads=32, qkv_bias=has_bias, output_bias=has_bias, qk_norm="head"),
        feed_forward=behind_dense_layers(fields, experts, size=1408, first=0),
        windows=windows_of(fields, layer_types_of(fields, usual), window),
    )


def read_minimax_m2(fields: ConfigFields) -> ModelConfig:
    """``MiniMaxM2ForCausalLM``: norms over all heads, partly rotated; ``rotary_dim`` is how much of a head is rotated."""
    refuse_others(fields, _MINIMAX)
    if set(fields.values.get("attn_type_list") or [1]) != {1}:
        raise fields.refuse("attn_type_list", "a list of 1, full attention")
    routing = read_routing(fields, ("num_local_experts", 256), chosen=8, is_normalised=True)
    names = msgspec.structs.replace(MIXTRAL_NAMES, correction="block_sparse_moe.e_score_correction_bias")
    experts = ExpertsConfig(routing=replace(routing, scoring=Scoring.SIGMOID), names=names)
    head_dim = fields.integer("head_dim", 128)
    partial = rotary_factor(fields, fields.integer("rotary_dim", head_dim) / head_dim)
    return read_model(
        fields,
        default_context=196_608,
        attention=read_attention(fields, head_dim=head_dim, num_kv_heads=8, partial=partial, qk_norm="all"),
        feed_forward=msgspec.structs.replace(read_feed_forward(fields), experts=experts),
        theta=5e6,
    )


def _read_qwen(
    fields: ConfigFields,
    experts: ExpertsConfig,
    expert_size: int,
    attention: AttentionConfig,
    windows: list[int | None],
) -> ModelConfig:
    refuse_partial_rotation(fields)
    return read_model(
        fields,
        default_context=QWEN_CONTEXT,
        attention=attention,
        feed_forward=sparse_layers(fields, experts, expert_size),
        windows=windows,
    )


def sparse_layers(fields: ConfigFields, experts: ExpertsConfig, expert_size: int) -> list[FeedForwardConfig]:
    """The feed-forward of each layer of a Qwen mixture; ``expert_size`` is a default.

    Layers in ``mlp_only_layers``, and those that ``decoder_sparse_step`` passes over, are dense.
    """
    dense = read_feed_forward(fields)
    inner = fields.integer("moe_intermediate_size", expert_size)
    sparse = msgspec.structs.replace(dense, intermediate_size=inner, experts=experts)
    step, num_layers = fields.integer("decoder_sparse_step", 1), num_layers_of(fields)
    only_dense = layers_named(fields, "mlp_only_layers", num_layers)
    return [dense if i in only_dense or (i + 1) % step else sparse for i in range(num_layers)]


def _normalises(fields: ConfigFields) -> bool:
    return fields.flag("norm_topk_prob", default=False)


def count_field(fields: ConfigFields) -> str:
    """The field of how many experts there are: files have either."""
    return "num_local_experts" if "num_local_experts" in fields.values else "num_experts"


def _qwen_window(fields: ConfigFields) -> int | None:
    return window_of(fields) if fields.flag("use_sliding_window", default=False) else None
