"""From a layer's tensors to its feed-forward on a device.

Owns: which tensors a feed-forward is made of. Must not know: what else a layer has, how weights become codes.
"""

from functools import cache, partial

import msgspec
import torch
from torch import Tensor

from headway_executor.gpu.feed_forward import (
    DenseFeedForward,
    DeviceFeedForward,
    ExpertFeedForward,
    ExpertSpace,
    ExpertWeights,
    FeedForwardSpace,
    PartNorms,
)
from headway_executor.gpu.loaded_parts import LoadedParts
from headway_executor.models.adapters import AdapterSite
from headway_executor.models.config import ExpertsConfig, FeedForwardConfig
from headway_executor.models.expert_tensors import NormsOfExperts
from headway_executor.models.loading import ModelTensors, NormTensors


class FeedForwardLoader:
    """``space`` gives the memory of a width, with or without gates, which layers share."""

    def __init__(self, parts: LoadedParts) -> None:
        self._parts = parts
        tokens, dtype, device = parts.max_num_tokens, parts.dtype, parts.device
        # Layers that are alike share memory.
        self._expert_space = cache(
            lambda feed: ExpertSpace(tokens, parts.config.hidden_size, feed, parts.part, dtype, device)
        )
        self.space = cache(
            lambda width, is_gated: FeedForwardSpace(tokens, width, is_gated=is_gated, dtype=dtype, device=device)
        )

    def load(self, index: int, feed: FeedForwardConfig) -> DeviceFeedForward:
        """Of the layer with this number, as ``feed`` says."""
        if feed.experts is not None:
            return self._experts(index, feed, feed.experts)
        curve, part = self._parts.tensors.curve(index), self._parts.part
        down = self._parts.back(
            index, AdapterSite.DOWN, lambda read: read.down(index), part.inner(feed.intermediate_size)
        )
        return DenseFeedForward(
            self._parts.projection(index, AdapterSite.GATE_UP, lambda read: read.gate_up(index)),
            feed,
            self._parts.behind(index, self._parts.config.names.down_norm, down),
            self.space(len(part.own_inner(feed.intermediate_size)), feed.is_gated),
            None if curve is None else self._parts.wide(curve),
        )

    def _experts(self, index: int, feed: FeedForwardConfig, config: ExpertsConfig) -> ExpertFeedForward:
        tensors, part = self._parts.tensors.experts(index), self._parts.part
        (router, bias), gate, correction = tensors.router(), tensors.shared_gate(), tensors.correction()
        if gate is not None:
            router = torch.cat([router, gate])
            bias = None if bias is None else torch.nn.functional.pad(bias, (0, 1))
        routing, norms = config.routing, tensors.norms()
        numbers = range(routing.num_experts)
        gate_up, down = (
            self._parts.weights.of_experts(
                [partial(read, index, number) for number in numbers], rows_per_token, routing
            )
            for read, rows_per_token in ((_gate_up, 1), (_down, routing.num_chosen))
        )
        shared = None
        if config.shared_size:
            shared = DenseFeedForward(
                self._parts.projection(index, AdapterSite.SHARED_GATE_UP, partial(_gate_up, index, None)),
                msgspec.structs.replace(feed, limit=config.shared_limit),
                self._parts.back(
                    index, AdapterSite.SHARED_DOWN, partial(_down, index, None), part.inner(config.shared_size)
                ),
                self.space(len(part.own_inner(config.shared_size)), feed.is_gated),
            )
        sites = (AdapterSite.EXPERTS_IN, AdapterSite.EXPERTS_OUT)
        around = {
            name: self._parts.adapted(self._parts.weights.product(weight, None), index, site)
            for name, weight, site in zip(("compress", "expand"), tensors.latent() or (), sites, strict=False)
        }
        scores = self._parts.weights.product(router, bias, is_exact=True)
        if gate is not None:
            scores = self._parts.adapted(scores, index, AdapterSite.SHARED_GATE, slice(routing.num_experts, None))
        weights = ExpertWeights(
            router=self._parts.adapted(scores, index, AdapterSite.ROUTER, slice(routing.num_experts)),
            correction=None if correction is None else self._parts.wide(correction),
            gate_up=self._parts.adapted_experts(gate_up, index, AdapterSite.EXPERT_GATE_UP),
            down=self._parts.adapted_experts(down, index, AdapterSite.EXPERT_DOWN),
            shared=shared,
            factors=None if norms is None else self._parts.wide(norms.weights),
            norms=None if norms is None else self._part_norms(norms),
            **around,
        )
        inner = part.inner(feed.intermediate_size)
        return ExpertFeedForward(weights, feed, self._expert_space(feed), self._parts.to_hidden, inner)

    def _part_norms(self, norms: NormsOfExperts) -> PartNorms:
        weights = (norms.router, norms.experts, norms.experts_post, norms.shared, norms.shared_post)
        return PartNorms(*(self._parts.norm(NormTensors(weight, None)) for weight in weights))


def _gate_up(index: int, number: int | None, read: ModelTensors) -> tuple[Tensor, Tensor | None]:
    return read.experts(index).gate_up(number)


def _down(index: int, number: int | None, read: ModelTensors) -> tuple[Tensor, Tensor | None]:
    return read.experts(index).down(number)
