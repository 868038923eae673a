"""The adapters of a step on a device: which token has which, in memory that recorded steps read.

Owns: this memory, and the tables of an adapter's matrices. Must not know: files, who loads adapters, graphs.

Steps of up to ``most_tokens`` tokens have two launches for each projection, whatever adapters they have, and allocate
nothing. Larger ones compute adapter after adapter, by torch's library; only in experts, whose pairs the host does not know,
they go through the pairs in the same way, as many at once as there is memory for.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_executor.gpu.runtime import Runtime, UploadRing
from headway_executor.models.adapted import StepAdapters
from headway_executor.models.adapter_files import MAX_RANK
from headway_executor.models.adapters import AdapterSite, AdapterWeights, LowRank, ModelAdapters
from headway_executor.models.attention_config import AttentionConfig
from headway_executor.models.config import ModelConfig
from headway_kernels.gpu.experts.grouped import ExpertPairs
from headway_kernels.gpu.experts.low_rank import add_low_rank_of_pairs
from headway_kernels.gpu.linear.low_rank import (
    ENTRY,
    TILE,
    add_low_rank,
    add_low_rank_of_heads,
    most_tiles,
    workspace_size,
)

_PARTS = {AdapterSite.QKV: 3, AdapterSite.STATE_INPUTS: 6} | dict.fromkeys(
    (AdapterSite.GATE_UP, AdapterSite.SHARED_GATE_UP, AdapterSite.EXPERT_GATE_UP), 2
)
"""Projections of a site at most, each with a rank of its own; others are one."""
_OF_PAIRS = (AdapterSite.EXPERT_GATE_UP, AdapterSite.EXPERT_DOWN)
_OF_HEADS = (AdapterSite.LATENT_KEYS, AdapterSite.LATENT_VALUES)
_NUMBERS = {site: number for number, site in enumerate(AdapterSite)}


def _most_rank(site: AdapterSite) -> int:
    return _PARTS.get(site, 1) * MAX_RANK


def _widths(config: ModelConfig) -> Iterator[tuple[AdapterSite, int]]:
    """The inputs of every site that the model has; of layers that differ, each."""
    hidden, latent = config.hidden_size, config.attention.latent
    yield from ((AdapterSite.OUTPUT, of.num_heads * of.attended_dim) for of in config.attentions)
    if latent is None:
        yield AdapterSite.QKV, hidden
    else:
        yield AdapterSite.LATENT_QUERY, latent.query_rank or hidden
        yield AdapterSite.LATENT_QUERY_IN, hidden
        yield AdapterSite.LATENT_IN, hidden
        yield AdapterSite.LATENT_GATES, hidden
        yield AdapterSite.LATENT_KEYS, latent.plain_dim
        yield AdapterSite.LATENT_VALUES, latent.rank
    for layer in config.layers:
        feed, state = layer.feed_forward, layer.recurrence
        if state is not None:
            yield AdapterSite.STATE_INPUTS, hidden
            yield AdapterSite.STATE_SELECTION, state.inner
            yield AdapterSite.STATE_STEPS, state.step_rank
            yield AdapterSite.STATE_GATES, state.gate_rank
            yield AdapterSite.STATE_OUTPUT, state.inner
        if feed.experts is None:
            yield AdapterSite.GATE_UP, hidden
            yield AdapterSite.DOWN, feed.intermediate_size
        else:
            yield AdapterSite.ROUTER, hidden
            yield AdapterSite.SHARED_GATE, hidden
            yield AdapterSite.SHARED_GATE_UP, hidden
            yield AdapterSite.SHARED_DOWN, feed.experts.shared_size
            yield AdapterSite.EXPERTS_IN, hidden
            yield AdapterSite.EXPERTS_OUT, feed.experts.latent_size
            yield AdapterSite.EXPERT_GATE_UP, hidden
            yield AdapterSite.EXPERT_DOWN, feed.intermediate_size


class DeviceAdapter(NamedTuple):
    """``layers``: see ``AdapterWeights``. ``table``: of all sites of all layers, see ``low_rank``."""

    layers: tuple[Mapping[AdapterSite, LowRank], ...]
    table: Tensor


def without_shared_channels(weights: AdapterWeights, attention: AttentionConfig) -> AdapterWeights:
    """What is added to the keys of latent attention, which queries meet here with the channels behind the shared ones alone."""

    def narrowed(sites: Mapping[AdapterSite, LowRank]) -> Mapping[AdapterSite, LowRank]:
        keys = sites.get(AdapterSite.LATENT_KEYS)
        if keys is None:
            return sites
        own = keys.down[..., attention.rotary_dim :].contiguous()
        return {**sites, AdapterSite.LATENT_KEYS: keys._replace(down=own)}

    return AdapterWeights(tuple(narrowed(sites) for sites in weights.layers))


def with_table(weights: AdapterWeights) -> DeviceAdapter:
    """The same, with the addresses of its matrices, which stay where they are."""
    entries = np.zeros((len(weights.layers), len(_NUMBERS), ENTRY), dtype=np.int64)
    device = torch.device("cpu")
    for layer, sites in zip(entries, weights.layers, strict=True):
        for site, added in sites.items():
            device = added.down.device
            assert added.down.is_contiguous(), "kernels find rows by their number"
            assert added.up.is_contiguous(), "kernels find rows by their number"
            layer[_NUMBERS[site]] = added.down.data_ptr(), added.up.data_ptr(), added.up.shape[-1]
    return DeviceAdapter(weights.layers, torch.from_numpy(entries).to(device))


class DeviceAdapters:
    """Adds to products what the adapters of rows make of their inputs. ``are_any``: something may be added.

    ``max_num_rows`` and ``most_tokens`` are of a step that is computed in this memory.
    """

    def __init__(
        self, adapters: ModelAdapters, config: ModelConfig, runtime: Runtime, *, max_num_rows: int, most_tokens: int
    ) -> None:
        self.adapters = adapters
        self.most_tokens = most_tokens
        self.are_any = False
        self._runtime = runtime
        self._max_num_rows = max_num_rows
        self._large = StepAdapters(adapters)
        self._num_tiles = most_tiles(most_tokens, max_num_rows)
        experts = [layer.feed_forward.experts for layer in config.layers if layer.feed_forward.experts is not None]
        self._has_experts = bool(experts)
        # Addresses first, which have eight bytes: of tiles, then of tokens.
        self._num_addresses = self._num_tiles + most_tokens * self._has_experts
        self._ring = UploadRing(runtime, 2 * self._num_addresses + TILE * self._num_tiles)
        sent = torch.zeros(self._ring.size, dtype=torch.int32, device=runtime.device)
        self._sent = sent
        self._addresses = sent[: 2 * self._num_addresses].view(torch.int64)
        self._tokens = sent[2 * self._num_addresses :].view(self._num_tiles, TILE)
        self._of_large_step = self._addresses[:0]
        num_chosen = max((of_layer.routing.num_chosen for of_layer in experts), default=0)
        rows = dict.fromkeys(_OF_PAIRS, num_chosen) | dict.fromkeys(_OF_HEADS, config.attention.num_heads)
        sizes = [
            workspace_size(most_tokens * rows.get(site, 1), width, _most_rank(site)) for site, width in _widths(config)
        ]
        self._workspace = torch.empty(max(sizes), dtype=torch.float32, device=runtime.device)

    def begin(self, token_rows: NDArray[np.integer], num_tokens: int) -> None:
        """A step begins, on the current stream; ``token_rows``: the row of each token; it is padded to ``num_tokens``."""
        if num_tokens > self.most_tokens:
            self._large.begin(token_rows, self._runtime.device)
            self.are_any = self._large.are_any
            if self._has_experts and self.are_any:
                addresses = self._runtime.host_tensor((num_tokens,), torch.int64)
                addresses[: len(token_rows)] = torch.tensor(_addresses_of(self.adapters.of_rows(token_rows) or []))
                addresses[len(token_rows) :] = 0
                self._of_large_step = addresses.to(self._runtime.device, non_blocking=True)
            return
        of_tokens = self.adapters.of_rows(token_rows)
        self.are_any = of_tokens is not None
        if of_tokens is not None:
            self._send(of_tokens)

    def clear(self) -> None:
        """Give no token an adapter."""
        self._addresses.zero_()

    def add(self, layer: int, site: AdapterSite, inputs: Tensor, outputs: Tensor) -> None:
        """Add to ``outputs`` what each token's adapter makes of ``inputs``, computed in float32."""
        if len(inputs) > self.most_tokens:
            self._large.add(layer, site, inputs, outputs)
            return
        tiles, most_rank = self._tiles_of(len(inputs)), _most_rank(site)
        add_low_rank(inputs, outputs, *tiles, self._workspace, site=_number(layer, site), most_rank=most_rank)

    def add_of_heads(self, layer: int, site: AdapterSite, inputs: Tensor, outputs: Tensor) -> None:
        """As ``add``, of products of heads of latent attention, ``[tokens, heads, columns]``."""
        if len(inputs) > self.most_tokens:
            self._large.add_of_heads(layer, site, inputs, outputs)
            return
        add_low_rank_of_heads(
            inputs,
            outputs,
            *self._tiles_of(len(inputs)),
            self._workspace,
            site=_number(layer, site),
            most_rank=_most_rank(site),
            own_downs=site == AdapterSite.LATENT_KEYS,
        )

    def add_of_pairs(
        self, layer: int, site: AdapterSite, inputs: Tensor, outputs: Tensor, pairs: ExpertPairs, *, gathers: bool
    ) -> None:
        """As ``add``, of the pairs of tokens and experts; see ``multiply_pairs``."""
        num_tokens = len(pairs.chosen)
        is_large = num_tokens > self.most_tokens
        tables = self._of_large_step if is_large else self._addresses[self._num_tiles :][:num_tokens]
        place = {"site": _number(layer, site), "most_rank": _most_rank(site)}
        add_low_rank_of_pairs(inputs, outputs, tables, pairs, self._workspace, **place, gathers=gathers)

    def _tiles_of(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """The tables and the tokens of a step's tiles."""
        num_tiles = most_tiles(num_tokens, self._max_num_rows)
        return self._addresses[:num_tiles], self._tokens[:num_tiles]

    def _send(self, of_tokens: list[DeviceAdapter | None]) -> None:
        tokens: dict[int, list[int]] = {}
        for place, adapter in enumerate(of_tokens):
            if adapter is not None:
                tokens.setdefault(adapter.table.data_ptr(), []).append(place)
        slot = self._ring.next_slot()
        addresses = slot[: 2 * self._num_addresses].view(np.int64)
        tiles = slot[2 * self._num_addresses :].reshape(self._num_tiles, TILE)
        tables, of_each = addresses[: self._num_tiles], addresses[self._num_tiles :]
        if self._has_experts:
            of_each[: len(of_tokens)], of_each[len(of_tokens) :] = _addresses_of(of_tokens), 0
        number = 0
        for table, places in tokens.items():
            for first in range(0, len(places), TILE):
                part = places[first : first + TILE]
                tables[number] = table
                tiles[number, : len(part)], tiles[number, len(part) :] = part, -1
                number += 1
        tables[number:] = 0
        self._ring.send(self._sent, self._ring.size)


def _number(layer: int, site: AdapterSite) -> int:
    return layer * len(_NUMBERS) + _NUMBERS[site]


def _addresses_of(adapters: Sequence[DeviceAdapter | None]) -> list[int]:
    """Of their tables; 0 without one."""
    return [0 if adapter is None else adapter.table.data_ptr() for adapter in adapters]
