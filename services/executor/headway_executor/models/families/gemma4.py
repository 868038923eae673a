"""Gemma 4 (text): two kinds of layers in turn, whose heads differ in number and size, and a factor behind each layer."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.attention_config import AttentionConfig, RopeConfig
from headway_executor.models.config import (
    ExpertsConfig,
    FeedForwardConfig,
    LayerConfig,
    LayerInputs,
    ModelConfig,
    NormConfig,
    Scalings,
)
from headway_executor.models.families.positions import read_rope
from headway_executor.models.families.reading import (
    FULL,
    SLIDING,
    layer_types_of,
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    refuse_unless,
    windows_of,
)
from headway_executor.models.families.routing import read_routing
from headway_executor.models.tensor_names import ExpertNames, ExpertNorms, TensorNames

_NAMES = TensorNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
    layer_factor="layer_scalar",
)
_EXPERTS = ExpertNames(
    router="router.proj",
    expert="experts.{}.",
    shared="mlp.",
    norms=ExpertNorms(
        router="router.scale",
        weights="router.per_expert_scale",
        experts="pre_feedforward_layernorm_2",
        experts_post="post_feedforward_layernorm_2",
        shared="pre_feedforward_layernorm",
        shared_post="post_feedforward_layernorm_1",
    ),
)
_CONTEXT, _PATTERN, _WIDE_HEAD, _WINDOW = 131_072, 6, 512, 512
_THETAS = {SLIDING: 10_000.0, FULL: 1_000_000.0}
_OVERRIDES = ("head_dim", "num_key_value_heads")
_UNIFIED = {"max_position_embeddings": 262_144, "sliding_window": 1024, "use_bidirectional_attention": "vision"}
_NOT_UNIFIED = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}


def read_gemma4(fields: ConfigFields) -> ModelConfig:
    """``Gemma4ForCausalLM``. Tokens of pictures may see each other; those of a text do not."""
    if fields.values.get("use_bidirectional_attention") != "vision":
        refuse_unless(fields, "use_bidirectional_attention", None)
    kinds = _kinds_of(fields)
    sources = sources_of(fields, kinds, 0)
    attention, inputs = _attention_of(fields), _layer_inputs_of(fields)
    layers = [_attention_of(_of_layer(fields, index, kind)) for index, kind in enumerate(kinds)]
    feed = read_feed_forward(fields, field="hidden_activation", default="gelu_pytorch_tanh", size=9216)
    names = _NAMES
    wide = msgspec.structs.replace(feed, intermediate_size=2 * feed.intermediate_size)
    is_wider = fields.flag("use_double_wide_mlp", default=False)
    feeds = [wide if source is not None and is_wider else feed for source in sources]
    if fields.flag("enable_moe_block", default=False):
        feeds = [_with_experts(fields, dense) for dense in feeds]
        names = msgspec.structs.replace(_NAMES, mlp_norm=None)  # Router, experts and the dense one have their own.
    model = read_model(
        fields,
        default_context=_CONTEXT,
        attention=attention,
        feed_forward=feeds,
        norm=NormConfig(eps=fields.number("rms_norm_eps", 1e-6)),
        windows=windows_of(fields, kinds, fields.integer("sliding_window", _WINDOW)),
        ropes=ropes_of(fields, kinds, 0.25),
        scalings=Scalings(
            embedding=fields.integer("hidden_size") ** 0.5,
            logits_softcap=fields.optional_number("final_logit_softcapping"),
        ),
        names=names,
        tied=True,
    )
    uneven = [
        msgspec.structs.replace(_uneven(fields, layer, kind, own, attention), keys_of=source)
        for layer, kind, own, source in zip(model.layers, kinds, layers, sources, strict=True)
    ]
    for layer in uneven:
        if layer.keys_of is not None and layer.attention != uneven[layer.keys_of].attention:
            raise fields.refuse("per_layer_config", "layers that share keys and values alike")
    return msgspec.structs.replace(model, layers=tuple(uneven), layer_inputs=inputs)


def read_gemma4_unified(fields: ConfigFields) -> ModelConfig:
    """``Gemma4UnifiedForCausalLM`` (12B): without inputs of each layer's own and experts, and a context twice as long."""
    return read_gemma4(ConfigFields(fields.source, {**_UNIFIED, **fields.values, **_NOT_UNIFIED}))


def _with_experts(fields: ConfigFields, dense: FeedForwardConfig) -> FeedForwardConfig:
    """Beside the ``dense`` feed-forward."""
    routing = read_routing(fields, ("num_experts", None), chosen=None, is_normalised=True, chosen_field="top_k_experts")
    experts = ExpertsConfig(routing=routing, shared_size=dense.intermediate_size, names=_EXPERTS)
    size = fields.integer("moe_intermediate_size")
    return FeedForwardConfig(intermediate_size=size, activation=dense.activation, experts=experts)


