"""AFMoE (Trinity): gates behind attention, norms before and behind; only layers with windows have positions."""

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ExpertsConfig, ModelConfig, Scalings
from headway_executor.models.families.reading import (
    SLIDING,
    every_nth_full,
    read_attention,
    read_model,
    read_rms_norm,
    refuse_others,
    refuse_partial_rotation,
    window_of,
    windows_of,
)
from headway_executor.models.families.routing import behind_dense_layers, read_routing
from headway_executor.models.tensor_names import ExpertNames, TensorNames
from headway_kernels.routing import Scoring

_NAMES = TensorNames(
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.gate_proj"),
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_mlp_layernorm",
    mlp_post_norm="post_mlp_layernorm",
)
_EXPERT_NAMES = ExpertNames(router="mlp.router.gate", correction="mlp.expert_bias")
_ONE_WAY: Mapping[str, object] = {
    "attention_bias": False,  # gates have none
    "score_func": "sigmoid",
    "route_norm": True,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_groups": 1,
    "num_limited_groups": 1,
}
"""Fields that have one value, also of files that are older than transformers' own model."""


def read_afmoe(fields: ConfigFields) -> ModelConfig:
    """``AfmoeForCausalLM``."""
    refuse_partial_rotation(fields)
    refuse_others(fields, _ONE_WAY)
    routing = read_routing(fields, ("num_experts", 64), chosen=6, is_normalised=True)
    routing = replace(routing, scoring=Scoring.SIGMOID, scaling=fields.number("route_scale", 1.0))
    kinds = every_nth_full(fields, 4, "global_attn_every_n_layers")
    is_scaled = fields.flag("mup_enabled", default=False)
    return read_model(
        fields,
        default_context=16_384,
        attention=msgspec.structs.replace(read_attention(fields, head_dim=128, qk_norm="head"), gates="apart"),
        feed_forward=behind_dense_layers(
            fields,
            ExpertsConfig(routing=routing, names=_EXPERT_NAMES),
            size=1408,
            shared=2,
            shared_field="num_shared_experts",
            first=1,
            first_field="num_dense_layers",
        ),
        norm=read_rms_norm(fields, eps=1e-5, rounds_first=False),
        windows=windows_of(fields, kinds, window_of(fields, 1024)),
        rotates=[kind == SLIDING for kind in kinds],
        scalings=Scalings(embedding=fields.integer("hidden_size") ** 0.5 if is_scaled else 1.0),
        names=_NAMES,
    )
