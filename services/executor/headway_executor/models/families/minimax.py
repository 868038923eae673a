"""MiniMax-01: a state with a decay that is always the same in most layers, attention in the others, and experts."""

from collections.abc import Mapping

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import (
    ExpertsConfig,
    ModelConfig,
    NormConfig,
    RecurrenceConfig,
    Scalings,
)
from headway_executor.models.families.mixtures import MIXTRAL_NAMES
from headway_executor.models.families.reading import (
    FULL,
    LINEAR,
    kinds_of,
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    refuse_partial_rotation,
    refuse_unless,
    window_of,
)
from headway_executor.models.families.routing import read_routing
from headway_executor.models.tensor_names import RecurrenceNames, TensorNames

_FIRST = "model.layers.0.input_layernorm"
_NAMES = TensorNames(
    embedding_norm=_FIRST,
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="input_layernorm",
    has_norms_of_next=True,
    ignored=tuple(f"self_attn.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")),
)
_STATE = RecurrenceNames(
    inputs=("self_attn.qkv_proj", "self_attn.output_gate"),
    convolution=(),
    output="self_attn.out_proj",
    norm="self_attn.norm",
)
_KINDS, _PARTS = ("full_attn", "linear_attn", "mlp"), ("alpha", "beta")
_FIRST_NAMES: Mapping[str, str] = {
    f"{kind}_{part}_factor": f"layernorm_{kind.replace('attn', 'attention')}_{part}"
    for kind in _KINDS
    for part in _PARTS
}
"""Of fields, as they were published first."""
_NORM_EPS, _NEARLY_1 = 1e-6, 1e-5


def read_minimax(fields: ConfigFields) -> ModelConfig:
    """``MiniMaxForCausalLM``. What a layer adds to is normalised: the norm before it is of the hidden state itself."""
    refuse_partial_rotation(fields)
    refuse_unless(fields, "hidden_act", "silu")
    layers = range(num_layers_of(fields))
    attention = read_attention(fields, num_kv_heads=8)
    refuse_unless(fields, "rotary_dim", attention.head_dim)
    usual = [LINEAR if i % 2 else FULL for i in layers]
    kinds = kinds_of(fields, usual, (FULL, LINEAR))
    kept, added = _factors(fields)
    eps = fields.number("rms_norm_eps", 1e-5)
    routing = read_routing(fields, ("num_local_experts", 8), chosen=2, is_normalised=True)
    config = read_model(
        fields,
        default_context=131_072,
        theta=1e6,
        attention=attention,
        feed_forward=msgspec.structs.replace(
            read_feed_forward(fields), experts=ExpertsConfig(routing=routing, names=MIXTRAL_NAMES)
        ),
        # A norm is of a sum; if this is ``kept`` times smaller, so is the root of what is added to its squares.
        norm=NormConfig(eps=eps / kept**2, embedding_eps=eps, rounds_first=True),
        windows=[window_of(fields, None)] * len(layers),
        recurrences=[_state(fields, index, attention.head_dim) if kinds[index] == LINEAR else None for index in layers],
        scalings=Scalings(residual=added / kept),
        names=_NAMES,
    )
    return msgspec.structs.replace(config, norms_sums=True)


def read_minimax_text_01(fields: ConfigFields) -> ModelConfig:
    """``MiniMaxText01ForCausalLM`` and ``MiniMaxM1ForCausalLM``, as they were published first."""
    refuse_unless(fields, "postnorm", True)
    refuse_unless(fields, "shared_intermediate_size", 0)
    kinds = fields.values.get("attn_type_list")
    if not isinstance(kinds, list) or any(kind not in (0, 1) for kind in kinds):
        raise fields.refuse("attn_type_list", "a list of 0 and 1, one for each layer")
    width = fields.integer("head_dim")
    fields = fields.renamed(**_FIRST_NAMES)
    values = {"layer_types": [FULL if kind else LINEAR for kind in kinds], "rotary_dim": width}
    config = read_minimax(ConfigFields(fields.source, {**fields.values, **values}))
    rotary_dim = fields.integer("rotary_dim", width)
    if rotary_dim % 2 or rotary_dim > width:
        raise fields.refuse("rotary_dim", f"an even number up to head_dim, {width}")
    return msgspec.structs.replace(config, attention=msgspec.structs.replace(config.attention, rotary_dim=rotary_dim))


def _factors(fields: ConfigFields) -> tuple[float, float]:
    """On the hidden state, and on what is added to it."""
    found = []
    for part in _PARTS:
        values = {kind: fields.number(f"{kind}_{part}_factor", 1.0) for kind in _KINDS}
        other = next((kind for kind in _KINDS if values[kind] != values[_KINDS[0]]), None)
        if other is not None:
            raise fields.refuse(f"{other}_{part}_factor", f"that of {_KINDS[0]}, {values[_KINDS[0]]:g}")
        found.append(values[_KINDS[0]])
    return found[0], found[1]


def _state(fields: ConfigFields, index: int, width: int) -> RecurrenceConfig:
    heads, num_layers = fields.integer("num_attention_heads"), num_layers_of(fields)
    of_layer = 1 - index / (num_layers - 1 + _NEARLY_1) + _NEARLY_1
    return RecurrenceConfig(
        kind="selective",
        taps=1,
        num_heads=heads,
        num_key_heads=heads,
        key_dim=width,
        value_dim=width,
        norm_dim=heads * width,
        norm_eps=_NORM_EPS,
        gates_behind=True,
        gate="sigmoid",
        slopes=tuple(-(2.0 ** (-8 * (head + 1) / heads)) * of_layer for head in range(heads)),
        names=_STATE,
    )
