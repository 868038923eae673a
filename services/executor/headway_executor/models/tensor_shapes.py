"""The names and shapes of the tensors that a model's checkpoint must have.

Owns: what is expected, and saying what is missing or wrong. Must not know: what is done with a tensor.
"""

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec

from headway_executor.backend import BackendConfigError
from headway_executor.checkpoint.weights import Checkpoint
from headway_executor.models.altup_tensors import layer_state_shapes, state_shapes
from headway_executor.models.attention_config import AttentionConfig
from headway_executor.models.config import FeedForwardConfig, ModelConfig
from headway_executor.models.expert_tensors import expert_shapes
from headway_executor.models.latent_tensors import latent_shapes
from headway_executor.models.layer_input_tensors import layer_input_shapes, own_input_shapes
from headway_executor.models.recurrent_tensors import recurrent_shapes
from headway_executor.models.stored_names import DECODER, LAYERS, head_name, named_as_stored
from headway_executor.models.tensor_names import TensorNames

_Shapes = Iterator[tuple[str, tuple[int, ...]]]
CURVE: Mapping[str, tuple[int, ...]] = MappingProxyType({"alpha_p": (1,), "alpha_n": (1,), "beta": ()})
"""Of xIELU."""
_DOTS = re.compile(r"\.")


def expected_tensors(config: ModelConfig, stored: Container[str] = ()) -> dict[str, tuple[int, ...]]:
    """Names and shapes; only the ``stored`` ones of a tied embedding and head."""
    names = config.names
    pair = (names.embedding, head_name(names, stored))
    words = [name for name in pair if not config.tie_word_embeddings or name in stored]
    width = config.embedding_size or config.hidden_size
    expected: dict[str, tuple[int, ...]] = dict.fromkeys(words or [names.embedding], (config.vocab_size, width))
    for norm in (names.embedding_norm if config.norm.embedding_has_weight else None, names.final_norm):
        expected |= dict(_norm_tensors(config, norm) if norm is not None else ())
    if names.positions is not None:
        expected[names.positions] = (config.first_position + config.context, config.hidden_size)
    if names.projections is not None:
        first, last = names.projections
        expected |= {f"{first}.weight": (config.hidden_size, width), f"{last}.weight": (width, config.hidden_size)}
    expected |= dict(layer_input_shapes(config)) | dict(state_shapes(config)) | dict(_before_head(config))
    if config.has_head_bias:
        expected[bias_of(pair[1])] = (config.vocab_size,)
    for index in range(config.num_layers):
        prefix = names.layer.format(index)
        expected |= {prefix + name: shape for name, shape in _layer_tensors(config, index)}
    return expected


def _before_head(config: ModelConfig) -> _Shapes:
    if config.before_head is None or not config.has_head:
        return
    yield f"{config.before_head.dense}.weight", (config.hidden_size, config.hidden_size)
    if config.before_head.has_bias:
        yield f"{config.before_head.dense}.bias", (config.hidden_size,)
    yield from _norm_tensors(config, config.before_head.norm)


def ignored_tensors(config: ModelConfig) -> frozenset[str]:
    """Old checkpoints store masks and rope frequencies, which nothing reads."""
    names = config.names
    return frozenset(names.layer.format(i) + name for i in range(config.num_layers) for name in names.ignored)


def _keys_of_others(config: ModelConfig) -> list[str]:
    """What layers have of keys and values that they do not use: the beginnings of names."""
    names = config.names
    sharing = [index for index, layer in enumerate(config.layers) if layer.keys_of is not None]
    unused = (*names.qkv[1:], names.key_norm, "self_attn.v_norm")
    return [f"{names.layer.format(index)}{name}." for index in sharing for name in unused]


def qkv_names(config: ModelConfig, index: int) -> tuple[str, ...]:
    """Of the tensors that a layer's queries, keys and values are in."""
    names = config.names.qkv
    if config.layers[index].keys_of is not None:
        return names[:1]
    return names[:2] if config.attention_of(index).values_are_keys else names


def bias_of(head: str) -> str:
    """Return the name of a head's bias."""
    return f"{head.removesuffix('.weight')}.bias"


def _layer_tensors(config: ModelConfig, index: int) -> _Shapes:
    layer = config.layers[index]
    if layer.recurrence is not None:
        yield from recurrent_shapes(layer.recurrence, config.hidden_size)
    if layer.attends:
        yield from _attention_tensors(config, index)
    if layer.has_feed_forward:
        yield from _feed_forward_tensors(config, layer.feed_forward)
    # A set: one norm may stand in two places.
    of_others = {config.names.mlp_post_norm} if config.names.has_norms_of_next else set()
    for name in {*msgspec.structs.astuple(config.norms_of(index)), *of_others} - {None}:
        yield from _norm_tensors(config, str(name))
    if config.names.layer_factor is not None:
        yield config.names.layer_factor, (1,)
    yield from own_input_shapes(config)
    yield from layer_state_shapes(config)


def _attention_tensors(config: ModelConfig, index: int) -> _Shapes:
    names, attention = config.names, config.attention_of(index)
    if attention.latent is not None:
        has_index = not config.layers[index].sees_as_before
        yield from latent_shapes(attention.latent, attention.num_heads, config.hidden_size, has_index=has_index)
    else:
        modules, widths = qkv_names(config, index), qkv_widths(config, index)
        yield from _projections(names, modules, config.hidden_size, widths, attention.qkv_bias)
        width = attention.num_heads * attention.stored_value_dim
        yield from _projections(names, (names.output,), width, (config.hidden_size,), attention.output_bias)
        if names.output_norm is not None:
            yield from _norm_tensors(config, names.output_norm, width)
    if names.sinks is not None and attention.has_sinks:
        yield names.sinks, (attention.num_heads,)
    by_head = attention.qk_norm == "head"
    if attention.qk_norm == "layer":
        yield from head_norm_tensors(attention, names.query_norm, attention.num_heads)
        yield from head_norm_tensors(attention, names.key_norm, attention.num_kv_heads)
    elif attention.qk_norm in ("head", "all"):
        counts = ((names.query_norm, attention.num_heads), (names.key_norm, attention.num_kv_heads))
        for name, count in counts[: 1 if config.layers[index].keys_of is not None else 2]:
            yield f"{name}.weight", (attention.head_dim if by_head else count * attention.head_dim,)


