"""The tensors of a checkpoint in the model's form.

Owns: names, tied and fused tensors. Must not know: files.
"""

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeAlias

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from headway_executor.backend import BackendConfigError, ModelFilesError
from headway_executor.checkpoint.weights import Checkpoint
from headway_executor.models.config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    LayerNormNames,
    ModelConfig,
    NormConfig,
    TensorNames,
)
from headway_executor.models.expert_tensors import ExpertTensors, expert_shapes, stacked_names
from headway_executor.models.fused_heads import by_block, by_group
from headway_executor.models.latent_tensors import LatentTensors, latent_shapes
from headway_executor.models.layer_input_tensors import LayerInputTensors, layer_input_shapes, own_input_shapes
from headway_executor.models.part import ModelPart, whole
from headway_executor.models.recurrent_tensors import RecurrentTensors, recurrent_shapes, times
from headway_executor.models.rope import sinusoids

_Shapes = Iterator[tuple[str, tuple[int, ...]]]

_DECODER = "model."
_OLDER_DECODER = "backbone."
"""Of Mamba and Nemotron-H: transformers has it as a model, too."""
_NUMBER = "{}"
_LAYERS = "layers."
_PLACES = (
    ("language_model.model.", "language_model."),
    ("model.language_model.", ""),
    ("model.text_model.", ""),
)
"""What is in front of a decoder's names instead, and of its head's, beside other models: as transformers 4 or 5 saves them.

The first Qwen2-VL have nothing more there.
"""

_CURVE: Mapping[str, tuple[int, ...]] = MappingProxyType({"alpha_p": (1,), "alpha_n": (1,), "beta": ()})
"""Of xIELU."""


def expected_tensors(config: ModelConfig, stored: Container[str] = ()) -> dict[str, tuple[int, ...]]:
    """Names and shapes; only the ``stored`` ones of a tied embedding and head."""
    names = config.names
    pair = (names.embedding, _head_name(names, stored))
    words = [name for name in pair if not config.tie_word_embeddings or name in stored]
    width = config.embedding_size or config.hidden_size
    expected: dict[str, tuple[int, ...]] = dict.fromkeys(words or [names.embedding], (config.vocab_size, width))
    for norm in (names.embedding_norm, names.final_norm):
        expected |= dict(_norm_tensors(config, norm) if norm is not None else ())
    if names.positions is not None:
        expected[names.positions] = (config.first_position + config.context, config.hidden_size)
    if names.projections is not None:
        first, last = names.projections
        expected |= {f"{first}.weight": (config.hidden_size, width), f"{last}.weight": (width, config.hidden_size)}
    expected |= dict(layer_input_shapes(config))
    if config.has_head_bias:
        expected[_bias_of(pair[1])] = (config.vocab_size,)
    for index in range(config.num_layers):
        prefix = names.layer.format(index)
        expected |= {prefix + name: shape for name, shape in _layer_tensors(config, index)}
    return expected


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


def _named_as_stored(config: ModelConfig, stored: "StoredSource") -> ModelConfig:
    """Models for vectors are stored without a head, and their tensors without the name of the decoder in front.

    Without ``has_head`` nothing stands where the head would, and nothing asks for what it gives.
    """
    config = _stacked_as_stored(_placed_as_stored(config, stored), stored)
    config = _cut_as_stored(_norms_as_stored(config, stored), stored)
    decoder = config.names.embedding.partition(".")[0] + "."
    bare = _renamed(config.names, lambda name: name.removeprefix(decoder))
    if not config.names.is_part and config.names.embedding not in stored and bare.embedding in stored:
        has_head = config.tie_word_embeddings or any(name in stored for name in bare.heads)
        is_tied = config.tie_word_embeddings or not has_head
        config = _with_names(config, bare, lambda name: name.removeprefix(decoder))
        config = msgspec.structs.replace(config, has_head=has_head, tie_word_embeddings=is_tied)
    return _turned_as_stored(config, stored)


def _renamed(names: TensorNames, change: Callable[[str], str]) -> TensorNames:
    """With other names of what is in the decoder."""

    def changed(name: str | None) -> str | None:
        return None if name is None else change(name)

    return msgspec.structs.replace(
        names,
        embedding=change(names.embedding),
        embedding_norm=changed(names.embedding_norm),
        positions=changed(names.positions),
        projections=None if names.projections is None else tuple(map(change, names.projections)),
        final_norm=changed(names.final_norm),
        layer=change(names.layer),
    )