def _layer_inputs_of(fields: ConfigFields) -> LayerInputs | None:
    size = fields.integer("hidden_size_per_layer_input", 256, low=0)
    words, needed = fields.integer("vocab_size_per_layer_input", 262_144), fields.integer("vocab_size")
    if size and words < needed:  # Each token looks there for its row.
        raise fields.refuse("vocab_size_per_layer_input", f"vocab_size, {needed}, or more")
    return LayerInputs(size=size, vocab_size=words) if size else None


def sources_of(fields: ConfigFields, kinds: Sequence[str], default: int) -> list[int | None]:
    """The last layers, by ``default`` so many, read the keys and values of the last one before them of their kind."""
    first = len(kinds) - fields.integer("num_kv_shared_layers", default, low=0, high=len(kinds))
    sources: list[int | None] = [None] * first
    for kind in kinds[first:]:
        if kind not in kinds[:first]:
            raise fields.refuse("num_kv_shared_layers", f"fewer, so that a layer of {kind} has keys to share")
        sources.append(max(index for index in range(first) if kinds[index] == kind))
    return sources


def _uneven(
    fields: ConfigFields, layer: LayerConfig, kind: str, own: AttentionConfig, usual: AttentionConfig
) -> LayerConfig:
    are_keys = kind == FULL and fields.flag("attention_k_eq_v", default=False)
    own = msgspec.structs.replace(own, values_are_keys=are_keys)
    return layer if own == usual else msgspec.structs.replace(layer, attention=own)


def _attention_of(fields: ConfigFields) -> AttentionConfig:
    has_bias = fields.flag("attention_bias", default=False)
    read = read_attention(
        fields, head_dim=256, num_kv_heads=4, scale=1.0, qk_norm="head", qkv_bias=has_bias, output_bias=has_bias
    )
    return msgspec.structs.replace(read, norms_values=True)


def _kinds_of(fields: ConfigFields) -> list[str]:
    """The last layer sees all positions, whatever the file says."""
    count = num_layers_of(fields)
    kinds = layer_types_of(fields, [SLIDING if (i + 1) % _PATTERN else FULL for i in range(count)])
    return [*kinds[:-1], FULL]


def _of_layer(fields: ConfigFields, index: int, kind: str) -> ConfigFields:
    """The fields of one layer: files name what differs by layer, or by the kind of layer in older ones."""
    own: Mapping[str, Any] = {}
    if fields.values.get("per_layer_config") is not None:
        by_layer = fields.section("per_layer_config") or ConfigFields(fields.source, {})
        section = by_layer.section(str(index))
        own = {} if section is None else section.values
        unknown = own.keys() - set(_OVERRIDES)
        if unknown:
            raise by_layer.refuse(str(index), " and ".join(_OVERRIDES))
    elif kind == FULL:
        heads = fields.values.get("num_global_key_value_heads") if fields.values.get("attention_k_eq_v") else None
        own = {"head_dim": fields.integer("global_head_dim", _WIDE_HEAD)}
        own |= {} if heads is None else {"num_key_value_heads": heads}
    return ConfigFields(fields.source, {**fields.values, **own})


def ropes_of(fields: ConfigFields, kinds: Sequence[str], share: float) -> list[RopeConfig | None]:
    """Of each layer, if its kind has one. Without windows, a ``share`` of the frequencies turns, by default."""
    empty = ConfigFields(fields.source, {})
    parameters = fields.section("rope_parameters") or empty
    ropes = {}
    for kind, theta in _THETAS.items():
        section = parameters.section(kind)
        if section is None and (kind == SLIDING or not parameters.values):
            section = ConfigFields(
                fields.source,
                {
                    "rope_type": "default" if kind == SLIDING else "proportional",
                    "partial_rotary_factor": 1.0 if kind == SLIDING else share,
                },
            )
        ropes[kind] = _rope_of(section or empty, theta)
    return [ropes.get(kind) for kind in kinds]


def _rope_of(section: ConfigFields, theta: float) -> RopeConfig:
    if section.values.get("rope_type") != "proportional":
        refuse_unless(section, "partial_rotary_factor", 1.0)
        refuse_unless(section, "rope_type", "default")
        return read_rope(section, _CONTEXT, section=section, theta=theta)
    share = section.number("partial_rotary_factor", 1.0)
    if share > 1:
        raise section.refuse("partial_rotary_factor", "a number up to 1")
    return RopeConfig(
        kind="proportional",
        theta=section.number("rope_theta", theta),
        share=share,
        factor=section.number("factor", 1.0),
    )
