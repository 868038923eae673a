"""DeepSeek V2 and V3: latent attention, groups of experts beside shared ones, the first layers dense."""

import math
from dataclasses import dataclass, replace

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import (
    AttentionConfig,
    ExpertNames,
    ExpertsConfig,
    LatentConfig,
    ModelConfig,
    RopeConfig,
    TensorNames,
)
from headway_executor.models.families.positions import read_rope, scaled_context
from headway_executor.models.families.reading import (
    num_layers_of,
    read_feed_forward,
    read_model,
    refuse_partial_rotation,
    refuse_unless,
)
from headway_executor.models.families.routing import read_routing
from headway_kernels.routing import Routing, Scoring

_CORRECTION = "mlp.gate.e_score_correction_bias"


@dataclass(frozen=True, kw_only=True)
class _Defaults:
    shared: int
    expert_size: int
    first_sparse: int
    context: int


def read_deepseek_v2(fields: ConfigFields) -> ModelConfig:
    """``DeepseekV2ForCausalLM``."""
    for field, allowed in (("scoring_func", "softmax"), ("norm_topk_prob", False), ("mlp_bias", False)):
        refuse_unless(fields, field, allowed)
    routing = read_routing(fields, ("n_routed_experts", 64), chosen=8, is_normalised=False)
    routing = replace(routing, scaling=fields.number("routed_scaling_factor", 1.0))
    method = fields.values.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.refuse("topk_method", "greedy, group_limited_greedy")
    if method != "greedy":
        routing = _in_groups(fields, routing, scores_per_group=1)
    defaults = _Defaults(shared=2, expert_size=1407, first_sparse=0, context=2048)
    return _read(fields, ExpertsConfig(routing=routing), defaults, is_interleaved=True)


def read_deepseek_v3(fields: ConfigFields) -> ModelConfig:
    """``DeepseekV3ForCausalLM``. Nothing reads its layers that predict further tokens."""
    for field, allowed in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        refuse_unless(fields, field, allowed)
    is_normalised = fields.flag("norm_topk_prob", default=True)
    routing = read_routing(fields, ("n_routed_experts", 256), chosen=8, is_normalised=is_normalised)
    routing = replace(routing, scoring=Scoring.SIGMOID, scaling=fields.number("routed_scaling_factor", 2.5))
    experts = ExpertsConfig(
        routing=_in_groups(fields, routing, scores_per_group=2, default=(8, 4)),
        names=ExpertNames(correction=_CORRECTION),
    )
    defaults = _Defaults(shared=1, expert_size=2048, first_sparse=3, context=4096)
    return _read(fields, experts, defaults, is_interleaved=fields.flag("rope_interleave", default=True))


def _in_groups(
    fields: ConfigFields,
    routing: Routing,
    *,
    scores_per_group: int,
    default: tuple[int | None, int | None] = (None, None),
) -> Routing:
    num_groups, num_open = fields.integer("n_group", default[0]), fields.integer("topk_group", default[1])
    size = routing.num_experts // num_groups
    if routing.num_experts % num_groups or (num_groups > 1 and size < scores_per_group):
        raise fields.refuse("n_group", f"a divisor of n_routed_experts, {routing.num_experts}, for groups of 2 or more")
    if num_open > num_groups or routing.num_chosen > num_open * size:
        raise fields.refuse("topk_group", f"at most n_group, {num_groups}, with num_experts_per_tok experts or more")
    return replace(routing, num_groups=num_groups, num_open_groups=num_open, scores_per_group=scores_per_group)


def _read(fields: ConfigFields, experts: ExpertsConfig, defaults: _Defaults, *, is_interleaved: bool) -> ModelConfig:
    refuse_partial_rotation(fields)
    for field, allowed in (("attention_bias", False), ("moe_layer_freq", 1)):
        refuse_unless(fields, field, allowed)
    context, num_layers = fields.integer("max_position_embeddings", defaults.context), num_layers_of(fields)
    rope = read_rope(fields, context)
    inner = fields.integer("moe_intermediate_size", defaults.expert_size)
    shared_size = inner * fields.integer("n_shared_experts", defaults.shared, high=64)
    dense = read_feed_forward(fields)
    sparse = msgspec.structs.replace(
        dense, intermediate_size=inner, experts=msgspec.structs.replace(experts, shared_size=shared_size)
    )
    first = fields.integer("first_k_dense_replace", defaults.first_sparse, low=0)
    return read_model(
        fields,
        default_context=defaults.context,
        attention=_read_attention(fields, rope, is_interleaved=is_interleaved),
        feed_forward=[dense if i < first else sparse for i in range(num_layers)],
        ropes=[rope] * num_layers,
        context=scaled_context(fields, rope, context),
        names=TensorNames(ignored_layers=fields.integer("num_nextn_predict_layers", 0, low=0)),
    )


def _read_attention(fields: ConfigFields, rope: RopeConfig, *, is_interleaved: bool) -> AttentionConfig:
    num_heads = fields.integer("num_attention_heads")
    latent = LatentConfig(
        query_rank=fields.optional_integer("q_lora_rank") if "q_lora_rank" in fields.values else 1536,
        rank=fields.integer("kv_lora_rank", 512),
        rotary_dim=_even(fields, "qk_rope_head_dim", 64),
        plain_dim=_even(fields, "qk_nope_head_dim", 128),
        value_dim=fields.integer("v_head_dim", 128),
    )
    if latent.value_dim > latent.key_dim:
        raise fields.refuse("v_head_dim", f"at most qk_nope_head_dim + qk_rope_head_dim, {latent.key_dim}")
    if fields.integer("num_key_value_heads", num_heads) != num_heads:
        raise fields.refuse("num_key_value_heads", f"num_attention_heads, {num_heads}")
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=latent.key_dim,
        rotary_dim=latent.rotary_dim,
        scale=latent.key_dim**-0.5 * _sharpening(rope),
        is_interleaved=is_interleaved,
        latent=latent,
    )


def _even(fields: ConfigFields, field: str, default: int) -> int:
    value = fields.integer(field, default)
    if value % 2:
        raise fields.refuse(field, "an even number")
    return value


def _sharpening(rope: RopeConfig) -> float:
    """What scaled positions do to the scale of scores."""
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
