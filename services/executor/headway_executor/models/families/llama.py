"""Llama 2, 3 and 3.x, and what differs from it by a few fields: InternLM3, IQuest-Coder, Arcee, Seed-OSS, Helium, Code World
Model.
"""

from collections.abc import Mapping

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig
from headway_executor.models.families.reading import (
    FULL,
    SLIDING,
    layer_types_of,
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    read_rms_norm,
    refuse_others,
    refuse_partial_rotation,
    refuse_unless,
    window_of,
    windows_of,
)
from headway_executor.models.tensor_names import TensorNames

_CWM_ROPE = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


_INTERNLM3: Mapping[str, object] = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32_768,
}
_IQUEST: Mapping[str, object] = {**_INTERNLM3, "num_key_value_heads": 8, "max_position_embeddings": 131_072}


def read_llama(fields: ConfigFields) -> ModelConfig:
    """``LlamaForCausalLM``; transformers has the models below in this class, with a ``model_type`` of their own."""
    kind = fields.values.get("model_type")
    if kind == "internlm3":
        return read_internlm3(fields)
    return read_iquest_coder(fields) if kind == "iquestcoder" else _read_llama(fields)


def read_internlm3(fields: ConfigFields) -> ModelConfig:
    """``InternLM3ForCausalLM``."""
    fields = ConfigFields(fields.source, {**_INTERNLM3, **fields.values})
    fields = fields.renamed(attention_bias="qkv_bias", mlp_bias="bias")
    refuse_unless(fields, "mlp_bias", fields.flag("attention_bias", default=False))
    return _read_llama(fields)


def read_iquest_coder(fields: ConfigFields) -> ModelConfig:
    """``IQuestCoderForCausalLM``."""
    refuse_others(fields, {"clip_qkv": None, "use_sliding_window": False})
    return _read_llama(ConfigFields(fields.source, {**_IQUEST, **fields.values}))


def _read_llama(fields: ConfigFields) -> ModelConfig:
    refuse_partial_rotation(fields)
    has_bias = fields.flag("attention_bias", default=False)
    return read_model(
        fields,
        default_context=2048,
        attention=read_attention(fields, qkv_bias=has_bias, output_bias=has_bias),
        feed_forward=read_feed_forward(fields, has_bias=fields.flag("mlp_bias", default=False)),
    )


def read_arcee(fields: ConfigFields) -> ModelConfig:
    """``ArceeForCausalLM``: a feed-forward without a gate."""
    refuse_partial_rotation(fields)
    has_bias, in_mlp = (fields.flag(field, default=False) for field in ("attention_bias", "mlp_bias"))
    return read_model(
        fields,
        default_context=4096,
        attention=read_attention(fields, qkv_bias=has_bias, output_bias=has_bias),
        feed_forward=read_feed_forward(fields, default="relu2", is_gated=False, has_bias=in_mlp),
        norm=read_rms_norm(fields, eps=1e-5),
        names=TensorNames(gate_up=("mlp.up_proj",)),
    )


def read_seed_oss(fields: ConfigFields) -> ModelConfig:
    """``SeedOssForCausalLM``."""
    refuse_partial_rotation(fields)
    return read_model(
        fields,
        default_context=524_288,
        attention=read_attention(
            fields,
            head_dim=128,
            num_kv_heads=8,
            qkv_bias=fields.flag("attention_bias", default=True),
            output_bias=fields.flag("attention_out_bias", default=False),
        ),
        feed_forward=read_feed_forward(fields, has_bias=fields.flag("mlp_bias", default=False)),
    )


def read_helium(fields: ConfigFields) -> ModelConfig:
    """``HeliumForCausalLM``: neighbouring channels are rotated."""
    refuse_partial_rotation(fields)
    return read_model(
        fields,
        default_context=4096,
        attention=read_attention(
            fields,
            head_dim=128,
            num_kv_heads=20,
            is_interleaved=True,
            qkv_bias=fields.flag("attention_bias", default=False),
        ),
        feed_forward=read_feed_forward(fields, has_bias=fields.flag("mlp_bias", default=False)),
        norm=read_rms_norm(fields, eps=1e-8, rounds_first=False),
        theta=100_000.0,
    )


def read_cwm(fields: ConfigFields) -> ModelConfig:
    """``CwmForCausalLM``: all layers but every fourth have a window."""
    refuse_partial_rotation(fields)
    if fields.section("rope_scaling") is None and fields.section("rope_parameters") is None:
        fields = ConfigFields(fields.source, {**fields.values, "rope_parameters": _CWM_ROPE})
    kinds = layer_types_of(fields, [SLIDING if i % 4 else FULL for i in range(num_layers_of(fields))])
    return read_model(
        fields,
        default_context=131_072,
        attention=read_attention(fields, head_dim=128, num_kv_heads=8),
        feed_forward=read_feed_forward(fields, has_bias=fields.flag("mlp_bias", default=False)),
        norm=read_rms_norm(fields, eps=1e-5),
        windows=windows_of(fields, kinds, window_of(fields, 8192)),
        theta=1e6,
    )
