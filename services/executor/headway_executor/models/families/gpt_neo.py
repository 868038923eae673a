"""GPT-Neo: a table of positions, windows of some layers, scores that are not scaled."""

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig
from headway_executor.models.families.gpt2 import GPT2_NAMES
from headway_executor.models.families.reading import (
    num_layers_of,
    read_attention,
    read_layer_norm,
    read_model,
    read_plain_feed_forward,
    refuse_groups,
    refuse_unless,
)

_GLOBAL, _LOCAL = "global", "local"
_TYPES = [[[_GLOBAL, _LOCAL], 12]]
_NAMES = msgspec.structs.replace(
    GPT2_NAMES,
    qkv=tuple(f"attn.attention.{kind}_proj" for kind in "qkv"),
    output="attn.attention.out_proj",
    ignored=("attn.attention.bias", "attn.attention.masked_bias"),
)


def read_gpt_neo(fields: ConfigFields) -> ModelConfig:
    """``GPTNeoForCausalLM``."""
    fields = fields.renamed(num_hidden_layers="num_layers", num_attention_heads="num_heads")
    refuse_groups(fields)
    window = fields.integer("window_size", 256)
    return read_model(
        fields,
        default_context=2048,
        attention=read_attention(fields, scale=1.0, output_bias=True),
        feed_forward=read_plain_feed_forward(fields),
        norm=read_layer_norm(fields),
        windows=[window if kind == _LOCAL else None for kind in _kinds(fields)],
        ropes=[None] * num_layers_of(fields),
        names=_NAMES,
        tied=True,
    )


def _kinds(fields: ConfigFields) -> list[str]:
    """``attention_types``: pairs of some layers' kinds and how often they follow each other."""
    count, kinds = num_layers_of(fields), list[str]()
    pairs = fields.values.get("attention_types") or _TYPES
    for pair in pairs if isinstance(pairs, list) else [None]:
        match pair:
            case [list(some), int(times)] if 0 <= times <= count and all(kind in (_GLOBAL, _LOCAL) for kind in some):
                kinds += some * times
            case _:
                kinds.append("")
    if len(kinds) != count or "" in kinds:
        raise fields.refuse(
            "attention_types", f"pairs of a list of {_GLOBAL} and {_LOCAL}, and a number, for {count} layers"
        )
    refuse_unless(fields, "attention_layers", kinds)
    return kinds