def _with_names(config: ModelConfig, names: TensorNames, change: Callable[[str], str]) -> ModelConfig:
    """The model with these ``names``, where ``change`` gives those of what is in its decoder alone."""
    inputs = config.layer_inputs
    if inputs is not None:
        own = inputs.names
        moved = msgspec.structs.replace(
            own, table=change(own.table), projection=change(own.projection), norm=change(own.norm)
        )
        config = msgspec.structs.replace(config, layer_inputs=msgspec.structs.replace(inputs, names=moved))
    return msgspec.structs.replace(config, names=names)


def _turned_as_stored(config: ModelConfig, stored: "StoredSource") -> ModelConfig:
    """Codes have outputs first, whatever the checkpoint's own code has."""
    names = config.names
    if names.projections is not None and stored.is_coded(_head_name(names, stored)):
        raise ModelFilesError(
            f"{_head_name(names, stored)} is quantised; allowed with {config.architecture}, whose hidden states are projected "
            "before it: one that is not"
        )
    if not names.has_inputs_first:
        return config
    projections = [
        f"{names.layer.format(index)}{name}.weight"
        for index in range(config.num_layers)
        for name in (*names.qkv, names.output, *names.gate_up, names.down)
    ]
    coded = [stored.is_coded(name) for name in projections]
    if any(coded) and not all(coded):
        raise ModelFilesError(
            f"{projections[coded.index(False)]} is not quantised, though others are; allowed with {config.architecture}: "
            "all weights of layers, or none"
        )
    return msgspec.structs.replace(config, names=msgspec.structs.replace(names, has_inputs_first=not any(coded)))


def module_as_stored(config: ModelConfig, module: str) -> str:
    """A module of the decoder by its stored name, whichever transformers has named it."""
    decoder = config.names.layer.partition(_LAYERS)[0]
    for front in (*(front for front, _ in _PLACES), _DECODER):
        if (config.names.is_part or decoder == _OLDER_DECODER) and module.startswith(front + _LAYERS):
            return decoder + module.removeprefix(front)
    layer = config.names.layer.partition(_NUMBER)[0]
    _, is_behind, rest = module.partition(f".{layer}")
    return layer + rest if is_behind and not module.startswith(layer) else module


def _placed_as_stored(config: ModelConfig, stored: "TensorSource") -> ModelConfig:
    """Beside other models, names have more in front. Such a checkpoint is tied if it has no head, whatever its file says."""
    names = config.names
    if not names.is_part:
        return config
    for decoder, of_head in _PLACES:
        moved = _renamed(names, lambda name, decoder=decoder: name.replace(_DECODER, decoder, 1))  # type: ignore[misc]
        moved = msgspec.structs.replace(moved, heads=tuple(of_head + head for head in names.heads))
        if moved.embedding in stored or f"{moved.final_norm}.weight" in stored:
            names = moved
            config = _with_names(config, moved, lambda name, decoder=decoder: name.replace(_DECODER, decoder, 1))  # type: ignore[misc]
            break
    is_tied = config.tie_word_embeddings or not any(head in stored for head in names.heads)
    return msgspec.structs.replace(config, tie_word_embeddings=is_tied)


def _stacked_as_stored(config: ModelConfig, stored: "StoredSource") -> ModelConfig:
    """The experts of a layer may lie in one tensor, as in Qwen3-VL and Llama 4."""

    def stack_of(index: int, layer: LayerConfig) -> str | None:
        experts = layer.feed_forward.experts
        if experts is None or experts.stack is not None or not layer.feed_forward.is_gated:
            return None
        name = config.names.layer.format(index) + stacked_names(experts.names)[0]
        return name if name in stored else None

    names = [stack_of(index, layer) for index, layer in enumerate(config.layers)]
    first = next((index for index, name in enumerate(names) if name is not None), None)
    if first is None:
        return config
    # transformers 4 wrote inputs before outputs, as which codes are read. In a square, 5 reads outputs first.
    name, outputs = str(names[first]), 2 * config.layers[first].feed_forward.intermediate_size
    is_turned = stored.is_coded(name) or stored.read(name, range(1)).shape[1] != outputs

    def stacked(layer: LayerConfig) -> LayerConfig:
        feed = layer.feed_forward
        assert feed.experts is not None
        experts = msgspec.structs.replace(feed.experts, stack="halves" if is_turned else "rows")
        return msgspec.structs.replace(layer, feed_forward=msgspec.structs.replace(feed, experts=experts))

    layers = (layer if name is None else stacked(layer) for name, layer in zip(names, config.layers, strict=True))
    return msgspec.structs.replace(config, layers=tuple(layers))


