"""MPT: ALiBi, no biases."""

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.attention_config import AlibiConfig
from headway_executor.models.config import FeedForwardConfig, ModelConfig, NormConfig
from headway_executor.models.families.reading import (
    num_layers_of,
    read_attention,
    read_model,
    refuse_groups,
    refuse_unless,
)
from headway_executor.models.tensor_names import TensorNames

_CONTEXT = 2048
_NAMES = TensorNames(
    embedding="transformer.wte.weight",
    final_norm="transformer.norm_f",
    layer="transformer.blocks.{}.",
    qkv=("attn.Wqkv",),
    output="attn.out_proj",
    gate_up=("ffn.up_proj",),
    down="ffn.down_proj",
    attention_norm="norm_1",
    mlp_norm="norm_2",
)
_AS_TRANSFORMERS_HAS_IT = {"no_bias": True, "expansion_ratio": 4, "logit_scale": None}
_OF_ATTENTION = {
    "attn_type": "multihead_attention",
    "prefix_lm": False,
    "qk_ln": False,
    "alibi": True,
    "alibi_bias_max": 8,
    "kv_n_heads": None,
}


def read_mpt(fields: ConfigFields) -> ModelConfig:
    """``MptForCausalLM``. transformers computes some fields' usual value, whatever they say: others are refused."""
    fields = fields.renamed(
        hidden_size="d_model",
        num_hidden_layers="n_layers",
        num_attention_heads="n_heads",
        max_position_embeddings="max_seq_len",
    )
    refuse_groups(fields)
    of_attention = fields.section("attn_config") or ConfigFields(fields.source, {})
    for section, values in ((fields, _AS_TRANSFORMERS_HAS_IT), (of_attention, _OF_ATTENTION)):
        for field, value in values.items():
            refuse_unless(section, field, value)
    if fields.values.get("norm_type") not in (None, "low_precision_layernorm", "layernorm"):
        raise fields.refuse("norm_type", "low_precision_layernorm, layernorm")
    attention = read_attention(fields, scale=of_attention.optional_number("softmax_scale"))
    return read_model(
        fields,
        default_context=_CONTEXT,
        attention=msgspec.structs.replace(
            attention,
            clip=of_attention.optional_number("clip_qkv"),
            alibi=AlibiConfig(),
        ),
        feed_forward=FeedForwardConfig(
            intermediate_size=4 * fields.integer("hidden_size"), activation="gelu", is_gated=False
        ),
        norm=NormConfig(eps=fields.number("layer_norm_epsilon", 1e-5), kind="layer"),
        ropes=[None] * num_layers_of(fields),
        names=_NAMES,
        tied=True,
    )
