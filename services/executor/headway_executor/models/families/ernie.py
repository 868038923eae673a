"""ERNIE 4.5: Llama with neighbouring channels rotated; the mixtures choose experts by corrected scores.

Those that see have experts of pictures beside those of the text, which nothing reads: two numbers in place of one say so.
"""

from collections.abc import Sequence

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ExpertsConfig, FeedForwardConfig, ModelConfig
from headway_executor.models.families.reading import (
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    read_rms_norm,
    refuse_partial_rotation,
    refuse_unless,
)
from headway_executor.models.families.routing import read_routing
from headway_executor.models.tensor_names import ExpertNames, TensorNames

_NAMES = ExpertNames(correction="mlp.moe_statics.e_score_correction_bias")
_FURTHER_TOKENS = ("model.mtp_",)
"""Layers that predict further tokens, which nothing reads."""

_OF_BOTH = ("moe_num_experts", "moe_intermediate_size")


def read_ernie(fields: ConfigFields) -> ModelConfig:
    """``Ernie4_5ForCausalLM``."""
    return _read(fields, read_feed_forward(fields, has_bias=fields.flag("use_bias", default=False)), 128, 2)


def read_ernie_moe(fields: ConfigFields) -> ModelConfig:
    """``Ernie4_5_MoeForCausalLM``: every so many layers between two has experts."""
    refuse_unless(fields, "use_bias", False)
    refuse_unless(fields, "moe_norm_min", 1e-12)
    sees = isinstance(fields.values.get("moe_intermediate_size"), list)
    fields = _of_text(fields) if sees else fields
    dense, num_layers = read_feed_forward(fields), num_layers_of(fields)
    inner = fields.integer("moe_intermediate_size", 1536)
    routing = read_routing(fields, ("moe_num_experts", 64), chosen=6, is_normalised=True, chosen_field="moe_k")
    experts = ExpertsConfig(
        routing=routing,
        shared_size=inner * fields.integer("moe_num_shared_experts", 2, low=0, high=64),
        correction_rows=2 if sees else 1,
        has_turned_router=sees,
        names=_NAMES,
    )
    sparse = msgspec.structs.replace(dense, intermediate_size=inner, experts=experts)
    first, step = fields.integer("moe_layer_start_index", 1, low=0), fields.integer("moe_layer_interval", 1)
    last = fields.integer("moe_layer_end_index", -1, low=-1)
    ends = range(first, num_layers if last == -1 else last + 1)
    feeds = [sparse if i in ends and (i + 1) % step == 0 else dense for i in range(num_layers)]
    return _read(fields, feeds, None, 4, _of_pictures(routing.num_experts) if sees else ())


def _of_text(fields: ConfigFields) -> ConfigFields:
    """With one number each, that of the text. There are as many experts of pictures."""
    refuse_unless(fields, "mlp_layer_types", ["dense"] + ["sparse"] * (num_layers_of(fields) - 1))
    values = dict(fields.values)
    for field in _OF_BOTH:
        both = values.get(field)
        if isinstance(both, list):
            if len(both) != 2 or (field == _OF_BOTH[0] and both[0] != both[1]):
                raise fields.refuse(field, "two numbers, equal ones of experts")
            values[field] = both[0]
    return ConfigFields(fields.source, values)


def _of_pictures(count: int) -> tuple[str, ...]:
    return (f"{_NAMES.router}.weight_1", *(_NAMES.expert.format(count + number) for number in range(count)))


def _read(
    fields: ConfigFields,
    feed_forward: FeedForwardConfig | Sequence[FeedForwardConfig],
    head_dim: int | None,
    num_kv_heads: int,
    ignored: tuple[str, ...] = (),
) -> ModelConfig:
    refuse_partial_rotation(fields)
    has_bias = fields.flag("use_bias", default=False)
    return read_model(
        fields,
        default_context=131_072,
        attention=read_attention(
            fields,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            is_interleaved=True,
            qkv_bias=has_bias,
            output_bias=has_bias,
        ),
        feed_forward=feed_forward,
        norm=read_rms_norm(fields, eps=1e-5),
        theta=500_000.0,
        names=TensorNames(ignored_prefixes=_FURTHER_TOKENS, ignored=(*TensorNames().ignored, *ignored)),
        tied=True,
    )