def _norms_as_stored(config: ModelConfig, stored: "StoredSource") -> ModelConfig:
    """See ``TensorNames.renamed``."""
    names = config.names

    def named(index: int, name: str | None) -> str | None:
        other = dict(names.renamed).get(name or "")
        prefix = names.layer.format(index)
        return other if other is not None and f"{prefix}{other}.weight" in stored else name

    first = {layer.recurrence is not None: index for index, layer in reversed([*enumerate(config.layers)])}
    if not names.renamed or len(first) == 1:
        return config
    attention, post, mlp, mlp_post = (
        named(first[False], name) for name in msgspec.structs.astuple(config.norms_of(first[False]))
    )
    of_state = (named(first[True], name) for name in msgspec.structs.astuple(config.norms_of(first[True])))
    names = msgspec.structs.replace(
        names,
        attention_norm=attention,
        attention_post_norm=post,
        mlp_norm=mlp,
        mlp_post_norm=mlp_post,
        state_norms=LayerNormNames(**dict(zip(LayerNormNames.__struct_fields__, of_state, strict=True))),
    )
    return msgspec.structs.replace(config, names=names)


def _cut_as_stored(config: ModelConfig, stored: "StoredSource") -> ModelConfig:
    """Transformers joins the tensors of a convolution, and cuts it in equal parts when it writes."""

    def cut(index: int, layer: LayerConfig) -> LayerConfig:
        state = layer.recurrence
        if state is None or len(state.names.convolution) == 1:
            return layer
        name = f"{config.names.layer.format(index)}{state.names.convolution[0]}.weight"
        is_alike = name in stored and len(stored.read(name)) * len(state.names.convolution) == state.channels
        return msgspec.structs.replace(layer, recurrence=msgspec.structs.replace(state, is_cut_alike=is_alike))

    return msgspec.structs.replace(config, layers=tuple(cut(*pair) for pair in enumerate(config.layers)))


def _head_name(names: TensorNames, stored: "Container[str] | TensorSource") -> str:
    return next((name for name in names.heads if name in stored), names.heads[0])


def _bias_of(head: str) -> str:
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
    for name in {*msgspec.structs.astuple(config.norms_of(index))} - {None}:
        yield from _norm_tensors(config, str(name))
    if config.names.layer_factor is not None:
        yield config.names.layer_factor, (1,)
    yield from own_input_shapes(config)


def _attention_tensors(config: ModelConfig, index: int) -> _Shapes:
    names, attention = config.names, config.attention_of(index)
    if attention.latent is not None:
        yield from latent_shapes(attention.latent, attention.num_heads, config.hidden_size)
    else:
        modules, widths = qkv_names(config, index), _qkv_widths(config, index)
        yield from _projections(names, modules, config.hidden_size, widths, attention.qkv_bias)
        width = attention.num_heads * attention.head_dim
        yield from _projections(names, (names.output,), width, (config.hidden_size,), attention.output_bias)
    if names.sinks is not None:
        yield names.sinks, (attention.num_heads,)
    by_head = attention.qk_norm == "head"
    if attention.qk_norm == "layer":
        yield from _head_norm_tensors(attention, names.query_norm, config.num_heads)
        yield from _head_norm_tensors(attention, names.key_norm, attention.num_kv_heads)
    elif attention.qk_norm in ("head", "all"):
        counts = ((names.query_norm, config.num_heads), (names.key_norm, attention.num_kv_heads))
        for name, count in counts[: 1 if config.layers[index].keys_of is not None else 2]:
            yield f"{name}.weight", (attention.head_dim if by_head else count * attention.head_dim,)


