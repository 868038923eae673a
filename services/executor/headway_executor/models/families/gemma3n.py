"""Gemma 3n (text): several hidden states of a token, of which layers compute on one, sparse activations, inputs of layers'
own, and layers that share keys and values.
"""

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import (
    FeedForwardConfig,
    LayerInputs,
    ModelConfig,
    NormConfig,
    Scalings,
    StatesConfig,
)
from headway_executor.models.families.gemma4 import sources_of
from headway_executor.models.families.reading import (
    FULL,
    SLIDING,
    layer_types_of,
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    read_ropes,
    refuse_unless,
    windows_of,
)
from headway_executor.models.tensor_names import TensorNames

_NAMES = TensorNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
_CONTEXT, _PATTERN, _WINDOW, _INNER = 32_768, 5, 512, 16_384
_NUM_SPARSE, _SPARSITY = 10, 0.95


def read_gemma3n(fields: ConfigFields) -> ModelConfig:
    """``Gemma3nForCausalLM``."""
    refuse_unless(fields, "use_bidirectional_attention", False)
    refuse_unless(fields, "altup_active_idx", 0)
    count, context = num_layers_of(fields), fields.integer("max_position_embeddings", _CONTEXT)
    kinds = layer_types_of(fields, [SLIDING if (i + 1) % _PATTERN else FULL for i in range(count)])
    ropes = read_ropes(fields, kinds, context, near=10_000.0, far=1e6, near_field="rope_local_base_freq")
    has_bias = fields.flag("attention_bias", default=False)
    attention = read_attention(
        fields, head_dim=256, num_kv_heads=2, scale=1.0, qk_norm="head", qkv_bias=has_bias, output_bias=has_bias
    )
    model = read_model(
        fields,
        default_context=_CONTEXT,
        attention=msgspec.structs.replace(attention, norms_values=True),
        feed_forward=_feeds_of(fields, count),
        norm=NormConfig(eps=fields.number("rms_norm_eps", 1e-6)),
        windows=windows_of(fields, kinds, fields.integer("sliding_window", _WINDOW)),
        ropes=ropes,
        scalings=Scalings(
            embedding=fields.integer("hidden_size") ** 0.5,
            logits_softcap=fields.number("final_logit_softcapping", 30.0),
        ),
        names=_NAMES,
        tied=True,
    )
    sources = sources_of(fields, kinds, 15)
    return msgspec.structs.replace(
        model,
        layers=tuple(
            msgspec.structs.replace(layer, keys_of=source) for layer, source in zip(model.layers, sources, strict=True)
        ),
        layer_inputs=LayerInputs(
            size=fields.integer("hidden_size_per_layer_input", 256),
            vocab_size=fields.integer("vocab_size_per_layer_input", 262_144),
        ),
        states=StatesConfig(
            count=fields.integer("altup_num_inputs", 4, low=2, high=16),
            rank=fields.integer("laurel_rank", 64),
            scales_output=fields.flag("altup_correct_scale", default=True),
        ),
    )


def _feeds_of(fields: ConfigFields, count: int) -> list[FeedForwardConfig]:
    """Of each layer: a file may have one size for all."""
    sizes = fields.values.get("intermediate_size")
    if not isinstance(sizes, list):
        sizes = [sizes] * count
    usual = [_SPARSITY if count > _NUM_SPARSE and i < _NUM_SPARSE else 0.0 for i in range(count)]
    shares = fields.values.get("activation_sparsity_pattern")
    shares = usual if shares is None else shares
    if len(sizes) != count:
        raise fields.refuse("intermediate_size", f"a number, or a list of {count}")
    if not isinstance(shares, list) or len(shares) != count or not all(_is_share(share) for share in shares):
        raise fields.refuse("activation_sparsity_pattern", f"a list of {count} numbers from 0 to below 1")
    of_layers = [ConfigFields(fields.source, {**fields.values, "intermediate_size": size}) for size in sizes]
    feeds = [
        read_feed_forward(own, field="hidden_activation", default="gelu_pytorch_tanh", size=_INNER) for own in of_layers
    ]
    return [msgspec.structs.replace(feed, sparsity=float(share)) for feed, share in zip(feeds, shares, strict=True)]


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1
