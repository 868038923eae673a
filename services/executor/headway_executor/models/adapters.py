"""Adapters of a model: low-rank additions to its projections (LoRA, Hu et al. 2021, arXiv 2106.09685).

Owns: which adapters are loaded, which row runs with which, and their matrices in the form of the fused projections. Must
not know: files, how a product is computed.

A projection with weight ``W`` gives ``W x + B A x``. ``A`` and ``B`` stay beside the weights, in float32, whatever form
the weights have.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_executor.backend import ReadAdapter
from headway_executor.models.adapter_files import AdapterFiles, LowRankPart, read_adapter_files
from headway_executor.models.adapter_stacks import by_matrix
from headway_executor.models.config import ExpertsConfig, ModelConfig, RecurrenceConfig
from headway_executor.models.latent_tensors import KEY_VALUE, KEY_VALUE_IN, QUERY, QUERY_IN, WHOLE_QUERY, LatentTensors
from headway_executor.models.loading import ChannelOrder, ModelTensors, with_zeros
from headway_executor.models.part import ModelPart
from headway_executor.models.tensor_shapes import qkv_names
from headway_proto.adapters import LoadedAdapter
from headway_proto.wording import shown


class AdapterSite(Enum):
    """A product of a layer to which an adapter may add.

    A state has two of its own, and up to three more between them. Latent attention has six in place of ``QKV``: to queries,
    to what queries are compressed to, to what keys and values are compressed to, from queries back through what makes keys of
    that, from that to values, and to gates. A layer
    with experts has eight in place of ``GATE_UP`` and ``DOWN``. Of these, two are of all experts that tokens choose from, and
    two are before and behind those.
    """

    QKV = auto()
    OUTPUT = auto()
    STATE_INPUTS = auto()
    STATE_SELECTION = auto()
    STATE_STEPS = auto()
    STATE_GATES = auto()
    STATE_OUTPUT = auto()
    GATE_UP = auto()
    DOWN = auto()
    LATENT_QUERY = auto()
    LATENT_QUERY_IN = auto()
    LATENT_IN = auto()
    LATENT_KEYS = auto()
    LATENT_VALUES = auto()
    LATENT_GATES = auto()
    ROUTER = auto()
    EXPERTS_IN = auto()
    EXPERTS_OUT = auto()
    SHARED_GATE = auto()
    SHARED_GATE_UP = auto()
    SHARED_DOWN = auto()
    EXPERT_GATE_UP = auto()
    EXPERT_DOWN = auto()


class LowRank(NamedTuple):
    """The addition to one fused projection: ``down`` ``[rank, in]``, ``up`` ``[out, rank]``, scaled; float32.

    The parts of a fused projection have ranks of their own, side by side, so ``up`` is zero outside of its blocks. Of
    experts, both have one dimension more, the first; of heads of latent attention, one has.
    """

    down: Tensor
    up: Tensor


class AdapterWeights(NamedTuple):
    """By layer of the part, then by site; sites without an addition are absent."""

    layers: tuple[Mapping[AdapterSite, LowRank], ...]


Prepared = Any
"""An adapter as the forward pass wants it."""


class ModelAdapters:
    """The adapters of one model, or a rank's part of them. ``channel_order``: of its query and key heads, see
    ``ModelTensors``. ``prepare`` brings an adapter into the form for steps while others run; ``place`` puts that where steps
    find it, between two of them.
    """

    def __init__(
        self,
        config: ModelConfig,
        channel_order: ChannelOrder,
        part: ModelPart,
        *,
        prepare: Callable[[AdapterWeights], Prepared] = lambda weights: weights,
        place: Callable[[Prepared], Prepared] = lambda prepared: prepared,
    ) -> None:
        self._config = config
        self._channel_order = channel_order
        self._part = part
        self._prepare = prepare
        self._place = place
        self._loaded: dict[str, tuple[LoadedAdapter, Prepared]] = {}
        self._rows: dict[int, Prepared] = {}

    @property
    def loaded(self) -> tuple[LoadedAdapter, ...]:
        """All, in the order of loading."""
        return tuple(adapter for adapter, _ in self._loaded.values())

    def read(self, name: str, directory: str) -> ReadAdapter:
        """Read and prepare an adapter. Any thread may do it beside the others' calls: nothing here changes.

        Raises:
            ModelFilesError: the files are missing, damaged, not supported, or for another model.
        """
        files = read_adapter_files(Path(directory), self._config, self._part.layers)
        adapter = LoadedAdapter(name, directory, files.fingerprint)
        return ReadAdapter(adapter, self._prepare(fused(self._config, self._channel_order, self._part, files)))

    def load(self, read: ReadAdapter) -> LoadedAdapter:
        """Take an adapter into use; one that is loaded stays as it is."""
        if read.adapter.identity not in self._loaded:
            self._loaded[read.adapter.identity] = read.adapter, self._place(read.weights)
        return read.adapter

    def unload(self, name: str) -> None:
        """Forget an adapter. Rows that have it keep it until they end."""
        for identity in [identity for identity, (adapter, _) in self._loaded.items() if adapter.name == name]:
            del self._loaded[identity]

    def enter(self, row: int, identity: str) -> str:
        """A row begins; ``identity`` is "" if it has no adapter. Return why it cannot run, or ""."""
        self._rows.pop(row, None)
        if identity and identity not in self._loaded:
            return f"adapter {shown(identity)} is not loaded on this executor"
        if identity:
            self._rows[row] = self._loaded[identity][1]
        return ""

    def leave(self, rows: NDArray[np.integer]) -> None:
        """Rows have ended."""
        if self._rows:
            for row in rows.tolist():
                self._rows.pop(row, None)

    def of_rows(self, rows: NDArray[np.integer]) -> list[Prepared | None] | None:
        """Each row's adapter, or None; None instead of the list if there are none at all."""
        if not self._rows:
            return None
        found = [self._rows.get(row) for row in rows.tolist()]
        return found if any(adapter is not None for adapter in found) else None


