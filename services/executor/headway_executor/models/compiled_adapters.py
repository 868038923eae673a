"""Adapters in the form of the CPU kernels.

Owns: what a projection's form makes of the additions to it. Must not know: files, rows, how the kernels compute.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from headway_executor.models.adapters import AdapterSite, AdapterWeights, LowRank, ModelAdapters
from headway_executor.models.compiled_weights import ACTIVATIONS, with_padded_heads
from headway_executor.models.config import ExpertsConfig, FeedForwardConfig, ModelConfig
from headway_executor.models.latent_tensors import with_values_as_wide
from headway_executor.models.part import ModelPart
from headway_executor.models.rope import halves
from headway_kernels.cpu.adapters import (
    LowRankUpdate,
    PackedAdapter,
    Site,
    expert_down,
    expert_gate_up,
    latent_absorb,
    latent_values,
)
from headway_kernels.cpu.experts import padded_columns
from headway_kernels.cpu.feed_forward import activates_in_product
from headway_kernels.cpu.library import CpuLibrary, rounded

_PLAIN = {
    AdapterSite.LATENT_GATES: Site.GATES,
    AdapterSite.STATE_INPUTS: Site.STATE_INPUTS,
    AdapterSite.STATE_SELECTION: Site.STATE_SELECTION,
    AdapterSite.STATE_STEPS: Site.STATE_STEPS,
    AdapterSite.STATE_GATES: Site.STATE_GATES,
    AdapterSite.STATE_OUTPUT: Site.STATE_OUTPUT,
    AdapterSite.DOWN: Site.DOWN,
}


def adapters_for(library: CpuLibrary, config: ModelConfig, part: ModelPart, dtype: torch.dtype) -> ModelAdapters:
    """The adapters of a part that the kernels run, held in ``dtype``, float32 or bfloat16."""
    num_experts = max(_experts_with_shared(config.layers[index].feed_forward) for index in part.layers)
    layers = [_Layer(library, config, part, index, num_experts) for index in part.layers]
    latent_heads = 0 if config.attention.latent is None else len(part.heads)

    def packed(weights: AdapterWeights) -> PackedAdapter:
        updates = [dict(layer.updates(added)) for layer, added in zip(layers, weights.layers, strict=True)]
        return PackedAdapter(library, updates, dtype, num_experts, latent_heads)

    return ModelAdapters(config, halves, part, prepare=packed)


class _Layer:
    """The forms of one layer's projections."""

    def __init__(
        self, library: CpuLibrary, config: ModelConfig, part: ModelPart, index: int, most_experts: int
    ) -> None:
        self._most_experts = most_experts
        self._head_dim = config.attention_of(index).head_dim
        self._padding = library.padded_head_dim(self._head_dim) - self._head_dim
        self._panel = library.panel
        self._latent = config.attention.latent
        self._part = part
        self._feed = config.layers[index].feed_forward
        self._is_gated_in_product = activates_in_product(
            ACTIVATIONS[self._feed.activation], is_gated=self._feed.is_gated
        )

    def updates(self, added: Mapping[AdapterSite, LowRank]) -> Iterator[tuple[int, LowRankUpdate]]:
        """By product."""
        for site, (down, up) in added.items():
            if site in (AdapterSite.QKV, AdapterSite.LATENT_QUERY):
                yield Site.QKV, _plain(down, self._padded(up))
            elif site == AdapterSite.LATENT_KEYS:
                yield from ((latent_absorb(self._most_experts, head), _plain(own, up)) for head, own in enumerate(down))
            elif site == AdapterSite.LATENT_VALUES:
                yield from ((latent_values(self._most_experts, head), _plain(down, own)) for head, own in enumerate(up))
            elif site == AdapterSite.OUTPUT:
                yield Site.OUTPUT, _plain(self._attended(down), up)
            elif site == AdapterSite.GATE_UP:
                yield Site.GATE_UP, LowRankUpdate(down, up, gated=self._is_gated_in_product)
            elif site in _PLAIN:
                yield _PLAIN[site], _plain(down, up)
        if self._latent is not None:
            compress = _of_parts(
                (added.get(AdapterSite.LATENT_QUERY_IN), self._latent.query_rank or 0),
                (added.get(AdapterSite.LATENT_IN), self._latent.rank + self._latent.rotary_dim),
            )
            yield from () if compress is None else ((Site.COMPRESS, compress),)
        if self._feed.experts is not None:
            yield from self._of_experts(self._feed.experts, added)

    def _attended(self, down: Tensor) -> Tensor:
        """Of the projection behind attention."""
        if self._latent is None:
            return self._padded(down.t()).t()
        return with_values_as_wide(self._latent, down, rounded(self._latent.value_dim, self._panel))

    def _of_experts(
        self, config: ExpertsConfig, added: Mapping[AdapterSite, LowRank]
    ) -> Iterator[tuple[int, LowRankUpdate]]:
        count = config.routing.num_experts
        router = _of_parts((added.get(AdapterSite.ROUTER), count), (added.get(AdapterSite.SHARED_GATE), 1))
        yield from () if router is None else ((Site.ROUTER, router),)
        for number in range(count):
            of_expert = (
                _of_one(added.get(site), number) for site in (AdapterSite.EXPERT_GATE_UP, AdapterSite.EXPERT_DOWN)
            )
            yield from self._of_expert(number, self._feed.intermediate_size, *of_expert)
        of_shared = (added.get(site) for site in (AdapterSite.SHARED_GATE_UP, AdapterSite.SHARED_DOWN))
        yield from self._of_expert(count, config.shared_size, *of_shared)

    def _of_expert(
        self, number: int, size: int, gate_up: LowRank | None, down: LowRank | None
    ) -> Iterator[tuple[int, LowRankUpdate]]:
        """``size``: its inner columns; see ``packed_expert``."""
        if gate_up is not None:
            own = self._part.of_expert(size)[self._part.place.tensor_rank]
            wide = padded_columns(gate_up.up, len(own), is_gated=self._feed.is_gated)
            yield expert_gate_up(number), LowRankUpdate(gate_up.down, wide, gated=self._is_gated_in_product)
        if down is not None:
            wide = functional.pad(down.down, (0, rounded(size, self._panel) - size))
            yield expert_down(number), _plain(wide, down.up)

    def _padded(self, heads: Tensor) -> Tensor:
        return with_padded_heads(heads, self._head_dim, self._padding)


