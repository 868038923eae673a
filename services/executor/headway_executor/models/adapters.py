"""Adapters of a model: low-rank additions to its projections (LoRA, Hu et al. 2021, arXiv 2106.09685).

Owns: which adapters are loaded, which row runs with which, and their matrices in the form of the fused projections. Must
not know: files, how a product is computed.

A projection with weight ``W`` gives ``W x + B A x``. ``A`` and ``B`` stay beside the weights, in float32, whatever form
the weights have.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_executor.backend import BackendConfigError
from headway_executor.models.adapter_files import AdapterFiles, LowRankPart, read_adapter_files
from headway_executor.models.config import ModelConfig
from headway_executor.models.features import Feature, lacking
from headway_executor.models.loading import ModelTensors
from headway_executor.models.part import ModelPart
from headway_proto.adapters import LoadedAdapter

QKV, OUTPUT, GATE_UP, DOWN = SITES = ("qkv", "output", "gate_up", "down")
"""The fused projections of a layer."""


class LowRank(NamedTuple):
    """The addition to one fused projection: ``down`` ``[rank, in]``, ``up`` ``[out, rank]``, scaled; float32.

    The parts of a fused projection have ranks of their own, side by side, so ``up`` is zero outside of its blocks.
    """

    down: Tensor
    up: Tensor


class AdapterWeights(NamedTuple):
    """By layer of the part, then by site; sites without an addition are absent."""

    layers: tuple[Mapping[str, LowRank], ...]


Prepared = Any
"""An adapter as the forward pass wants it."""


class ModelAdapters:
    """The adapters of one model, or a rank's part of them. ``channel_order``: of its query and key heads, see
    ``ModelTensors``.
    """

    def __init__(
        self,
        config: ModelConfig,
        channel_order: Tensor,
        part: ModelPart,
        *,
        device: torch.device | None = None,
        prepare: Callable[[AdapterWeights], Prepared] = lambda weights: weights,
    ) -> None:
        self._config = config
        self._channel_order = channel_order
        self._part = part
        self._device = device
        self._prepare = prepare
        self._loaded: dict[str, tuple[LoadedAdapter, Prepared]] = {}
        self._rows: dict[int, Prepared] = {}

    @property
    def loaded(self) -> tuple[LoadedAdapter, ...]:
        """All, in the order of loading."""
        return tuple(adapter for adapter, _ in self._loaded.values())

    def load(self, name: str, directory: str) -> LoadedAdapter:
        """Load an adapter; one that is loaded stays as it is.

        Raises:
            ModelFilesError: the files are missing, damaged, not supported, or for another model.
        """
        files = read_adapter_files(Path(directory), self._config, self._part.layers)
        adapter = LoadedAdapter(name, directory, files.fingerprint)
        if adapter.identity not in self._loaded:
            weights = fused(self._config, self._channel_order, self._part, files, self._device)
            self._loaded[adapter.identity] = adapter, self._prepare(weights)
        return adapter

    def unload(self, name: str) -> None:
        """Forget an adapter. Rows that have it keep it until they end."""
        for identity in [identity for identity, (adapter, _) in self._loaded.items() if adapter.name == name]:
            del self._loaded[identity]

    def enter(self, row: int, identity: str) -> str:
        """A row begins; ``identity`` is "" if it has no adapter. Return why it cannot run, or ""."""
        self._rows.pop(row, None)
        if identity and identity not in self._loaded:
            return f"adapter {identity!r:.96} is not loaded on this executor"
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


def takes_adapters(config: ModelConfig, asked: Mapping[str, str]) -> bool:
    """Whether the model has nothing that no adapter can add to.

    Raises:
        BackendConfigError: it has, and adapters are ``asked`` for.
    """
    lack = lacking(config, frozenset(Feature) - {Feature.EXPERTS, Feature.LATENT})
    if lack and asked:
        raise BackendConfigError(
            f"adapter {min(asked)!r:.66} is not allowed with this model, which has {lack}; allowed: none"
        )
    return not lack


def fused(
    config: ModelConfig, channel_order: Tensor, part: ModelPart, files: AdapterFiles, device: torch.device | None
) -> AdapterWeights:
    """Bring a part's adapter into the form of the fused projections, on a device (None: the CPU)."""
    without_bias = msgspec.structs.replace(
        config,
        attention=msgspec.structs.replace(config.attention, qkv_bias=False, output_bias=False),
        layers=tuple(
            msgspec.structs.replace(layer, feed_forward=msgspec.structs.replace(layer.feed_forward, has_bias=False))
            for layer in config.layers
        ),
    )
    names = config.names
    sites = {QKV: names.qkv, OUTPUT: (names.output,), GATE_UP: names.gate_up, DOWN: (names.down,)}
    layers: list[dict[str, LowRank]] = []
    for index in part.layers:
        layer: dict[str, LowRank] = {}
        inputs = _own_inputs(config, part, index)
        for site, modules in sites.items():
            prefix = names.layer.format(index)
            parts = {
                prefix + module: files.parts[prefix + module] for module in modules if prefix + module in files.parts
            }
            if parts:
                ups = _Ups(parts, files.num_outputs)
                tensors = ModelTensors(without_bias, ups, channel_order, part=part)
                up, _ = getattr(tensors, site)(index)
                own = inputs.get(site, slice(None))
                down = torch.cat([some.down[:, own] for some in parts.values()])
                layer[site] = LowRank(down.contiguous().to(device), up.contiguous().to(device))
        layers.append(layer)
    return AdapterWeights(tuple(layers))


def _own_inputs(config: ModelConfig, part: ModelPart, index: int) -> Mapping[str, slice]:
    """Of projections that have only some inputs here: in the fast form, ``B`` is whole and its sums are added."""
    if not part.is_fast or part.is_whole_stage:
        return {}
    inner = part.own_inner(config.layers[index].feed_forward.intermediate_size)
    attended = part.attended(config.head_dim)[part.place.tensor_rank]
    return {OUTPUT: slice(attended.start, attended.stop), DOWN: slice(inner.start, inner.stop)}


class _Ups:
    """A ``TensorSource`` that gives, in place of a projection's weight, its ``B`` in the columns of its own rank."""

    def __init__(self, parts: Mapping[str, LowRankPart], num_outputs: Mapping[str, int]) -> None:
        self._parts = parts
        self._num_outputs = num_outputs
        self._rank = sum(len(part.down) for part in parts.values())

    def __contains__(self, name: str) -> bool:
        return name.removesuffix(".weight") in self._num_outputs

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
        """See ``TensorSource``; ``columns`` are inputs of the weight, which this has not."""
        del columns
        module = name.removesuffix(".weight")
        wide = torch.zeros(self._num_outputs[module], self._rank)
        start = 0
        for other, part in self._parts.items():
            if other == module:
                wide[:, start : start + len(part.down)] = part.up
            start += len(part.down)
        return wide if rows is None else wide[rows.start : rows.stop]
