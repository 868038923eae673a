"""DeepSeek V2 and V3: latent attention, groups of experts beside shared ones, the first layers dense.

GLM 4.7 Flash and Mistral 4 are such, too; Youtu is one without experts, and MiniCPM3 one with factors. DeepSeek V3.2 and GLM 5 have
an index of the keys that a query sees.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.attention_config import AttentionConfig, IndexConfig, LatentConfig, RopeConfig
from headway_executor.models.config import ExpertsConfig, FeedForwardConfig, ModelConfig, Scalings
from headway_executor.models.families.mistral import growth_of
from headway_executor.models.families.positions import read_long_rope, read_rope, rope_section, scaled_context
from headway_executor.models.families.reading import (
    num_layers_of,
    read_feed_forward,
    read_model,
    refuse_others,
    refuse_partial_rotation,
    refuse_unless,
)
from headway_executor.models.families.routing import behind_dense_layers, in_groups, read_corrected, read_routing
from headway_executor.models.tensor_names import TensorNames

_GLM_LITE: Mapping[str, object] = {
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rms_norm_eps": 1e-5,
}
_GLM5: Mapping[str, object] = {
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "rms_norm_eps": 1e-5,
}
_KINDS, _PATTERN = "indexer_types", "index_topk_pattern"
_FULL, _SHARED = "full", "shared"
_MINICPM3: Mapping[str, object] = {
    "q_lora_rank": 768,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "rms_norm_eps": 1e-5,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}
_MISTRAL4: Mapping[str, object] = {"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64}
_MISTRAL4_ROPE: Mapping[str, object] = {
    "rope_type": "yarn",
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read_deepseek_v2(fields: ConfigFields) -> ModelConfig:
    """``DeepseekV2ForCausalLM``."""
    refuse_others(fields, {"scoring_func": "softmax", "norm_topk_prob": False, "mlp_bias": False})
    routing = read_routing(fields, ("n_routed_experts", 64), chosen=8, is_normalised=False)
    routing = replace(routing, scaling=fields.number("routed_scaling_factor", 1.0))
    method = fields.values.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.refuse("topk_method", "greedy, group_limited_greedy")
    if method != "greedy":
        routing = in_groups(fields, routing, scores_per_group=1)
    feeds = behind_dense_layers(fields, ExpertsConfig(routing=routing), size=1407, shared=2, first=0)
    return _read(fields, feeds, default_context=2048, is_interleaved=True)


def read_deepseek_v3(fields: ConfigFields) -> ModelConfig:
    """``DeepseekV3ForCausalLM``. Nothing reads its layers that predict further tokens."""
    experts = read_corrected(fields, ("n_routed_experts", 256), scaling=2.5, groups=(8, 4))
    feeds = behind_dense_layers(fields, experts, size=2048, shared=1, first=3)
    is_interleaved = fields.flag("rope_interleave", default=True)
    return _read(fields, feeds, default_context=4096, is_interleaved=is_interleaved, further=1)


def read_deepseek_v32(fields: ConfigFields) -> ModelConfig:
    """``DeepseekV32ForCausalLM``: DeepSeek V3, and each layer has an index."""
    return _read_indexed(fields, groups=(8, 4), default_context=163_840, is_interleaved=False)


def read_glm_moe_dsa(fields: ConfigFields) -> ModelConfig:
    """``GlmMoeDsaForCausalLM``: some layers have an index, and those behind see the keys that it chose."""
    fields = ConfigFields(fields.source, {**_GLM5, **fields.values})
    config = _read_indexed(fields, groups=(1, 1), default_context=202_752, is_interleaved=True)
    kinds = _kinds_of_indices(fields, config.num_layers)
    layers = zip(config.layers, kinds, strict=True)
    return msgspec.structs.replace(
        config, layers=tuple(msgspec.structs.replace(layer, sees_as_before=kind == _SHARED) for layer, kind in layers)
    )


def _read_indexed(
    fields: ConfigFields, *, groups: tuple[int, int], default_context: int, is_interleaved: bool
) -> ModelConfig:
    """DeepSeek V3 with an index in each layer, whose heads may be ``is_interleaved``; all others are."""
    refuse_unless(fields, "rope_interleave", True)
    experts = read_corrected(fields, ("n_routed_experts", 256), scaling=2.5, groups=groups)
    feeds = behind_dense_layers(fields, experts, size=2048, shared=1, first=3)
    config = _read(fields, feeds, default_context=default_context, is_interleaved=True, further=1)
    latent, rotary_dim = config.attention.latent, config.attention.rotary_dim
    assert latent is not None
    if latent.query_rank is None:
        raise fields.refuse("q_lora_rank", "a number, with an index of keys")
    index = IndexConfig(
        num_heads=fields.integer("index_n_heads", 64),
        head_dim=_even(fields, "index_head_dim", 128),
        num_chosen=fields.integer("index_topk", 2048),
        is_interleaved=is_interleaved,
    )
    if not rotary_dim <= index.head_dim <= latent.key_dim:
        raise fields.refuse("index_head_dim", f"{rotary_dim} to {latent.key_dim}, the channels of a key")
    latent = msgspec.structs.replace(latent, index=index)
    return msgspec.structs.replace(config, attention=msgspec.structs.replace(config.attention, latent=latent))


def _kinds_of_indices(fields: ConfigFields, num_layers: int) -> list[str]:
    """By layer; the first must have one of its own."""
    field = next((name for name in (_KINDS, _PATTERN) if fields.values.get(name) is not None), None)
    if field is None:
        every = max(1, fields.integer("index_topk_freq", 1, low=0))
        offset = fields.integer("index_skip_topk_offset", 2, low=0)
        return [_SHARED if max(index - offset + 1, 0) % every else _FULL for index in range(num_layers)]
    kinds = fields.values[field]
    if field == _PATTERN and isinstance(kinds, str):
        kinds = [{"F": _FULL, "S": _SHARED}.get(letter, letter) for letter in kinds]
    is_list = isinstance(kinds, list) and len(kinds) == num_layers and all(kind in (_FULL, _SHARED) for kind in kinds)
    if not is_list or kinds[0] == _SHARED:
        raise fields.refuse(field, f"{num_layers} of full (F) and shared (S), the first full")
    return list(kinds)


def read_glm4_moe_lite(fields: ConfigFields) -> ModelConfig:
    """``Glm4MoeLiteForCausalLM``. Nothing reads its layers that predict further tokens."""
    fields = ConfigFields(fields.source, {**_GLM_LITE, **fields.values})
    experts = read_corrected(fields, ("n_routed_experts", 64), chosen=4, scaling=1.8)
    feeds = behind_dense_layers(fields, experts, size=1536, shared=1, first=1)
    is_interleaved = fields.flag("rope_interleave", default=True)
    return _read(fields, feeds, default_context=202_752, is_interleaved=is_interleaved, further=1)


def read_mistral4(fields: ConfigFields) -> ModelConfig:
    """``Mistral4ForCausalLM``: experts by a softmax; queries grow with their position."""
    rope = dict(rope_section(fields).values or _MISTRAL4_ROPE)
    rope.pop("partial_rotary_factor", None)  # It says what qk_rope_head_dim says.
    fields = ConfigFields(fields.source, {**_MISTRAL4, **fields.values, "rope_parameters": rope, "rope_scaling": None})
    is_normalised = fields.flag("norm_topk_prob", default=True)
    routing = read_routing(fields, ("n_routed_experts", 128), chosen=4, is_normalised=is_normalised)
    routing = replace(routing, scaling=fields.number("routed_scaling_factor", 1.0))
    experts = ExpertsConfig(routing=in_groups(fields, routing, scores_per_group=2, default=(1, 1)))
    feeds = behind_dense_layers(fields, experts, size=2048, shared=1, first=0)
    is_interleaved = fields.flag("rope_interleave", default=True)
    config = _read(fields, feeds, default_context=1_048_576, is_interleaved=is_interleaved)
    growth = growth_of(fields)
    layers = tuple(msgspec.structs.replace(layer, query_growth=growth) for layer in config.layers)
    return msgspec.structs.replace(config, layers=layers)


def read_youtu(fields: ConfigFields) -> ModelConfig:
    """``YoutuForCausalLM``: without experts."""
    is_interleaved = fields.flag("rope_interleave", default=True)
    feed = read_feed_forward(fields)
    return _read(fields, feed, default_context=131_072, is_interleaved=is_interleaved, tied=True)


def read_minicpm3(fields: ConfigFields) -> ModelConfig:
    """``MiniCPM3ForCausalLM``: factors on embeddings, on what layers add, and on logits; longrope up to its first context."""
    refuse_unless(fields, "mlp_bias", False)
    width, num_layers = fields.integer("hidden_size"), num_layers_of(fields)
    value_dim = max(1, width // fields.integer("num_attention_heads"))
    fields = ConfigFields(fields.source, {**_MINICPM3, "v_head_dim": value_dim, **fields.values})
    # A null means the same as transformers' own: no factor.
    depth, base = (fields.values[field] for field in ("scale_depth", "dim_model_base"))
    scalings = Scalings(
        embedding=fields.number("scale_emb"),
        residual=1.0 if depth is None else fields.number("scale_depth") / num_layers**0.5,
        logits=1.0 if base is None else fields.integer("dim_model_base") / width,
    )
    config = _read(fields, read_feed_forward(fields), default_context=32_768, is_interleaved=False, tied=True)
    return msgspec.structs.replace(config, scalings=scalings)


def _read(
    fields: ConfigFields,
    feed_forward: FeedForwardConfig | Sequence[FeedForwardConfig],
    *,
    default_context: int,
    is_interleaved: bool,
    further: int = 0,
    tied: bool = False,
) -> ModelConfig:
    """``further``: how many layers predict further tokens, by default."""
    refuse_partial_rotation(fields)
    refuse_others(fields, {"attention_bias": False, "moe_layer_freq": 1})
    context = fields.integer("max_position_embeddings", default_context)
    rope = read_long_rope(fields, context, fields.integer("qk_rope_head_dim", 64) // 2) or read_rope(fields, context)
    return read_model(
        fields,
        default_context=default_context,
        attention=read_latent_attention(fields, rope, is_interleaved=is_interleaved),
        feed_forward=feed_forward,
        ropes=[rope] * num_layers_of(fields),
        context=min(context, rope.original_context) if rope.factors else scaled_context(fields, rope, context),
        names=TensorNames(ignored_layers=fields.integer("num_nextn_predict_layers", further, low=0)),
        tied=tied,
    )


def read_latent_attention(fields: ConfigFields, rope: RopeConfig, *, is_interleaved: bool) -> AttentionConfig:
    """Its sizes; a rope with ``mscale_all_dim`` makes scores larger."""
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