def _experts_with_shared(feed: FeedForwardConfig) -> int:
    """How many a layer has, the shared one included."""
    return 0 if feed.experts is None else feed.experts.routing.num_experts + bool(feed.experts.shared_size)


def _plain(down: Tensor, up: Tensor) -> LowRankUpdate:
    return LowRankUpdate(down, up, gated=False)


def _of_one(stacked: LowRank | None, number: int) -> LowRank | None:
    """Of one of all experts, without the ranks that only others have: each rank of an executor finds the same."""
    if stacked is None:
        return None
    down, up = stacked.down[number], stacked.up[number]
    ranks = down.any(1)
    return LowRank(down[ranks], up[:, ranks]) if ranks.any() else None


def _of_parts(*parts: tuple[LowRank | None, int]) -> LowRankUpdate | None:
    """Of parts of one product, each with its number of outputs and ranks of its own."""
    some = [added for added, _ in parts if added is not None]
    if not some:
        return None
    ranks = sum(len(added.down) for added in some)
    ups, start = [], 0
    for added, outputs in parts:
        up = added.up if added is not None else some[0].up.new_zeros(outputs, 0)
        ups.append(functional.pad(up, (start, ranks - start - up.shape[1])))
        start += up.shape[1]
    return _plain(torch.cat([added.down for added in some]), torch.cat(ups))