def head_norm_tensors(attention: AttentionConfig, name: str, count: int) -> _Shapes:
    """One tensor for each head if the name has braces for it, or one for all."""
    head_dim = attention.head_dim
    if attention.shares_head_norms:
        yield from ((f"{name}.{kind}", (head_dim,)) for kind in ("weight", "bias"))
        return
    if "{}" not in name:
        yield f"{name}.weight", (count, head_dim)
        return
    for head in range(count):
        yield f"{name.format(head)}.weight", (head_dim,)


def _feed_forward_tensors(config: ModelConfig, feed: FeedForwardConfig) -> _Shapes:
    names, inner = config.names, feed.intermediate_size
    if feed.experts is not None:
        yield from expert_shapes(feed.experts, feed, config.hidden_size)
        return
    widths = (inner, inner) if feed.is_gated else (inner,)
    yield from _projections(names, names.gate_up, config.hidden_size, widths, feed.has_bias)
    yield from _projections(names, (names.down,), inner, (config.hidden_size,), feed.has_bias)
    if names.down_norm is not None:
        yield from _norm_tensors(config, names.down_norm, inner)
    if feed.activation == "xielu":
        yield from ((f"{names.curve}.{name}", shape) for name, shape in CURVE.items())


def _projections(
    of: TensorNames,
    names: Sequence[str],
    inputs: int,
    outputs: Sequence[int],
    has_bias: bool,
) -> _Shapes:
    """A tensor for each of ``outputs``, or one for all."""
    for name, width in zip(names, outputs if len(names) == len(outputs) else (sum(outputs),), strict=True):
        yield f"{name}.weight", (inputs, width) if of.has_inputs_first else (width, inputs)
        if has_bias:
            yield f"{name}.bias", (width,)


def _norm_tensors(config: ModelConfig, name: str, width: int = 0) -> _Shapes:
    """Of the hidden state, unless there is a ``width``."""
    for kind, is_there in (("weight", config.norm.has_weight), ("bias", config.norm.has_bias)):
        if is_there:
            yield f"{name}.{kind}", (width or config.hidden_size,)


def qkv_widths(config: ModelConfig, index: int) -> tuple[int, ...]:
    """Rows of each tensor: of queries, keys and values, and of gates that are stored apart."""
    attention = config.attention_of(index)
    queries, keys, values, gates = (
        attention.num_heads * attention.head_dim,
        attention.num_kv_heads * attention.head_dim,
        attention.num_kv_heads * attention.stored_value_dim,
        attention.gates,
    )
    if config.layers[index].keys_of is not None or attention.values_are_keys:
        return (queries, keys)[: len(qkv_names(config, index))]
    if gates == "by_head":
        return 2 * queries, keys, values
    of_gates = {"apart": (queries,), "of_heads": (attention.num_heads,)}
    return queries, keys, values, *of_gates.get(gates, ())


def check_tensors(config: ModelConfig, checkpoint: Checkpoint, quantization: str = "none") -> None:
    """Check the tensors.

    Raises:
        ModelFilesError: the checkpoint has others.
        BackendConfigError: quantised weights would be quantised again.
    """
    if checkpoint.format is not None and quantization != "none":
        raise BackendConfigError(
            f"quantization {quantization!r} is not allowed with this model, whose weights are quantised "
            f"({checkpoint.format}); allowed: none"
        )
    config = named_as_stored(config, checkpoint)
    layers = range(config.num_layers, config.num_layers + config.names.ignored_layers)
    beyond = (
        *(config.names.layer.format(index) for index in layers),
        *config.names.ignored_prefixes,
        *_keys_of_others(config),
    )
    ignored = ignored_tensors(config)
    modules = frozenset(name for name in ignored if name.endswith("."))
    unread = {name for name in checkpoint.headers if name.startswith(beyond) or (modules and _is_in(modules, name))}
    if config.names.is_part:
        own = (_own_front(config.names), *(head.removesuffix("weight") for head in config.names.heads))
        unread |= {name for name in checkpoint.headers if not name.startswith(own)}
    checkpoint.check(expected_tensors(config, checkpoint), ignored | unread)


def _own_front(names: TensorNames) -> str:
    """What the names of a part begin with. Where nothing more is in front of it, others may stand beside its layers."""
    decoder, layers = names.layer.partition(LAYERS)[0], names.layer.partition("{}")[0]
    return layers if decoder in (DECODER, names.layer) else decoder


def _is_in(modules: frozenset[str], name: str) -> bool:
    """There may be thousands of them."""
    return any(name[: dot.end()] in modules for dot in _DOTS.finditer(name))


def layers_as_stored(config: ModelConfig, stored: Iterable[str], layers: Iterable[int]) -> list[int]:
    """Return layers in the order of their first tensors among the ``stored`` names, which is that of the files.

    Files are read ahead in this order, and "layers.10" stands before "layers.2" in them.
    """
    depth = config.names.layer.count(".")
    places: dict[str, int] = {}
    for place, name in enumerate(stored):
        places.setdefault(".".join((*name.split(".", depth)[:depth], "")), place)
    return sorted(layers, key=lambda index: places.get(config.names.layer.format(index), 0))
