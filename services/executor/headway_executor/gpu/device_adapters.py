"""The adapters of a step on a device: which token has which, in memory that recorded steps read.

Owns: this memory, and the tables of an adapter's matrices. Must not know: files, who loads adapters, graphs.

Steps of up to ``most_tokens`` tokens have two launches for each projection, whatever adapters they have, and allocate
nothing. Larger ones compute adapter after adapter, by torch's library.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_executor.gpu.runtime import Runtime, UploadRing
from headway_executor.models.adapted import StepAdapters
from headway_executor.models.adapter_files import MAX_RANK
from headway_executor.models.adapters import AdapterSite, AdapterWeights, LowRank, ModelAdapters
from headway_executor.models.config import ModelConfig
from headway_kernels.gpu.low_rank import ENTRY, TILE, add_low_rank, most_tiles, workspace_size

_PARTS = {AdapterSite.QKV: 3, AdapterSite.OUTPUT: 1, AdapterSite.GATE_UP: 2, AdapterSite.DOWN: 1}
"""Projections of a site, each with a rank of its own."""
_NUMBERS = {site: number for number, site in enumerate(_PARTS)}


class DeviceAdapter(NamedTuple):
    """``layers``: see ``AdapterWeights``. ``table``: of all sites of all layers, see ``low_rank``."""

    layers: tuple[Mapping[AdapterSite, LowRank], ...]
    table: Tensor


def with_table(weights: AdapterWeights) -> DeviceAdapter:
    """The same, with the addresses of its matrices, which stay where they are."""
    entries = np.zeros((len(weights.layers), len(_NUMBERS), ENTRY), dtype=np.int64)
    device = torch.device("cpu")
    for layer, sites in zip(entries, weights.layers, strict=True):
        for site, added in sites.items():
            device = added.down.device
            layer[_NUMBERS[site]] = added.down.data_ptr(), added.up.data_ptr(), len(added.down)
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
        # Addresses first, which have eight bytes.
        self._ring = UploadRing(runtime, (2 + TILE) * self._num_tiles)
        self._tiles = torch.zeros(self._ring.size, dtype=torch.int32, device=runtime.device)
        self._tables = self._tiles[: 2 * self._num_tiles].view(torch.int64)
        self._tokens = self._tiles[2 * self._num_tiles :].view(self._num_tiles, TILE)
        inner = max(layer.feed_forward.intermediate_size for layer in config.layers)
        widths = {AdapterSite.QKV: config.hidden_size, AdapterSite.OUTPUT: config.num_heads * config.head_dim}
        widths |= {AdapterSite.GATE_UP: config.hidden_size, AdapterSite.DOWN: inner}
        sizes = [workspace_size(most_tokens, width, _PARTS[site] * MAX_RANK) for site, width in widths.items()]
        self._workspace = torch.empty(max(sizes), dtype=torch.float32, device=runtime.device)

    def begin(self, token_rows: NDArray[np.integer], num_tokens: int) -> None:
        """A step begins, on the current stream; ``token_rows``: the row of each token; it is padded to ``num_tokens``."""
        if num_tokens > self.most_tokens:
            self._large.begin(token_rows, self._runtime.device)
            self.are_any = self._large.are_any
            return
        of_tokens = self.adapters.of_rows(token_rows)
        self.are_any = of_tokens is not None
        if of_tokens is not None:
            self._send(of_tokens)

    def clear(self) -> None:
        """Give no token an adapter."""
        self._tables.zero_()

    def add(self, layer: int, site: AdapterSite, inputs: Tensor, outputs: Tensor) -> None:
        """Add to ``outputs`` what each token's adapter makes of ``inputs``, computed in float32."""
        if len(inputs) > self.most_tokens:
            self._large.add(layer, site, inputs, outputs)
            return
        num_tiles = most_tiles(len(inputs), self._max_num_rows)
        number = layer * len(_NUMBERS) + _NUMBERS[site]
        rank = _PARTS[site] * MAX_RANK
        tables, tokens = self._tables[:num_tiles], self._tokens[:num_tiles]
        add_low_rank(inputs, outputs, tables, tokens, self._workspace, site=number, most_rank=rank)

    def _send(self, of_tokens: list[DeviceAdapter | None]) -> None:
        tokens: dict[int, list[int]] = {}
        for place, adapter in enumerate(of_tokens):
            if adapter is not None:
                tokens.setdefault(adapter.table.data_ptr(), []).append(place)
        slot = self._ring.next_slot()
        tables = slot[: 2 * self._num_tiles].view(np.int64)
        tiles = slot[2 * self._num_tiles :].reshape(self._num_tiles, TILE)
        number = 0
        for table, places in tokens.items():
            for first in range(0, len(places), TILE):
                part = places[first : first + TILE]
                tables[number] = table
                tiles[number, : len(part)], tiles[number, len(part) :] = part, -1
                number += 1
        tables[number:] = 0
        self._ring.send(self._tiles, self._ring.size)