def fused(config: ModelConfig, channel_order: ChannelOrder, part: ModelPart, files: AdapterFiles) -> AdapterWeights:
    """Bring a part's adapter into the form of the fused projections, on the CPU."""
    fusing = _Fusing(by_matrix(config), channel_order, part, files)
    return AdapterWeights(
        tuple(fusing.dense(index) | fusing.latent(index) | fusing.experts(index) for index in part.layers)
    )


def on_device(weights: AdapterWeights, device: torch.device) -> AdapterWeights:
    """The same in the memory of a device."""
    return AdapterWeights(
        tuple(
            {site: LowRank(added.down.to(device), added.up.to(device)) for site, added in layer.items()}
            for layer in weights.layers
        )
    )


def _those_there(found: Mapping[AdapterSite, LowRank | None]) -> dict[AdapterSite, LowRank]:
    return {site: added for site, added in found.items() if added is not None}


def _as_it_is(down: Tensor) -> Tensor:
    return down


class _Fusing:
    """Of one adapter; ``config`` has a tensor for each matrix, and no biases."""

    def __init__(self, config: ModelConfig, channel_order: ChannelOrder, part: ModelPart, files: AdapterFiles) -> None:
        self._config = config
        self._channel_order = channel_order
        self._part = part
        self._files = files

    def dense(self, index: int) -> dict[AdapterSite, LowRank]:
        """The projections of a layer without experts, or of its attention."""
        names, layer = self._config.names, self._config.layers[index]
        found = self._attention(index) if layer.attends else {}
        if layer.recurrence is not None:
            found |= self._recurrence(index, layer.recurrence)
        found |= {
            AdapterSite.GATE_UP: self._low_rank(index, names.gate_up, lambda tensors: tensors.gate_up(index)[0]),
            AdapterSite.DOWN: self._low_rank(
                index, (names.down,), lambda tensors: tensors.down(index)[0], partial(self._inner, index)
            ),
        }
        return _those_there(found)

    def _attention(self, index: int) -> dict[AdapterSite, LowRank | None]:
        names, latent = self._config.names, self._config.attention.latent
        return {
            AdapterSite.QKV: self._low_rank(
                index, qkv_names(self._config, index) if latent is None else (), lambda tensors: tensors.qkv(index)[0]
            ),
            AdapterSite.OUTPUT: self._low_rank(
                index, (names.output,), lambda tensors: tensors.output(index)[0], partial(self._attended, index)
            ),
        }

    def _recurrence(self, index: int, config: RecurrenceConfig) -> dict[AdapterSite, LowRank | None]:
        names = config.names
        selection, steps, gates = ((name,) if name else () for name in (names.selection, names.steps, names.gates))
        return {
            AdapterSite.STATE_INPUTS: self._low_rank(
                index, names.inputs, lambda tensors: tensors.recurrence(index).inputs()[0]
            ),
            AdapterSite.STATE_SELECTION: self._low_rank(
                index, selection, lambda tensors: tensors.recurrence(index).selection()
            ),
            AdapterSite.STATE_STEPS: self._low_rank(index, steps, lambda tensors: tensors.recurrence(index).steps()),
            AdapterSite.STATE_GATES: self._low_rank(index, gates, lambda tensors: tensors.recurrence(index).gates()),
            AdapterSite.STATE_OUTPUT: self._low_rank(
                index, (names.output,), lambda tensors: tensors.recurrence(index).output()[0]
            ),
        }

    def latent(self, index: int) -> dict[AdapterSite, LowRank]:
        """Queries, keys and values of latent attention."""
        config = self._config.attention.latent
        if config is None or not self._config.layers[index].attends:
            return {}
        query, heads = WHOLE_QUERY if config.query_rank is None else QUERY, len(self._part.heads)

        def low_rank(name: str | None, up: Callable[[LatentTensors], Tensor | None]) -> LowRank | None:
            names = () if name is None else (config.prefix + name,)
            return self._low_rank(index, names, lambda tensors: up(_latent(tensors, index)))

        found = {
            AdapterSite.LATENT_QUERY: low_rank(query, LatentTensors.queries),
            AdapterSite.LATENT_QUERY_IN: low_rank(QUERY_IN, LatentTensors.query_in),
            AdapterSite.LATENT_IN: low_rank(KEY_VALUE_IN, LatentTensors.key_value_in),
            AdapterSite.LATENT_KEYS: _turned(
                low_rank(KEY_VALUE, lambda tensors: tensors.keys_and_values()[0].flatten(0, 1)), heads
            ),
            AdapterSite.LATENT_VALUES: _of_heads(
                low_rank(KEY_VALUE, lambda tensors: tensors.keys_and_values()[1].flatten(0, 1)), heads
            ),
            AdapterSite.LATENT_GATES: low_rank(config.gates, LatentTensors.gates),
        }
        return _those_there(found)

    def experts(self, index: int) -> dict[AdapterSite, LowRank]:
        """The router, the shared expert and all others of a layer that has them."""
        feed = self._config.layers[index].feed_forward
        if feed.experts is None:
            return {}
        names, numbers = feed.experts.names, range(feed.experts.routing.num_experts)
        before, behind = ((name,) if name else () for name in names.latent)
        gate = () if names.shared_gate is None else (names.shared_gate,)
        found = {
            AdapterSite.ROUTER: self._low_rank(
                index, (names.router,), lambda tensors: tensors.experts(index).router()[0]
            ),
            AdapterSite.EXPERTS_IN: self._low_rank(index, before, lambda tensors: _latent_experts(tensors, index)[0]),
            AdapterSite.EXPERTS_OUT: self._low_rank(index, behind, lambda tensors: _latent_experts(tensors, index)[1]),
            AdapterSite.SHARED_GATE: self._low_rank(index, gate, lambda tensors: tensors.experts(index).shared_gate()),
            AdapterSite.SHARED_GATE_UP: self._of_expert(index, feed.experts, None, names.shared_gate_up),
            AdapterSite.SHARED_DOWN: self._of_expert(index, feed.experts, None, (names.shared_down,)),
            AdapterSite.EXPERT_GATE_UP: _stacked(
                [self._of_expert(index, feed.experts, number, names.gate_up) for number in numbers]
            ),
            AdapterSite.EXPERT_DOWN: _stacked(
                [self._of_expert(index, feed.experts, number, (names.down,)) for number in numbers]
            ),
        }
        return _those_there(found)

    def _of_expert(
        self, index: int, experts: ExpertsConfig, number: int | None, modules: Sequence[str]
    ) -> LowRank | None:
        """``number`` None: the shared one."""
        names, size = experts.names, self._config.layers[index].feed_forward.intermediate_size
        prefix = names.shared if number is None else names.expert.format(number)
        is_back = tuple(modules) == (names.down if number is not None else names.shared_down,)
        inner = self._part.own_of_expert(experts.shared_size if number is None else size)

        def own(down: Tensor) -> Tensor:
            return self._here(down, inner) if is_back else down

        def up(tensors: ModelTensors) -> Tensor:
            of_layer = tensors.experts(index)
            return (of_layer.down(number) if is_back else of_layer.gate_up(number))[0]

        return self._low_rank(index, [prefix + module for module in modules], up, own)

    def _attended(self, index: int, down: Tensor) -> Tensor:
        """Of the projection behind attention."""
        attention = self._config.attention_of(index)
        own = self._part.attended(attention.num_heads, attention.attended_dim)
        if attention.stored_value_dim != attention.attended_dim:
            down = with_zeros(down.t(), attention).t()
        return self._here(down, own[self._part.place.tensor_rank])

    def _inner(self, index: int, down: Tensor) -> Tensor:
        return self._here(down, self._part.own_inner(self._config.layers[index].feed_forward.intermediate_size))

    def _here(self, down: Tensor, own: range) -> Tensor:
        """``A`` of a projection back, which in the fast form has only its ``own`` inputs here: sums of ``B`` are added."""
        is_part = self._part.is_fast and not self._part.is_whole_stage
        return down[:, own.start : own.stop] if is_part else down

    def _low_rank(
        self,
        index: int,
        modules: Sequence[str],
        up: Callable[[ModelTensors], Tensor | None],
        inputs: Callable[[Tensor], Tensor] = _as_it_is,
    ) -> LowRank | None:
        """Of ``modules`` of a layer that are one product; None if none is adapted. ``inputs``: those of ``A`` that are here."""
        prefix = self._config.names.layer.format(index)
        parts = {name: self._files.parts[name] for name in map(prefix.__add__, modules) if name in self._files.parts}
        if not parts:
            return None
        ups = _Ups(parts, self._files.num_outputs)
        made = up(ModelTensors(self._config, ups, self._channel_order, part=self._part))
        assert made is not None
        return LowRank(inputs(torch.cat(ups.downs)).contiguous(), made.contiguous())


