"""StableLM, Nemotron and Jais 2: layer norms; in the first two, a part of each head rotated."""

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig, NormConfig
from headway_executor.models.families.positions import rotary_factor
from headway_executor.models.families.reading import (
    read_attention,
    read_feed_forward,
    read_model,
    refuse_partial_rotation,
    refuse_unless,
)
from headway_executor.models.tensor_names import TensorNames


def read_stablelm(fields: ConfigFields) -> ModelConfig:
    """``StableLmForCausalLM``."""
    refuse_unless(fields, "head_dim", None)
    is_parallel = fields.flag("use_parallel_residual", default=False)
    return read_model(
        fields,
        default_context=4096,
        attention=read_attention(
            fields,
            num_kv_heads=32,
            partial=rotary_factor(fields, 0.25),
            qk_norm="layer" if fields.flag("qk_layernorm", default=False) else "none",
            qkv_bias=fields.flag("use_qkv_bias", default=False),
        ),
        feed_forward=read_feed_forward(fields),
        norm=NormConfig(eps=fields.number("layer_norm_eps", 1e-5), kind="layer", has_bias=True),
        names=TensorNames(
            query_norm="self_attn.q_layernorm.norms.{}",
            key_norm="self_attn.k_layernorm.norms.{}",
            mlp_norm="input_layernorm" if is_parallel else "post_attention_layernorm",
        ),
        is_parallel=is_parallel,
    )


def read_nemotron(fields: ConfigFields) -> ModelConfig:
    """``NemotronForCausalLM``: norms have 1 added to their weights, and the feed-forward has no gate."""
    has_bias, in_mlp = (fields.flag(field, default=False) for field in ("attention_bias", "mlp_bias"))
    return read_model(
        fields,
        default_context=4096,
        attention=read_attention(fields, partial=rotary_factor(fields, 0.5), qkv_bias=has_bias, output_bias=has_bias),
        feed_forward=read_feed_forward(fields, default="relu2", is_gated=False, has_bias=in_mlp),
        norm=NormConfig(eps=fields.number("norm_eps", 1e-5), kind="layer", offset=1.0, has_bias=True),
        names=TensorNames(gate_up=("mlp.up_proj",)),
    )


def read_jais2(fields: ConfigFields) -> ModelConfig:
    """``Jais2ForCausalLM``: biases everywhere, and a feed-forward without a gate."""
    refuse_partial_rotation(fields)
    has_bias, in_mlp = (fields.flag(field, default=True) for field in ("attention_bias", "mlp_bias"))
    return read_model(
        fields,
        default_context=8192,
        attention=read_attention(fields, qkv_bias=has_bias, output_bias=has_bias),
        feed_forward=read_feed_forward(fields, default="relu2", is_gated=False, has_bias=in_mlp),
        norm=NormConfig(eps=fields.number("layer_norm_eps", 1e-5), kind="layer", has_bias=True),
        names=TensorNames(gate_up=("mlp.up_proj",)),
    )