def _head_norm_tensors(attention: AttentionConfig, name: str, count: int) -> _Shapes:
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
    if feed.activation == "xielu":
        yield from ((f"{names.curve}.{name}", shape) for name, shape in _CURVE.items())


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


def _norm_tensors(config: ModelConfig, name: str) -> _Shapes:
    for kind, is_there in (("weight", config.norm.has_weight), ("bias", config.norm.has_bias)):
        if is_there:
            yield f"{name}.{kind}", (config.hidden_size,)


def _qkv_widths(config: ModelConfig, index: int) -> tuple[int, ...]:
    """Rows of each tensor: of queries, keys and values, and of gates that are stored apart."""
    attention = config.attention_of(index)
    queries, keys, gates = (
        config.num_heads * attention.head_dim,
        attention.num_kv_heads * attention.head_dim,
        attention.gates,
    )
    if config.layers[index].keys_of is not None or attention.values_are_keys:
        return (queries, keys)[: len(qkv_names(config, index))]
    if gates == "by_head":
        return 2 * queries, keys, keys
    return (queries, keys, keys, queries) if gates == "apart" else (queries, keys, keys)


ChannelOrder: TypeAlias = Callable[[int, AttentionConfig], Tensor]
"""Of the channels of a head of so many: int64, ``[head_dim]``. See ``rope``."""


class NormTensors(NamedTuple):
    """``weight`` and ``bias`` (or None) of a norm, both ``[hidden]``."""

    weight: Tensor
    bias: Tensor | None


class LayerNorms(NamedTuple):
    """Before and behind attention, before and behind the feed-forward; None where there is none."""

    attention: NormTensors | None
    attention_post: NormTensors | None
    mlp: NormTensors | None
    mlp_post: NormTensors | None


def _changed(words: Tensor, norm: NormTensors | None, projection: Tensor | None, config: NormConfig) -> Tensor:
    """An embedding, projected or normalised as a token's would be, since it depends on nothing else: ``[vocab, hidden]``."""
    if projection is not None:
        words = functional.linear(words, projection.to(words.dtype))
    if norm is None:
        return words
    weight, wide = norm.weight.float(), words.float()
    if config.kind == "rms":
        return functional.rms_norm(wide, weight.shape, weight, config.eps).to(words.dtype)
    bias = None if norm.bias is None else norm.bias.float()
    return functional.layer_norm(wide, weight.shape, weight, bias, config.eps).to(words.dtype)


class TensorSource(Protocol):
    """The source of a model's tensors."""

    def __contains__(self, name: str) -> bool:
        """Return whether there is such a tensor."""
        ...

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
        """Return a tensor in its own dtype, or some of its rows and columns: of the first and the last dimension."""
        ...


class StoredSource(TensorSource, Protocol):
    """One that may have codes."""

    def is_coded(self, name: str) -> bool:
        """Whether a weight, or a stack of weights, is stored as codes."""
        ...


def as_stored(config: ModelConfig, source: StoredSource, warn: Callable[[str], None]) -> ModelConfig:
    """Name tensors as they are stored; untie embedding and head if the stored ones differ, as transformers does."""
    config = _named_as_stored(config, source)
    name, head_name = config.names.embedding, _head_name(config.names, source)
    if not (config.tie_word_embeddings and name in source and head_name in source):
        return config
    embedding, head = source.read(name), source.read(head_name)
    wide = torch.promote_types(embedding.dtype, head.dtype)
    if torch.equal(embedding.to(wide), head.to(wide)):
        return config
    warn(
        f"tie_word_embeddings is true, but {head_name} differs from {name}; each is used as it is stored, "
        "as transformers does"
    )
    return msgspec.structs.replace(config, tie_word_embeddings=False)


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
    config = _named_as_stored(config, checkpoint)
    layers = range(config.num_layers, config.num_layers + config.names.ignored_layers)
    beyond = (
        *(config.names.layer.format(index) for index in layers),
        *config.names.ignored_prefixes,
        *_keys_of_others(config),
    )
    unread = {name for name in checkpoint.headers if name.startswith(beyond)}
    if config.names.is_part:
        own = (
            config.names.layer.partition(_LAYERS)[0],
            *(head.removesuffix("weight") for head in config.names.heads),
        )
        unread |= {name for name in checkpoint.headers if not name.startswith(own)}
    checkpoint.check(expected_tensors(config, checkpoint), ignored_tensors(config) | unread)


