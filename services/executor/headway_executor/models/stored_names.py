"""Names of tensors as a checkpoint has them, and what else its tensors say of how they are stored.

Owns: the ways in which checkpoints of one family differ. Must not know: what is done with a tensor.
"""

import re
from collections.abc import Callable, Container
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from headway_executor.backend import ModelFilesError
from headway_executor.models.config import LayerConfig, ModelConfig
from headway_executor.models.expert_tensors import stacked_names
from headway_executor.models.tensor_names import LayerNormNames, TensorNames

DECODER = "model."
_OLDER_DECODER = "backbone."
"""Of Mamba and Nemotron-H: transformers has it as a model, too."""
_NUMBER = "{}"
LAYERS = "layers."
_PLACES = (
    ("model.language_model.model.", "model.language_model."),
    ("language_model.model.", "language_model."),
    ("language_model.backbone.", "language_model."),
    ("model.language_model.", ""),
    ("model.text_model.", ""),
    ("thinker.model.language_model.", "thinker."),
    ("thinker.model.", "thinker."),
)
"""What is in front of a decoder's names instead, and of its head's, beside other models: as transformers 4 or 5 saves them.

The first Qwen2-VL have nothing more there.
"""


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
    config = named_as_stored(config, source)
    name, of_head = config.names.embedding, head_name(config.names, source)
    if not (config.tie_word_embeddings and name in source and of_head in source):
        return config
    embedding, head = source.read(name), source.read(of_head)
    wide = torch.promote_types(embedding.dtype, head.dtype)
    if torch.equal(embedding.to(wide), head.to(wide)):
        return config
    warn(
        f"tie_word_embeddings is true, but {of_head} differs from {name}; each is used as it is stored, "
        "as transformers does"
    )
    return msgspec.structs.replace(config, tie_word_embeddings=False)


def head_name(names: TensorNames, stored: Container[str] | TensorSource) -> str:
    """Return the name of the head that is stored, or else of the first."""
    return next((name for name in names.heads if name in stored), names.heads[0])


def module_as_stored(config: ModelConfig, module: str) -> str:
    """A module of the decoder by its stored name, whichever transformers has named it."""
    name = _decoder_as_stored(config, module)
    of_layer = re.fullmatch(r"(.*?\.\d+\.)(.*)", name + ".", re.DOTALL)
    prefix, rest = of_layer.groups() if of_layer else ("", "")
    for theirs, ours in config.names.in_transformers:
        if rest.startswith(theirs):
            return (prefix + ours + rest.removeprefix(theirs)).removesuffix(".")
    return name


def _decoder_as_stored(config: ModelConfig, module: str) -> str:
    decoder = config.names.layer.partition(LAYERS)[0]
    for front in (*(front for front, _ in _PLACES), DECODER):
        if (config.names.is_part or decoder == _OLDER_DECODER) and module.startswith(front + LAYERS):
            return decoder + module.removeprefix(front)
    layer = config.names.layer.partition(_NUMBER)[0]
    _, is_behind, rest = module.partition(f".{layer}")
    return layer + rest if is_behind and not module.startswith(layer) else module


def named_as_stored(config: ModelConfig, stored: StoredSource) -> ModelConfig:
    """Models for vectors are stored without a head, and their tensors without the name of the decoder in front.

    Without ``has_head`` nothing stands where the head would, and nothing asks for what it gives.
    """
    config = _stacked_as_stored(_placed_as_stored(config, stored), stored)
    config = _cut_as_stored(_norms_as_stored(_dense_as_stored(config, stored), stored), stored)
    decoder = config.names.embedding.partition(".")[0] + "."
    bare = _renamed(config.names, lambda name: name.removeprefix(decoder))
    if not config.names.is_part and config.names.embedding not in stored and bare.embedding in stored:
        before = config.before_head
        is_whole = before is None or f"{before.dense}.weight" in stored
        has_head = is_whole and (config.tie_word_embeddings or any(name in stored for name in bare.heads))
        is_tied = config.tie_word_embeddings or not has_head
        config = _with_names(config, bare, lambda name: name.removeprefix(decoder))
        has_bias = config.has_head_bias and has_head
        config = msgspec.structs.replace(config, has_head=has_head, has_head_bias=has_bias, tie_word_embeddings=is_tied)
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


def _turned_as_stored(config: ModelConfig, stored: StoredSource) -> ModelConfig:
    """Codes have outputs first, whatever the checkpoint's own code has."""
    names = config.names
    if names.projections is not None and stored.is_coded(head_name(names, stored)):
        raise ModelFilesError(
            f"{head_name(names, stored)} is quantised; allowed with {config.architecture}, whose hidden states are projected "
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


def _placed_as_stored(config: ModelConfig, stored: TensorSource) -> ModelConfig:
    """Beside other models, names have more in front. Such a checkpoint is tied if it has no head, whatever its file says."""
    names = config.names
    if not names.is_part:
        return config
    own = names.layer.partition(".")[0] + "."
    for decoder, of_head in _PLACES:
        moved = _renamed(names, lambda name, decoder=decoder: name.replace(own, decoder, 1))  # type: ignore[misc]
        heads = dict.fromkeys(front + head for front in (of_head, decoder) for head in names.heads)
        moved = msgspec.structs.replace(moved, heads=tuple(heads))
        if moved.embedding in stored or f"{moved.final_norm}.weight" in stored:
            names = moved
            config = _with_names(config, moved, lambda name, decoder=decoder: name.replace(own, decoder, 1))  # type: ignore[misc]
            break
    is_tied = config.tie_word_embeddings or not any(head in stored for head in names.heads)
    return msgspec.structs.replace(config, tie_word_embeddings=is_tied)


def _stacked_as_stored(config: ModelConfig, stored: StoredSource) -> ModelConfig:
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


def _dense_as_stored(config: ModelConfig, stored: StoredSource) -> ModelConfig:
    """See ``TensorNames.other_feed_forward``."""
    names = config.names
    dense = [index for index, layer in enumerate(config.layers) if layer.feed_forward.experts is None]
    if names.other_feed_forward is None or not dense:
        return config

    def other(name: str) -> str:
        return f"{names.other_feed_forward}{name.rpartition('.')[2]}"

    prefix = names.layer.format(dense[0])
    if f"{prefix}{names.down}.weight" in stored or f"{prefix}{other(names.down)}.weight" not in stored:
        return config
    renamed = msgspec.structs.replace(names, gate_up=tuple(map(other, names.gate_up)), down=other(names.down))
    return msgspec.structs.replace(config, names=renamed)


def _norms_as_stored(config: ModelConfig, stored: StoredSource) -> ModelConfig:
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


def _cut_as_stored(config: ModelConfig, stored: StoredSource) -> ModelConfig:
    """Transformers joins the tensors of a convolution, and cuts it in equal parts when it writes."""

    def cut(index: int, layer: LayerConfig) -> LayerConfig:
        state = layer.recurrence
        if state is None or len(state.names.convolution) <= 1:
            return layer
        name = f"{config.names.layer.format(index)}{state.names.convolution[0]}.weight"
        is_alike = name in stored and len(stored.read(name)) * len(state.names.convolution) == state.channels
        return msgspec.structs.replace(layer, recurrence=msgspec.structs.replace(state, is_cut_alike=is_alike))

    return msgspec.structs.replace(config, layers=tuple(cut(*pair) for pair in enumerate(config.layers)))
