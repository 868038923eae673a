"""GPT-J and CodeGen: attention beside the feed-forward, neighbouring channels of a part of each head rotated."""

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.attention_config import RopeConfig
from headway_executor.models.config import ModelConfig
from headway_executor.models.families.gpt2 import GPT2_FIELDS
from headway_executor.models.families.reading import (
    num_layers_of,
    read_attention,
    read_layer_norm,
    read_model,
    read_plain_feed_forward,
    refuse_groups,
)
from headway_executor.models.tensor_names import TensorNames

_CONTEXT, _ROTARY_DIM = 2048, 64
_BLOCKS = 4
"""Of CodeGen's fused projection, one for each of the processors that it was made on."""
_NAMES = TensorNames(
    embedding="transformer.wte.weight",
    final_norm="transformer.ln_f",
    layer="transformer.h.{}.",
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    output="attn.out_proj",
    gate_up=("mlp.fc_in",),
    down="mlp.fc_out",
    attention_norm="ln_1",
    mlp_norm="ln_1",
    ignored=("attn.bias", "attn.masked_bias", "attn.causal_mask"),
)


def read_gptj(fields: ConfigFields) -> ModelConfig:
    """``GPTJForCausalLM``."""
    return _read(fields, _NAMES)


def read_codegen(fields: ConfigFields) -> ModelConfig:
    """``CodeGenForCausalLM``."""
    config = _read(fields, msgspec.structs.replace(_NAMES, qkv=("attn.qkv_proj",), blocks=_BLOCKS))
    if config.num_heads % _BLOCKS:
        raise fields.renamed(**GPT2_FIELDS).refuse("num_attention_heads", f"a multiple of {_BLOCKS}")
    return config


def _read(fields: ConfigFields, names: TensorNames) -> ModelConfig:
    fields = fields.renamed(**GPT2_FIELDS)
    refuse_groups(fields)
    attention = read_attention(fields, is_interleaved=True)
    rotary_dim = fields.integer("rotary_dim", _ROTARY_DIM, high=attention.head_dim)
    if rotary_dim % 2:
        raise fields.refuse("rotary_dim", "an even number")
    config = read_model(
        fields,
        default_context=_CONTEXT,
        attention=msgspec.structs.replace(attention, rotary_dim=rotary_dim),
        feed_forward=read_plain_feed_forward(fields),
        norm=read_layer_norm(fields),
        ropes=[RopeConfig()] * num_layers_of(fields),
        names=names,
        is_parallel=True,
    )
    return msgspec.structs.replace(config, has_head_bias=True)
