"""GPT-NeoX and Pythia: attention beside the feed-forward, layer norms, a part of each head rotated."""

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig, NormConfig
from headway_executor.models.families.positions import read_rope, rotary_factor, scaled_context
from headway_executor.models.families.reading import (
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    refuse_unless,
)
from headway_executor.models.tensor_names import TensorNames

_CONTEXT = 2048
_NAMES = TensorNames(
    embedding="gpt_neox.embed_in.weight",
    final_norm="gpt_neox.final_layer_norm",
    heads=("embed_out.weight", "lm_head.weight"),
    layer="gpt_neox.layers.{}.",
    qkv=("attention.query_key_value",),
    is_fused_by_head=True,
    output="attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    ignored=("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"),
)


def read_gpt_neox(fields: ConfigFields) -> ModelConfig:
    """``GPTNeoXForCausalLM``."""
    refuse_unless(fields, "head_dim", None)
    refuse_unless(fields, "num_key_value_heads", fields.integer("num_attention_heads"))
    has_bias = fields.flag("attention_bias", default=True)
    context = fields.integer("max_position_embeddings", _CONTEXT)
    rope = read_rope(fields, context, theta_field="rotary_emb_base")
    return read_model(
        fields,
        default_context=_CONTEXT,
        context=scaled_context(fields, rope, context),
        attention=read_attention(
            fields, partial=rotary_factor(fields, 0.25, "rotary_pct"), qkv_bias=has_bias, output_bias=has_bias
        ),
        feed_forward=read_feed_forward(fields, default="gelu", is_gated=False, has_bias=True),
        norm=NormConfig(eps=fields.number("layer_norm_eps", 1e-5), kind="layer", has_bias=True),
        ropes=[rope] * num_layers_of(fields),
        names=_NAMES,
        is_parallel=fields.flag("use_parallel_residual", default=True),
    )