def _latent_experts(tensors: ModelTensors, index: int) -> tuple[Tensor, Tensor]:
    products = tensors.experts(index).latent()
    assert products is not None
    return products


def _of_heads(added: LowRank | None, num_heads: int) -> LowRank | None:
    """``up`` by head: ``[heads, out, rank]``."""
    return None if added is None else added._replace(up=added.up.view(num_heads, -1, len(added.down)))


def _turned(added: LowRank | None, num_heads: int) -> LowRank | None:
    """Of each head's product the other way round: ``down`` ``[heads, rank, out]``, ``up`` ``[in, rank]``."""
    by_head = _of_heads(added, num_heads)
    return None if by_head is None else LowRank(by_head.up.mT.contiguous(), by_head.down.t().contiguous())


def _latent(tensors: ModelTensors, index: int) -> LatentTensors:
    of_layer = tensors.latent(index)
    assert of_layer is not None
    return of_layer


def _stacked(experts: Sequence[LowRank | None]) -> LowRank | None:
    """One of each expert, with as many ranks as the largest."""
    some = next((added for added in experts if added is not None), None)
    if some is None:
        return None
    rank = max(len(added.down) for added in experts if added is not None)
    downs = some.down.new_zeros(len(experts), rank, some.down.shape[1])
    ups = some.up.new_zeros(len(experts), len(some.up), rank)
    for number, added in enumerate(experts):
        if added is not None:
            downs[number, : len(added.down)] = added.down
            ups[number, :, : len(added.down)] = added.up
    return LowRank(downs, ups)


