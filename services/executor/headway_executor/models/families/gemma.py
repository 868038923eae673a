"""Gemma, Gemma 2, VaultGemma, and what Gemma 3 shares with that: norms before and behind, soft caps, two kinds of layers in turn."""

from collections.abc import Sequence

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.attention_config import QkNorm, RopeConfig
from headway_executor.models.config import ModelConfig, NormConfig, Scalings
from headway_executor.models.families.reading import (
    every_nth_full,
    read_attention,
    read_feed_forward,
    read_model,
    refuse_partial_rotation,
    refuse_unless,
    window_of,
    windows_of,
)
from headway_executor.models.tensor_names import TensorNames

_NAMES = TensorNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)


def read_gemma1(fields: ConfigFields) -> ModelConfig:
    """``GemmaForCausalLM``. Its "gelu" is the approximate one: old files name it so."""
    refuse_partial_rotation(fields)
    refuse_unless(fields, "use_bidirectional_attention", False)
    has_bias = fields.flag("attention_bias", default=False)
    feed_forward = read_feed_forward(fields, default="gelu_pytorch_tanh")
    if feed_forward.activation == "gelu":
        feed_forward = msgspec.structs.replace(feed_forward, activation="gelu_tanh")
    return read_model(
        fields,
        default_context=8192,
        attention=read_attention(fields, head_dim=256, num_kv_heads=16, qkv_bias=has_bias, output_bias=has_bias),
        feed_forward=feed_forward,
        norm=NormConfig(eps=fields.number("rms_norm_eps", 1e-6), offset=1.0),
        scalings=Scalings(embedding=fields.integer("hidden_size") ** 0.5),
        tied=True,
    )


def read_vaultgemma(fields: ConfigFields) -> ModelConfig:
    """``VaultGemmaForCausalLM``: Gemma 2 without the norms behind attention and feed-forward."""
    names = msgspec.structs.replace(_NAMES, attention_post_norm=None, mlp_post_norm=None)
    return msgspec.structs.replace(read_gemma2(fields), names=names)


def read_gemma2(fields: ConfigFields) -> ModelConfig:
    """``Gemma2ForCausalLM``."""
    refuse_partial_rotation(fields)
    caps = [
        fields.optional_number(field) if field in fields.values else usual
        for field, usual in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0))
    ]
    return read_gemma(fields, every_nth_full(fields, 2), default_context=8192, softcaps=(caps[0], caps[1]))


def read_gemma(
    fields: ConfigFields,
    kinds: Sequence[str],
    *,
    default_context: int,
    softcaps: tuple[float | None, float | None] = (None, None),
    qk_norm: QkNorm = "none",
    ropes: Sequence[RopeConfig] | None = None,
) -> ModelConfig:
    """Either Gemma with layers of these ``kinds``; ``softcaps`` are of scores and of logits."""
    refuse_unless(fields, "use_bidirectional_attention", False)
    has_bias = fields.flag("attention_bias", default=False)
    return read_model(
        fields,
        default_context=default_context,
        attention=read_attention(
            fields,
            head_dim=256,
            num_kv_heads=4,
            scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
            softcap=softcaps[0],
            qk_norm=qk_norm,
            qkv_bias=has_bias,
            output_bias=has_bias,
        ),
        feed_forward=read_feed_forward(fields, field="hidden_activation", default="gelu_pytorch_tanh"),
        norm=NormConfig(eps=fields.number("rms_norm_eps", 1e-6), offset=1.0),
        windows=windows_of(fields, kinds, window_of(fields)),
        ropes=ropes,
        scalings=Scalings(embedding=fields.integer("hidden_size") ** 0.5, logits_softcap=softcaps[1]),
        names=_NAMES,
        tied=True,
    )
