"""GPT-BigCode (SantaCoder, StarCoder): GPT-2 with one head of keys."""

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig
from headway_executor.models.families.gpt2 import GPT2_FIELDS, GPT2_NAMES
from headway_executor.models.families.reading import (
    num_layers_of,
    read_attention,
    read_layer_norm,
    read_model,
    read_plain_feed_forward,
    refuse_unless,
)


def read_gpt_bigcode(fields: ConfigFields) -> ModelConfig:
    """``GPTBigCodeForCausalLM``."""
    fields = fields.renamed(**GPT2_FIELDS)
    refuse_unless(fields, "add_cross_attention", False)
    has_one = fields.flag("multi_query", default=True)
    refuse_unless(fields, "num_key_value_heads", 1 if has_one else fields.integer("num_attention_heads"))
    is_scaled = fields.flag("scale_attn_weights", default=True)
    attention = read_attention(
        fields,
        num_kv_heads=1 if has_one else None,
        scale=None if is_scaled else 1.0,
        qkv_bias=True,
        output_bias=True,
    )
    return read_model(
        fields,
        default_context=1024,
        attention=attention,
        feed_forward=read_plain_feed_forward(fields, default="gelu_pytorch_tanh"),
        norm=read_layer_norm(fields),
        ropes=[None] * num_layers_of(fields),
        names=msgspec.structs.replace(GPT2_NAMES, is_fused_by_head=not has_one),
        tied=True,
    )
