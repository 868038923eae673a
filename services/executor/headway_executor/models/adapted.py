"""Projections with adapters, as plain torch operators.

Owns: the additions of the rows that run, adapter after adapter. Must not know: files, who loads adapters.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_executor.models.adapters import AdapterSite, AdapterWeights, LowRank, ModelAdapters
from headway_executor.models.decoder import Product


class _Group(NamedTuple):
    """The tokens, int64, ``[n]``, whose rows run with one adapter."""

    adapter: AdapterWeights
    tokens: Tensor


class StepAdapters:
    """The adapters of the step that runs. ``are_any``: something may be added behind each product."""

    def __init__(self, adapters: ModelAdapters) -> None:
        self.adapters = adapters
        self.are_any = False
        self.groups: list[_Group] = []
        self._of_experts: list[list[Tensor]] = []

    def begin(self, token_rows: NDArray[np.integer], device: torch.device) -> None:
        """A step begins; ``token_rows``: the row of each token."""
        self.groups = []
        of_tokens = self.adapters.of_rows(token_rows)
        self.are_any = of_tokens is not None
        if of_tokens is None:
            return
        tokens: dict[int, tuple[AdapterWeights, list[int]]] = {}
        for place, adapter in enumerate(of_tokens):
            if adapter is not None:
                tokens.setdefault(id(adapter), (adapter, []))[1].append(place)
        is_cuda = device.type == "cuda"
        self.groups = [
            # Pinned: the host does not wait for what the device does.
            _Group(adapter, torch.tensor(places, pin_memory=is_cuda).to(device, non_blocking=is_cuda))
            for adapter, places in tokens.values()
        ]

    def begin_experts(self, tokens: Tensor, counts: list[int]) -> None:
        """The experts of a layer begin; ``tokens``: the token of each of their rows, ``counts`` rows of each expert."""
        self._of_experts = [
            [mine.nonzero().flatten() for mine in torch.split(torch.isin(tokens, group.tokens), counts)]
            for group in self.groups
        ]

    def add(self, layer: int, site: AdapterSite, inputs: Tensor, outputs: Tensor) -> None:
        """Add to ``outputs`` what each row's adapter makes of ``inputs``, computed in float32."""
        for adapter, tokens in self.groups:
            added = adapter.layers[layer].get(site)
            if added is not None:
                _add(added, tokens, inputs, outputs)

    def add_of_heads(self, layer: int, site: AdapterSite, inputs: Tensor, outputs: Tensor) -> None:
        """As ``add``, of products of heads, ``[tokens, heads, ...]``, where one matrix of an addition is of each head."""
        for adapter, tokens in self.groups:
            added = adapter.layers[layer].get(site)
            if added is not None:
                # Batches of heads; what all share is one of them.
                own = inputs.index_select(0, tokens).float().transpose(0, 1)
                made = own @ added.down.mT @ added.up.mT
                outputs.index_add_(0, tokens, made.transpose(0, 1).to(outputs.dtype))

    def add_of_expert(self, number: int, layer: int, site: AdapterSite, inputs: Tensor, outputs: Tensor) -> None:
        """As ``add``, of one expert with its rows."""
        for (adapter, _), rows in zip(self.groups, self._of_experts, strict=True):
            added = adapter.layers[layer].get(site)
            if added is not None and len(rows[number]):
                _add(LowRank(added.down[number], added.up[number]), rows[number], inputs, outputs)


def _add(added: LowRank, rows: Tensor, inputs: Tensor, outputs: Tensor) -> None:
    own = inputs.index_select(0, rows).float()
    outputs.index_add_(0, rows, (own @ added.down.t() @ added.up.t()).to(outputs.dtype))


class AdaptedProduct:
    """A ``Product``, and what each row's adapter adds to it at a ``site`` of a layer; with a ``number``, of an expert."""

    def __init__(
        self, product: Product, step: StepAdapters, layer: int, site: AdapterSite, number: int | None = None
    ) -> None:
        self._product = product
        self._add = step.add if number is None else partial(step.add_of_expert, number)
        self._layer = layer
        self._site = site

    def __call__(self, inputs: Tensor) -> Tensor:
        """See ``Product``."""
        outputs = self._product(inputs)
        self._add(self._layer, self._site, inputs, outputs)
        return outputs


class AdaptedHeads:
    """Products of heads of latent attention, and what each row's adapter adds; see ``StepAdapters.add_of_heads``."""

    def __init__(self, product: Product, step: StepAdapters, layer: int, site: AdapterSite) -> None:
        self._product = product
        self._add = partial(step.add_of_heads, layer, site)

    def __call__(self, inputs: Tensor) -> Tensor:
        """``[tokens, heads, in] -> [tokens, heads, out]``."""
        outputs = self._product(inputs)
        self._add(inputs, outputs)
        return outputs