class _Ups:
    """A ``TensorSource`` that gives, in place of a projection's weight, its ``B`` in the columns of its own rank.

    Parts that share their ``A`` share the columns; ``downs`` has each ``A`` once.
    """

    def __init__(self, parts: Mapping[str, LowRankPart], num_outputs: Mapping[str, int]) -> None:
        self._parts = parts
        self._num_outputs = num_outputs
        self.downs: list[Tensor] = []
        self._starts: dict[str, int] = {}
        starts: dict[int, int] = {}
        self._rank = 0
        for module, part in parts.items():
            if part.down.data_ptr() not in starts:
                starts[part.down.data_ptr()] = self._rank
                self.downs.append(part.down)
                self._rank += len(part.down)
            self._starts[module] = starts[part.down.data_ptr()]

    def __contains__(self, name: str) -> bool:
        return name.removesuffix(".weight") in self._num_outputs

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
        """See ``TensorSource``; ``columns`` are inputs of the weight, which this has not."""
        del columns
        module = name.removesuffix(".weight")
        wide = torch.zeros(self._num_outputs[module], self._rank)
        if module in self._parts:
            start = self._starts[module]
            wide[:, start : start + len(self._parts[module].down)] = self._parts[module].up
        return wide if rows is None else wide[rows.start : rows.stop]
