"""MiMo-V2-Flash: windows with attention sinks and twice the heads of keys, values narrower than keys, experts."""

from collections.abc import Mapping, Sequence

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.attention_config import AttentionConfig, RopeConfig
from headway_executor.models.config import ModelConfig, Multipliers
from headway_executor.models.families.positions import read_rope
from headway_executor.models.families.reading import (
    FULL,
    SLIDING,
    layer_types_of,
    num_layers_of,
    read_attention,
    read_model,
    read_rms_norm,
    refuse_others,
    refuse_unless,
    windows_of,
    with_attentions,
)
from headway_executor.models.families.routing import behind_dense_layers, read_corrected
from headway_executor.models.tensor_names import TensorNames

_NAMES = TensorNames(sinks="self_attn.attention_sink_bias", ignored_prefixes=("model.mtp.",))
_CONTEXT, _PATTERN, _WINDOW, _SHARE = 131_072, 6, 129, 0.334
_THETAS = {FULL: ("rope_theta", 5e6), SLIDING: ("swa_rope_theta", 10_000.0)}
_ONE_WAY: Mapping[str, object] = {
    "n_shared_experts": None,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
}
"""Fields that have one value, of files that are older than transformers' own model."""


def read_mimo_v2_flash(fields: ConfigFields) -> ModelConfig:
    """``MiMoV2FlashForCausalLM``. Nothing reads its layers that predict further tokens."""
    fields = fields.renamed(rms_norm_eps="layernorm_epsilon")
    count = num_layers_of(fields)
    kinds = layer_types_of(fields, [SLIDING if i and (i + 1) % _PATTERN else FULL for i in range(count)])
    refuse_others(fields, _ONE_WAY)
    refuse_unless(fields, "hybrid_layer_pattern", [int(kind == SLIDING) for kind in kinds])
    # Older files say how many positions a token sees before itself.
    window = fields.optional_integer("sliding_window_size")
    window = fields.integer("sliding_window", _WINDOW) if window is None else window + 1
    attention, near = _attention_of(fields)
    experts = read_corrected(fields, ("n_routed_experts", 256))
    feeds = behind_dense_layers(fields, experts, size=2048, shared=0, first=1)
    refuse_unless(fields, "moe_layer_freq", [int(feed.experts is not None) for feed in feeds])
    model = read_model(
        fields,
        default_context=_CONTEXT,
        attention=attention,
        feed_forward=feeds,
        norm=read_rms_norm(fields, eps=1e-5),
        windows=windows_of(fields, kinds, window),
        ropes=_ropes_of(fields, kinds),
        multipliers=Multipliers(values=_value_scale(fields)),
        names=_NAMES,
    )
    return with_attentions(model, [near if kind == SLIDING else attention for kind in kinds])


def _value_scale(fields: ConfigFields) -> float:
    """A null is none."""
    field = "attention_value_scale"
    return 1.0 if field in fields.values and fields.values[field] is None else fields.number(field, 0.707)


def _attention_of(fields: ConfigFields) -> tuple[AttentionConfig, AttentionConfig]:
    """Without a window, and with one."""
    has_bias = fields.flag("attention_bias", default=False)
    sections = [section for kind in _THETAS if (section := _rope_section(fields, kind)) is not None]
    shares = {section.number("partial_rotary_factor", _SHARE) for section in sections}
    share = shares.pop() if shares else fields.number("partial_rotary_factor", _SHARE)
    if shares:
        raise fields.refuse("rope_parameters", "one partial_rotary_factor of all layers")
    read = read_attention(fields, head_dim=192, num_kv_heads=4, partial=share, qkv_bias=has_bias)
    value_dim = fields.integer("v_head_dim", 128)
    if value_dim > read.head_dim:
        raise fields.refuse("v_head_dim", f"at most head_dim, {read.head_dim}")
    far = msgspec.structs.replace(read, value_dim=0 if value_dim == read.head_dim else value_dim, has_sinks=False)
    near_heads = 2 * read.num_kv_heads
    if read.num_heads % near_heads:
        raise fields.refuse("num_key_value_heads", f"half of a divisor of num_attention_heads, {read.num_heads}")
    refuse_others(
        fields,
        {
            "swa_num_attention_heads": read.num_heads,
            "swa_num_key_value_heads": near_heads,
            "swa_head_dim": read.head_dim,
            "swa_v_head_dim": value_dim,
        },
    )
    return far, msgspec.structs.replace(far, num_kv_heads=near_heads, has_sinks=True)


def _rope_section(fields: ConfigFields, kind: str) -> ConfigFields | None:
    parameters = fields.section("rope_parameters")
    return None if parameters is None else parameters.section(kind)


def _ropes_of(fields: ConfigFields, kinds: Sequence[str]) -> list[RopeConfig]:
    refuse_unless(fields, "rope_scaling", None)
    context = fields.integer("max_position_embeddings", _CONTEXT)
    empty = ConfigFields(fields.source, {})
    ropes = {
        kind: read_rope(fields, context, section=_rope_section(fields, kind) or empty, theta=theta, theta_field=field)
        for kind, (field, theta) in _THETAS.items()
    }
    return [ropes[kind] for kind in kinds]
