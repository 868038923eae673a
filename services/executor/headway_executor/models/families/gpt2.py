"""GPT-2: a table of positions, weights with inputs first."""

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig
from headway_executor.models.families.reading import (
    num_layers_of,
    read_attention,
    read_layer_norm,
    read_model,
    read_plain_feed_forward,
    refuse_groups,
    refuse_unless,
)
from headway_executor.models.tensor_names import TensorNames

_CONTEXT = 1024
GPT2_FIELDS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}
GPT2_NAMES = TensorNames(
    embedding="transformer.wte.weight",
    positions="transformer.wpe.weight",
    final_norm="transformer.ln_f",
    layer="transformer.h.{}.",
    qkv=("attn.c_attn",),
    output="attn.c_proj",
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    ignored=("attn.bias", "attn.masked_bias"),
)


def read_gpt2(fields: ConfigFields) -> ModelConfig:
    """``GPT2LMHeadModel``."""
    fields = fields.renamed(**GPT2_FIELDS)
    refuse_unless(fields, "scale_attn_by_inverse_layer_idx", False)
    refuse_unless(fields, "add_cross_attention", False)
    refuse_groups(fields)
    is_scaled = fields.flag("scale_attn_weights", default=True)
    quantisation = fields.section("quantization_config")
    is_gguf = quantisation is not None and quantisation.values.get("quant_method") == "gguf"
    return read_model(
        fields,
        default_context=_CONTEXT,
        attention=read_attention(fields, scale=None if is_scaled else 1.0, qkv_bias=True, output_bias=True),
        feed_forward=read_plain_feed_forward(fields),
        norm=read_layer_norm(fields),
        ropes=[None] * num_layers_of(fields),
        names=msgspec.structs.replace(GPT2_NAMES, has_inputs_first=not is_gguf),  # Those files turn all weights.
        tied=True,
    )
