"""Kimi Linear and Ling 3 (Bailing hybrid): latent attention in some layers, and in the others a state of the delta rule with
a decay for each channel; experts as in DeepSeek V3.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.attention_config import RopeConfig
from headway_executor.models.config import FeedForwardConfig, ModelConfig, RecurrenceConfig
from headway_executor.models.families.deepseek import read_latent_attention
from headway_executor.models.families.positions import read_rope
from headway_executor.models.families.reading import (
    FULL,
    LINEAR,
    kinds_of,
    num_layers_of,
    read_model,
    read_rms_norm,
    refuse_others,
    refuse_partial_rotation,
    refuse_unless,
)
from headway_executor.models.families.routing import behind_dense_layers, read_corrected
from headway_executor.models.tensor_names import ExpertNames, RecurrenceNames, TensorNames

_MOE = "block_sparse_moe."
_KIMI_EXPERTS = ExpertNames(
    router=f"{_MOE}gate",
    correction=f"{_MOE}gate.e_score_correction_bias",
    expert=f"{_MOE}experts.{{}}.",
    gate_up=("w1", "w3"),
    down="w2",
    shared=f"{_MOE}shared_experts.",
)
_KIMI_NAMES = TensorNames(
    other_feed_forward=_MOE,
    in_transformers=(("self_attn.forget_gate.", "self_attn."), ("mlp.shared_experts.", f"{_MOE}shared_experts.")),
)
_LING_NAMES = TensorNames(
    embedding="model.word_embeddings.weight",
    output="attention.dense",
    in_transformers=(
        ("self_attn.forget_gate.", "attention."),
        ("self_attn.o_proj.", "attention.dense."),
        ("self_attn.", "attention."),
    ),
)
_OTHER_NAMES: Mapping[str, str] = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
"""Of fields, in published files."""
_ONE_WAY: Mapping[str, object] = {
    "moe_router_activation_func": "sigmoid",
    "score_function": "sigmoid",
    "attention_bias": False,
    "moe_layer_freq": 1,
    "use_qkv_bias": False,
    "use_bias": False,
}
"""Fields that have one value."""


def read_kimi_linear(fields: ConfigFields) -> ModelConfig:
    """``KimiLinearForCausalLM``: without positions."""
    fields = _with_defaults(fields, {"q_lora_rank": None, "num_experts": 256})
    for field in ("mla_use_nope", "use_grouped_topk"):
        refuse_unless(fields, field, True)
    section = fields.section("linear_attn_config") or ConfigFields(fields.source, {})
    heads = section.integer("num_heads", fields.integer("linear_num_heads", 32))
    width = section.integer("head_dim", fields.integer("linear_head_dim", 128))
    taps = section.integer("short_conv_kernel_size", fields.integer("linear_conv_kernel_dim", 4, low=2), low=2)
    inputs = ("q_proj", "k_proj", "v_proj", "g_a_proj", "b_proj", "f_a_proj")
    state = _state(fields, "self_attn.", inputs, heads=heads, width=width, taps=taps)
    names = msgspec.structs.replace(state.names, steps="self_attn.f_b_proj", gates="self_attn.g_b_proj")
    state = msgspec.structs.replace(state, gate_rank=width, step_rank=width, decay_shape=(1, 1, heads, 1), names=names)
    experts = read_corrected(fields, ("num_experts", None), scaling=2.446)
    usual = [FULL if i and i % 4 == 0 else LINEAR for i in range(num_layers_of(fields))]
    has_kinds = fields.values.get("layer_types") is not None
    kinds = kinds_of(fields, usual, (FULL, LINEAR)) if has_kinds else _listed(section, usual)
    return _read(
        fields,
        state,
        kinds,
        feeds=behind_dense_layers(
            fields, msgspec.structs.replace(experts, names=_KIMI_EXPERTS), size=1024, shared=1, first=1
        ),
        rope=None,
        default_context=1_048_576,
        eps=1e-5,
        names=_KIMI_NAMES,
    )


def read_bailing_hybrid(fields: ConfigFields) -> ModelConfig:
    """``BailingHybridForCausalLM``: gates of heads behind attention. Nothing reads its layers that predict further tokens."""
    fields = _with_defaults(fields, {"q_lora_rank": None, "num_experts": 512, "rope_theta": 6e6})
    refuse_unless(fields, "q_lora_rank", None)
    refuse_partial_rotation(fields)
    heads, group = fields.integer("num_attention_heads"), fields.integer("layer_group_size", 6)
    # transformers writes the width of the rotated part as head_dim.
    width = fields.integer("linear_head_dim", fields.integer("head_dim", 128))
    taps = fields.integer("short_conv_kernel_size", 4, low=2)
    inputs = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "f_proj")
    state = _state(fields, "attention.", inputs, heads=heads, width=width, taps=taps)
    state = msgspec.structs.replace(state, names=msgspec.structs.replace(state.names, output="attention.dense"))
    if fields.flag("kda_safe_gate", default=True):
        bound = fields.number("kda_lower_bound", -5.0, above=-math.inf)
        if bound >= 0:
            raise fields.refuse("kda_lower_bound", "a number below 0")
        state = msgspec.structs.replace(state, decay_bound=bound)
    experts = read_corrected(fields, ("num_experts", None), scaling=2.5, groups=(8, 4))
    names = msgspec.structs.replace(experts.names, correction="mlp.gate.expert_bias")
    usual = [LINEAR if (i + 1) % group else FULL for i in range(num_layers_of(fields))]
    context = fields.integer("max_position_embeddings", 262_144)
    config = _read(
        fields,
        state,
        kinds_of(fields, usual, (FULL, LINEAR)),
        feeds=behind_dense_layers(fields, msgspec.structs.replace(experts, names=names), size=768, shared=1, first=2),
        rope=read_rope(fields, context),
        default_context=262_144,
        eps=1e-6,
        names=msgspec.structs.replace(_LING_NAMES, ignored_layers=fields.integer("num_nextn_predict_layers", 1, low=0)),
    )
    attention = config.attention
    assert attention.latent is not None
    latent = msgspec.structs.replace(attention.latent, prefix="attention.", output="dense", gates="g_proj")
    attention = msgspec.structs.replace(attention, latent=latent, gates="of_heads")
    return msgspec.structs.replace(config, attention=attention)


def _with_defaults(fields: ConfigFields, defaults: Mapping[str, object]) -> ConfigFields:
    return ConfigFields(fields.source, {**defaults, **fields.values}).renamed(**_OTHER_NAMES)


def _listed(section: ConfigFields, usual: Sequence[str]) -> Sequence[str]:
    """The kind of each layer where lists number them from 1 on."""
    kinds = {"full_attn_layers": FULL, "kda_layers": LINEAR}
    if not all(field in section.values for field in kinds):
        return usual
    listed = [(number, kind) for field, kind in kinds.items() for number in _numbers(section, field)]
    if sorted(number for number, _ in listed) != list(range(1, len(usual) + 1)):
        raise section.refuse("kda_layers", f"all numbers from 1 to {len(usual)} that full_attn_layers has not")
    return [kind for _, kind in sorted(listed)]


def _numbers(section: ConfigFields, field: str) -> list[int]:
    numbers = section.values[field]
    if not isinstance(numbers, list) or not all(isinstance(number, int) for number in numbers):
        raise section.refuse(field, "a list of integers")
    return numbers


def _state(
    fields: ConfigFields, prefix: str, inputs: Sequence[str], *, heads: int, width: int, taps: int
) -> RecurrenceConfig:
    refuse_unless(fields, "hidden_act", "silu")
    return RecurrenceConfig(
        kind="delta",
        taps=taps,
        num_heads=heads,
        num_key_heads=heads,
        key_dim=width,
        value_dim=width,
        norm_dim=width,
        gate="sigmoid",
        decays_channels=True,
        names=RecurrenceNames(
            inputs=tuple(prefix + name for name in inputs),
            convolution=tuple(f"{prefix}{part}_conv1d" for part in "qkv"),
            output=f"{prefix}o_proj",
            decay=f"{prefix}A_log",
            step_bias=f"{prefix}dt_bias",
            norm=f"{prefix}o_norm",
        ),
    )


def _read(
    fields: ConfigFields,
    state: RecurrenceConfig,
    kinds: Sequence[str],
    *,
    feeds: Sequence[FeedForwardConfig],
    rope: RopeConfig | None,
    default_context: int,
    eps: float,
    names: TensorNames,
) -> ModelConfig:
    refuse_others(fields, _ONE_WAY)
    return read_model(
        fields,
        default_context=default_context,
        attention=read_latent_attention(fields, rope or RopeConfig(), is_interleaved=True),
        feed_forward=feeds,
        norm=read_rms_norm(fields, eps=eps),
        ropes=[rope] * len(kinds),
        recurrences=[state if kind == LINEAR else None for kind in kinds],
        names=names,
    )