def layers_as_stored(config: ModelConfig, stored: Iterable[str], layers: Iterable[int]) -> list[int]:
    """Return layers in the order of their first tensors among the ``stored`` names, which is that of the files.

    Files are read ahead in this order, and "layers.10" stands before "layers.2" in them.
    """
    depth = config.names.layer.count(".")
    places: dict[str, int] = {}
    for place, name in enumerate(stored):
        places.setdefault(".".join((*name.split(".", depth)[:depth], "")), place)
    return sorted(layers, key=lambda index: places.get(config.names.layer.format(index), 0))


class ModelTensors:
    """Reads the tensors of a checked checkpoint, straight to ``device``, if any; of a ``part`` only its own.

    A result may be the mapped file: do not write to it or keep it. ``channel_order`` orders the channels of query and key
    heads. In shapes, ``heads``, ``kv_heads``, ``own_hidden``, ``own_inner`` and ``own_vocab``
    count what the part has, ``own_inner`` of the layer's size; the fast form has all outputs and its own inputs instead.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: TensorSource,
        channel_order: ChannelOrder,
        device: torch.device | None = None,
        part: ModelPart | None = None,
    ) -> None:
        self._config = config
        self._names = config.names
        self._head = _head_name(config.names, checkpoint)
        self._checkpoint = checkpoint
        self._orders = {kind: _order_of(channel_order, kind, device) for kind in config.attentions}
        self._device = device
        self._part = whole(config) if part is None else part

    def embedding(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``[vocab, own_hidden]``, in ``dtype`` if the model multiplies it."""
        name = self._names.embedding
        own = self._part.own_hidden
        if self._names.embedding_norm is None and self._names.projections is None:
            stored = self._read_named(name if name in self._checkpoint else self._head, columns=own)
        else:
            words = self._here(self._checkpoint.read(name if name in self._checkpoint else self._head)).to(dtype)
            norm, projections = self._names.embedding_norm, self._names.projections
            changed = _changed(
                words,
                None if norm is None else self._norm(norm),
                None if projections is None else self._read_named(f"{projections[0]}.weight"),
                self._config.norm,
            )
            stored = changed[:, own.start : own.stop]
        factor = self._config.scalings.embedding
        # The factor is rounded first, as in transformers.
        return stored if factor == 1 else stored.to(dtype) * torch.tensor(factor, dtype=dtype, device=stored.device)

    def positions(self, count: int) -> Tensor | None:
        """``[count, own_hidden]``, of the first positions; or None."""
        name, first, own = self._names.positions, self._config.first_position, self._part.own_hidden
        if self._config.has_sinusoids:
            table = self._here(sinusoids(torch.arange(first, first + count), self._config.hidden_size))
            return table[:, own.start : own.stop]
        return None if name is None else self._read_named(name, columns=own)[first : first + count]

    def head(self) -> Tensor:
        """``[own_vocab, hidden]``; of the embedding if the two are tied."""
        tied = self._config.tie_word_embeddings and self._names.embedding in self._checkpoint
        head = self._read_named(self._names.embedding if tied else self._head, self._part.own_vocab)
        if self._names.projections is None:
            return head
        # One product in place of two: the head of a projected hidden state.
        return head.float() @ self._read_named(f"{self._names.projections[1]}.weight").float()

    def head_bias(self) -> Tensor | None:
        """``[own_vocab]``, or None."""
        return self._read_named(_bias_of(self._head), self._part.own_vocab) if self._config.has_head_bias else None

    def final_norm(self) -> NormTensors | None:
        """The norm before the head, or None."""
        return None if self._names.final_norm is None else self._norm(self._names.final_norm)

    def norm(self, index: int, name: str | None) -> NormTensors | None:
        """The norm of that ``name`` in a layer; None without a name."""
        return None if name is None else self._norm(self._names.layer.format(index) + name)

    def norms_of_layer(self, index: int) -> LayerNorms:
        """Those that the layer has."""
        return LayerNorms(*(self.norm(index, name) for name in msgspec.structs.astuple(self._config.norms_of(index))))

    def layer_factor(self, index: int) -> Tensor | None:
        """``[1]``: what multiplies the hidden state behind a layer, or None."""
        return None if self._names.layer_factor is None else self._read(index, self._names.layer_factor)

    def layer_inputs(self) -> LayerInputTensors | None:
        """Of the inputs that layers have of their own, which every part has whole; or None."""
        inputs, read = self._config.layer_inputs, self._checkpoint.read
        if inputs is None:
            return None
        return LayerInputTensors(inputs, self._names.layer, lambda name: self._here(read(name)))

    def qkv(self, index: int) -> tuple[Tensor, Tensor | None]:
        """``[(heads + 2 * kv_heads) * head_dim, hidden]``, and bias: queries, keys, values, and gates of as many heads; queries
        alone of a layer that reads the keys of another.
        """
        weights, bias = self.qkv_parts(index)
        return torch.cat(weights), bias

    def qkv_parts(self, index: int) -> tuple[list[Tensor], Tensor | None]:
        """As ``qkv``; the weight is in parts, whose rows follow each other."""
        bias = torch.cat(self._qkv(index, "bias")) if self._config.attention.qkv_bias else None
        return self._qkv(index, "weight"), bias

    def output(self, index: int) -> tuple[Tensor, Tensor | None]:
        """``[own_hidden, all heads * head_dim]``, and bias."""
        heads = _channels(self._config, index, self._part.heads)
        weight, bias = self._back(index, self._names.output, heads, has_bias=self._config.attention.output_bias)
        return times(weight, self._config.multipliers.output), bias

    def gate_up(self, index: int) -> tuple[Tensor, Tensor | None]:
        """``[2 * own_inner, hidden]``, and bias: gates, then ups; without a gate, ``[own_inner, hidden]``."""
        weights, bias = self.gate_up_parts(index)
        return torch.cat(weights), bias

    def gate_up_parts(self, index: int) -> tuple[list[Tensor], Tensor | None]:
        """As ``gate_up``; the weight is in parts, whose rows follow each other."""
        has_bias = self._config.layers[index].feed_forward.has_bias
        return self._gate_up(index, "weight"), torch.cat(self._gate_up(index, "bias")) if has_bias else None

    def down(self, index: int) -> tuple[Tensor, Tensor | None]:
        """``[own_hidden, intermediate]``, and bias."""
        feed = self._config.layers[index].feed_forward
        own = self._part.own_inner(feed.intermediate_size)
        weight, bias = self._back(index, self._names.down, own, has_bias=feed.has_bias)
        return times(weight, self._config.multipliers.down), bias

    def curve(self, index: int) -> Tensor | None:
        """Of "xielu", float32, ``[3]``, or None: a, b and c of ``a x^2 + c x`` above 0, and ``b (e^x - 1 - x) + c x`` below."""
        if self._config.layers[index].feed_forward.activation != "xielu":
            return None
        above, below, slope = (self._read(index, f"{self._names.curve}.{name}").float().view(()) for name in _CURVE)
        return torch.stack([functional.softplus(above), slope + functional.softplus(below), slope])

    def latent(self, index: int) -> LatentTensors | None:
        """Of a model with latent attention, instead of ``qkv`` and ``output``."""
        latent = self._config.attention.latent
        if latent is None:
            return None
        return LatentTensors(
            latent, self._part, self._orders[self._config.attention_of(index)], partial(self._read, index)
        )

    def recurrence(self, index: int) -> RecurrentTensors:
        """Of a layer with a state."""
        recurrence = self._config.layers[index].recurrence
        assert recurrence is not None
        return RecurrentTensors(recurrence, partial(self._read, index), self._config.multipliers)

    def sinks(self, index: int) -> Tensor | None:
        """``[heads]``, or None."""
        name = self._names.sinks
        return None if name is None else self._read(index, name, self._part.heads)

    def experts(self, index: int) -> ExpertTensors:
        """Of a layer that has experts."""
        feed = self._config.layers[index].feed_forward
        assert feed.experts is not None

        def read(name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
            return self._here(self._checkpoint.read(self._name(index, name), rows, columns))

        return ExpertTensors(feed.experts, feed, self._part, read)

    def qk_norm(self, index: int) -> Tensor | None:
        """``[heads + kv_heads, head_dim]``: queries, then keys, then values if they are normalised; or None."""
        attention, layer = self._config.attention_of(index), self._config.layers[index]
        kind, kv_heads = attention.qk_norm, self._part.kv_heads_of(attention.num_kv_heads)
        names, heads = (self._names.query_norm, self._names.key_norm), (self._part.heads, kv_heads)
        count = 1 if layer.keys_of is not None else 2
        if kind == "none" or not layer.attends or (kind == "plain" and layer.rope is None):
            return None
        if kind == "plain":
            return torch.ones(sum(map(len, heads[:count])), attention.head_dim, device=self._device)
        pairs = list(zip(names, heads, strict=True))[:count]
        if kind == "layer":
            return torch.cat([self._head_norms(index, *pair) for pair in pairs])
        norms = []
        for name, own in pairs:
            weight = _offset(self._config.norm, self._read(index, f"{name}.weight"))
            by_head = self._reordered(index, weight).view(-1, attention.head_dim)
            norms.append(by_head.expand(len(own), -1))
        if attention.norms_values and layer.keys_of is None:
            norms.append(torch.ones_like(norms[0][:1]).expand(len(kv_heads), -1))
        return torch.cat(norms)

    def qk_norm_bias(self, index: int) -> Tensor | None:
        """As ``qk_norm``, of layer norms that all heads share; or None."""
        names, heads = (self._names.query_norm, self._names.key_norm), (self._part.heads, self._part.kv_heads)
        if not self._config.attention.shares_head_norms:
            return None
        return torch.cat([self._head_norms(index, *pair, "bias") for pair in zip(names, heads, strict=True)])

    def _head_norms(self, index: int, name: str, heads: range, kind: str = "weight") -> Tensor:
        """``[heads, head_dim]``; see ``_head_norm_tensors``."""
        if self._config.attention.shares_head_norms:
            weights = self._read(index, f"{name}.{kind}").expand(len(heads), -1)
        elif "{}" in name:
            weights = torch.stack([self._read(index, f"{name.format(head)}.weight") for head in heads])
        else:
            weights = self._read(index, f"{name}.weight", heads)
        return self._reordered(index, weights.flatten()).view(-1, self._config.attention_of(index).head_dim)

    def _norm(self, name: str) -> NormTensors:
        if self._config.norm.has_weight:
            weight = _offset(self._config.norm, self._read_named(f"{name}.weight"))
        else:
            weight = self._here(torch.ones(self._config.hidden_size))
        return NormTensors(weight, self._read_named(f"{name}.bias") if self._config.norm.has_bias else None)

    def _read(self, index: int, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
        return self._read_named(self._name(index, name), rows, columns)

    def _name(self, index: int, name: str) -> str:
        return self._names.layer.format(index) + name

    def _read_named(self, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
        if self._part.is_whole_stage:
            rows = columns = None
        return self._here(self._checkpoint.read(name, rows, columns))

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor if self._device is None else tensor.to(self._device)

    def _back(self, index: int, name: str, own_inputs: range, *, has_bias: bool) -> tuple[Tensor, Tensor | None]:
        """A projection back to the hidden state."""
        if not self._part.is_fast:
            own = self._part.own_hidden
            weight = self._projection(index, name, "weight", own)
            return weight, self._read(index, f"{name}.bias", own) if has_bias else None
        has_bias = has_bias and self._part.place.tensor_rank == 0  # The ranks' outputs are added.
        weight = self._projection(index, name, "weight", columns=own_inputs)
        return weight, self._read(index, f"{name}.bias") if has_bias else None

    def _projection(
        self, index: int, name: str, kind: str, rows: range | None = None, columns: range | None = None
    ) -> Tensor:
        """A weight or bias of a layer; rows are outputs."""
        if kind == "weight" and self._names.has_inputs_first:
            return self._read(index, f"{name}.{kind}", columns, rows).t().contiguous()
        return self._read(index, f"{name}.{kind}", rows, columns)

    def _gate_up(self, index: int, kind: str) -> list[Tensor]:
        feed = self._config.layers[index].feed_forward
        count = 2 if feed.is_gated else 1
        widths, owns = (feed.intermediate_size,) * count, (self._part.own_inner(feed.intermediate_size),) * count
        parts = self._parts(index, self._names.gate_up, kind, widths, owns)
        return [times(parts[0], self._config.multipliers.gate), *parts[1:]]

    def _qkv(self, index: int, kind: str) -> list[Tensor]:
        attention, modules = self._config.attention_of(index), qkv_names(self._config, index)
        heads = _channels(self._config, index, self._part.heads)
        kv_heads = _channels(self._config, index, self._part.kv_heads_of(attention.num_kv_heads))
        apart: list[Tensor] = []
        if len(modules) < len(self._names.qkv):  # No values, or neither these nor keys.
            owns = (heads, kv_heads)[: len(modules)]
            parts = self._parts(index, modules, kind, _qkv_widths(self._config, index), owns)
            if len(parts) == 1:
                return [times(self._reordered(index, parts[0]), self._config.multipliers.queries)]
            queries, keys, values = parts[0], parts[1], parts[1]
        elif self._names.is_fused_by_head:
            (name,), own_kv = self._names.qkv, self._part.kv_heads
            width = (self._config.num_heads // self._config.num_kv_heads + 2) * self._config.head_dim
            stored = self._projection(index, name, kind, range(width * own_kv.start, width * own_kv.stop))
            queries, keys, values = by_group(stored, self._config, self._part)
        elif self._names.blocks:
            stored = self._here(self._checkpoint.read(self._name(index, f"{self._names.qkv[0]}.{kind}")))
            queries, keys, values = by_block(stored, self._config, self._part)
        else:
            gates = self._config.attention.gates
            of_queries = range(2 * heads.start, 2 * heads.stop) if gates == "by_head" else heads
            owns_all = (of_queries, kv_heads, kv_heads, *([heads] if gates == "apart" else []))
            queries, keys, values, *apart = self._parts(
                index, self._names.qkv, kind, _qkv_widths(self._config, index), owns_all
            )
            if gates == "by_head":
                pairs = queries.view(-1, 2, self._config.head_dim, *queries.shape[1:])
                queries, *apart = (part.flatten(0, 1) for part in pairs.unbind(1))
        factors = self._config.multipliers
        queries = times(self._reordered(index, queries), factors.queries)
        return [queries, times(self._reordered(index, keys), factors.keys), times(values, factors.values), *apart]

    def _parts(
        self, index: int, names: Sequence[str], kind: str, widths: Sequence[int], owns: Sequence[range]
    ) -> list[Tensor]:
        """The own rows of parts that are a tensor each, or one behind the other in one."""
        if len(names) == len(owns):
            return [self._projection(index, name, kind, own) for name, own in zip(names, owns, strict=True)]
        name = self._name(index, f"{names[0]}.{kind}")
        starts = itertools.accumulate(widths, initial=0)
        # The last start is the end.
        rows = [range(start + own.start, start + own.stop) for start, own in zip(starts, owns, strict=False)]

        def read(wanted: range) -> Tensor:
            """Some outputs, though the stage may be whole."""
            if kind == "weight" and self._names.has_inputs_first:
                return self._here(self._checkpoint.read(name, columns=wanted).t().contiguous())
            return self._here(self._checkpoint.read(name, wanted))

        return [read(wanted) for wanted in rows]

    def _reordered(self, index: int, heads: Tensor) -> Tensor:
        """``heads`` is ``[heads * head_dim, ...]``."""
        attention = self._config.attention_of(index)
        order = self._orders[attention]
        if bool((order.diff() == 1).all()):
            return heads
        by_head = heads.reshape(-1, attention.head_dim, *heads.shape[1:])
        return by_head[:, order].flatten(0, 1)


def _channels(config: ModelConfig, index: int, heads: range) -> range:
    head_dim = config.attention_of(index).head_dim
    return range(heads.start * head_dim, heads.stop * head_dim)


def _offset(norm: NormConfig, weight: Tensor) -> Tensor:
    return weight.float() + norm.offset if norm.offset else weight


def _order_of(channel_order: ChannelOrder, attention: AttentionConfig, device: torch.device | None) -> Tensor:
    order = channel_order(attention.head_dim, attention)
    return order if device is None else order.to(device)
