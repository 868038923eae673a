"""Granite with windows: attention sinks, and a theta of each layer's own or no rope; dense or a mixture."""

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import FeedForwardConfig, LayerConfig, ModelConfig
from headway_executor.models.families.granite import read_granite_dense, read_mixture, read_scaled
from headway_executor.models.families.positions import layer_thetas
from headway_executor.models.families.reading import FULL, SLIDING, layer_types_of, num_layers_of, windows_of
from headway_executor.models.tensor_names import TensorNames

_NAMES = TensorNames(sinks="self_attn.sinks")
_DENSE = {"rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "tie_word_embeddings": True}
_PATTERN, _WINDOW = 4, 128


def read_granite_swa(fields: ConfigFields) -> ModelConfig:
    """``GraniteSWAForCausalLM``."""
    fields = ConfigFields(fields.source, {**_DENSE, **fields.values})
    return _with_windows(fields, read_granite_dense(fields))


def read_granite_moe_swa(fields: ConfigFields) -> ModelConfig:
    """``GraniteMoeSWAForCausalLM``: the stacks of experts have other names than those of Granite before."""
    mixture = read_mixture(fields)
    assert mixture.experts is not None
    names = msgspec.structs.replace(mixture.experts.names, router="block_sparse_moe.router", stacks=None)
    return _with_windows(
        fields, msgspec.structs.replace(mixture, experts=msgspec.structs.replace(mixture.experts, names=names))
    )


def _with_windows(fields: ConfigFields, feed_forward: FeedForwardConfig) -> ModelConfig:
    config, count = read_scaled(fields, feed_forward, names=_NAMES), num_layers_of(fields)
    kinds = layer_types_of(fields, [SLIDING if i % _PATTERN else FULL for i in range(count)])
    windows = windows_of(fields, kinds, fields.integer("sliding_window", _WINDOW))
    own = zip(config.layers, windows, layer_thetas(fields, count), strict=True)
    layers = (_changed(msgspec.structs.replace(layer, window=window), theta) for layer, window, theta in own)
    return msgspec.structs.replace(config, layers=tuple(layers))


def _changed(layer: LayerConfig, theta: float | None) -> LayerConfig:
    if theta is None or layer.rope is None:
        return layer
    rope = msgspec.structs.replace(layer.rope, theta=theta) if theta else None
    return msgspec.structs.replace(layer, rope=rope)
