"""BioGPT and XGLM: tables of positions as OPT has them, that of XGLM computed; embeddings grow by the root of their width."""

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig, NormConfig, Scalings
from headway_executor.models.families.opt import FIRST_POSITION, OPT_LAYER
from headway_executor.models.families.reading import (
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    refuse_groups,
    refuse_unless,
)
from headway_executor.models.tensor_names import TensorNames

_BIOGPT_NAMES = msgspec.structs.replace(
    OPT_LAYER,
    embedding="biogpt.embed_tokens.weight",
    positions="biogpt.embed_positions.weight",
    final_norm="biogpt.layer_norm",
    heads=("output_projection.weight",),
    layer="biogpt.layers.{}.",
)
_XGLM_NAMES = msgspec.structs.replace(
    OPT_LAYER, final_norm="model.layer_norm", ignored_prefixes=("model.embed_positions.",)
)


def read_biogpt(fields: ConfigFields) -> ModelConfig:
    """``BioGptForCausalLM``."""
    return _read(fields, _BIOGPT_NAMES, 1024, "hidden_act")


def read_xglm(fields: ConfigFields) -> ModelConfig:
    """``XGLMForCausalLM``."""
    fields = fields.renamed(
        hidden_size="d_model",
        num_hidden_layers="num_layers",
        num_attention_heads="attention_heads",
        intermediate_size="ffn_dim",
    )
    refuse_unless(fields, "add_cross_attention", False)
    if fields.integer("pad_token_id", 0, low=0) >= FIRST_POSITION:
        raise fields.refuse("pad_token_id", f"below {FIRST_POSITION}, where the table has no positions")
    return msgspec.structs.replace(_read(fields, _XGLM_NAMES, 2048, "activation_function"), has_sinusoids=True)


def _read(fields: ConfigFields, names: TensorNames, context: int, activation: str) -> ModelConfig:
    refuse_groups(fields)
    is_scaled = fields.flag("scale_embedding", default=True)
    config = read_model(
        fields,
        default_context=context,
        attention=read_attention(fields, qkv_bias=True, output_bias=True),
        feed_forward=read_feed_forward(
            fields, field=activation, default="gelu", size=4096, is_gated=False, has_bias=True
        ),
        norm=NormConfig(eps=1e-5, kind="layer", has_bias=True),
        ropes=[None] * num_layers_of(fields),
        names=names,
        scalings=Scalings(embedding=fields.integer("hidden_size") ** 0.5 if is_scaled else 1.0),
        tied=True,
    )
    return msgspec.structs.replace(config, first_position=FIRST_POSITION)
