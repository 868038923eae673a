"""OPT: a table of positions. That of 350M has norms of sums, and embeddings that are narrower than the hidden state."""

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig, NormConfig
from headway_executor.models.families.reading import (
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    refuse_groups,
    refuse_unless,
)
from headway_executor.models.tensor_names import TensorNames

FIRST_POSITION = 2
OPT_LAYER = TensorNames(
    output="self_attn.out_proj",
    gate_up=("fc1",),
    down="fc2",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
)
_NAMES = msgspec.structs.replace(
    OPT_LAYER,
    embedding="model.decoder.embed_tokens.weight",
    positions="model.decoder.embed_positions.weight",
    final_norm="model.decoder.final_layer_norm",
    layer="model.decoder.layers.{}.",
)
_PROJECTIONS = ("model.decoder.project_in", "model.decoder.project_out")


def read_opt(fields: ConfigFields) -> ModelConfig:
    """``OPTForCausalLM``."""
    fields = fields.renamed(intermediate_size="ffn_dim")
    refuse_groups(fields)
    refuse_unless(fields, "_remove_final_layer_norm", False)
    has_bias = fields.flag("enable_bias", default=True)
    has_weight = fields.flag("layer_norm_elementwise_affine", default=True)
    hidden_size = fields.integer("hidden_size")
    embedding_size = fields.integer("word_embed_proj_dim", hidden_size)
    names = _NAMES
    norms_sums = not fields.flag("do_layer_norm_before", default=True)
    if norms_sums:
        names = msgspec.structs.replace(
            names,
            attention_norm=None,
            attention_post_norm=names.attention_norm,
            mlp_norm=None,
            mlp_post_norm=names.mlp_norm,
            final_norm=None,
        )
    if embedding_size != hidden_size:
        names = msgspec.structs.replace(names, projections=_PROJECTIONS)
    config = read_model(
        fields,
        default_context=2048,
        attention=read_attention(fields, qkv_bias=has_bias, output_bias=has_bias),
        feed_forward=read_feed_forward(
            fields, field="activation_function", default="relu", size=3072, is_gated=False, has_bias=has_bias
        ),
        norm=NormConfig(eps=1e-5, kind="layer", has_weight=has_weight, has_bias=has_weight),
        ropes=[None] * num_layers_of(fields),
        names=names,
        tied=True,
    )
    return msgspec.structs.replace(
        config, norms_sums=norms_sums, embedding_size=embedding_size, first_position=FIRST_POSITION
    )
