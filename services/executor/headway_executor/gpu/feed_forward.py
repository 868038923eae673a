"""What stands between attention and the next layer: two products and an activation, for all tokens or by experts.

Owns: their launches and their memory. Must not know: the layer's own norms, files.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headway_executor.gpu.activations import activation_of, gate_of
from headway_executor.gpu.linear import AdaptedLinear, CodedLinear, DenseLinear, DeviceExperts, DeviceLinear
from headway_executor.gpu.norm import DeviceNorm
from headway_executor.gpu.stage_mates import BackToHidden
from headway_executor.models.config import ExpertsConfig, FeedForwardConfig
from headway_executor.models.part import ModelPart
from headway_executor.ranks.stage_mates import Cut
from headway_kernels.gpu.activation import Gate
from headway_kernels.gpu.experts.grouped import ExpertPairs, add_pairs, choose, sort_pairs, weigh_pairs


class DeviceFeedForward(Protocol):
    """``[tokens, hidden] -> [tokens, hidden]``."""

    def __call__(self, inputs: Tensor, slots: Tensor, out: Tensor) -> None:
        """Launch; allocates nothing. ``slots`` int32, ``[tokens]``: -1 for padding."""
        ...


class FeedForwardSpace:
    """Memory for what is between the products, shared by layers one after the other."""

    def __init__(
        self, num_tokens: int, width: int, *, is_gated: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.up = torch.empty(num_tokens, width * (2 if is_gated else 1), dtype=dtype, device=device)
        self.inner = torch.empty(num_tokens, width, dtype=dtype, device=device)


class DenseFeedForward:
    """All tokens go through ``gate_up``, which gives gates and ups, or only ups, and ``down``. ``curve``: of "xielu"."""

    def __init__(
        self,
        gate_up: DeviceLinear,
        feed: FeedForwardConfig,
        down: DeviceLinear,
        space: FeedForwardSpace,
        curve: Tensor | None = None,
    ) -> None:
        self._gate_up = gate_up
        self._activate = activation_of(feed, curve)
        self._gate = gate_of(feed)
        self._together: DenseLinear | CodedLinear | AdaptedLinear | None = None
        if isinstance(gate_up, (DenseLinear, CodedLinear, AdaptedLinear)) and self._gate is not Gate.NONE:
            self._together = gate_up
        self._down = down
        self._space = space

    def __call__(self, inputs: Tensor, slots: Tensor, out: Tensor) -> None:  # noqa: ARG002 - padding costs little
        """See ``DeviceFeedForward``."""
        self.of_all(inputs, out)

    def of_all(self, inputs: Tensor, out: Tensor) -> None:
        """A ``DeviceLinear``, but for the activation."""
        up, inner = self._space.up[: len(inputs)], self._space.inner[: len(inputs)]
        if self._together is None or not self._together.few(inputs, inner, self._gate):
            self._gate_up(inputs, up)
            self._activate(up, inner)
        self._down(inner, out)


class ExpertSpace:
    """Memory for what the layers of one description compute, one after the other; of a ``part``, its own columns."""

    def __init__(
        self,
        num_tokens: int,
        hidden: int,
        feed: FeedForwardConfig,
        part: ModelPart,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert feed.experts is not None
        routing, inner = feed.experts.routing, len(part.own_inner(feed.intermediate_size))
        up = inner * (2 if feed.is_gated else 1)
        num_pairs = num_tokens * routing.num_chosen
        self.pairs = ExpertPairs.allocate(num_tokens, routing, device)
        self.scores = torch.empty(num_tokens, scores_of(feed.experts), dtype=dtype, device=device)
        # The first product's results are done with when the second writes its own.
        width = feed.experts.latent_size or len(part.own_hidden)
        wide = torch.empty(num_pairs * max(up, width), dtype=dtype, device=device)
        self.gate_up = wide[: num_pairs * up].view(num_pairs, up)
        self.given = wide[: num_pairs * width].view(num_pairs, width)
        self.inner = torch.empty(num_pairs, inner, dtype=dtype, device=device)
        self.gathered = self.inner
        """As ``inner``, with the columns of all ranks."""
        if not part.is_whole_stage:
            self.gathered = torch.empty(num_pairs, feed.intermediate_size, dtype=dtype, device=device)
        self.shared = torch.empty(num_tokens, hidden, dtype=dtype, device=device) if feed.experts.shared_size else None
        self.normed = torch.empty(num_tokens, hidden, dtype=dtype, device=device) if feed.experts.names.norms else None
        self.latent = torch.empty(num_tokens, width, dtype=dtype, device=device) if feed.experts.latent_size else None


def scores_of(config: ExpertsConfig) -> int:
    """Columns of a router's results: of each expert, and behind them the gate of the shared one."""
    return config.routing.num_experts + config.has_shared_gate


class PartNorms(NamedTuple):
    """Norms of what each part reads, and of what experts and the shared one give."""

    router: DeviceNorm
    experts: DeviceNorm
    experts_post: DeviceNorm
    shared: DeviceNorm
    shared_post: DeviceNorm


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """``router`` gives ``scores_of``; ``gate_up`` and ``down`` are of all experts.

    ``correction`` and ``factors`` float32, ``[experts]``, or None; see ``choose``. All tokens go through ``shared``, if any. With
    ``norms``, each part normalises the hidden state by itself; there is a shared expert then. Experts read what ``compress``
    gives, and ``expand`` takes their sum; both or neither are None.
    """

    router: DeviceLinear
    correction: Tensor | None
    gate_up: DeviceExperts
    down: DeviceExperts
    shared: DenseFeedForward | None
    factors: Tensor | None = None
    norms: PartNorms | None = None
    compress: DeviceLinear | None = None
    expand: DeviceLinear | None = None


class ExpertFeedForward:
    """Each token goes through the experts that its router chooses; padding goes through none. ``to_hidden``: of a layer that
    several ranks compute together, or None.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        feed: FeedForwardConfig,
        space: ExpertSpace,
        to_hidden: BackToHidden | None,
        inner: Cut,
    ) -> None:
        assert feed.experts is not None
        assert to_hidden is None or not (weights.norms or weights.compress), "no rank computes a part of such layers"
        self._to_hidden = to_hidden
        self._inner = inner
        assert not (feed.has_bias and feed.experts.routing.weighs_inputs)
        self._weights = weights
        self._routing = feed.experts.routing
        self._has_gate = feed.experts.has_shared_gate
        assert not (self._has_gate and (weights.norms or weights.compress)), "no such model has a gate"
        self._activate = activation_of(feed)
        self._space = space

    def __call__(self, inputs: Tensor, slots: Tensor, out: Tensor) -> None:
        """See ``DeviceFeedForward``."""
        scores, pairs = self._space.scores[: len(inputs)], self._space.pairs.of(len(inputs))
        weights, norms = self._weights, self._weights.norms
        weights.router(self._normed(inputs, norms and norms.router), scores)
        choose(scores, slots, weights.correction, pairs, self._routing, weights.factors)
        sort_pairs(pairs)
        given = self._through_experts(self._normed(inputs, norms and norms.experts), pairs)
        shared = self._through_shared(self._normed(inputs, norms and norms.shared), slots)
        self._add(given, pairs, shared, scores[:, -1] if self._has_gate else None, out)

    def _through_experts(self, inputs: Tensor, pairs: ExpertPairs) -> Tensor:
        """What each pair of a token and an expert gives."""
        space, weights, num_pairs = self._space, self._weights, len(pairs.order)
        gate_up, inner, given = space.gate_up[:num_pairs], space.inner[:num_pairs], space.given[:num_pairs]
        if weights.compress is not None and space.latent is not None:
            compressed = space.latent[: len(inputs)]
            weights.compress(inputs, compressed)
            inputs = compressed
        weights.gate_up(inputs, gate_up, pairs, gathers=True)
        if self._routing.weighs_inputs:
            # The product of a weighed input is the weighed product: no such model has biases here.
            weigh_pairs(gate_up, pairs)
        self._activate(gate_up, inner)
        gathered = space.gathered[:num_pairs]
        if self._to_hidden is not None:
            self._to_hidden.mates.gather(inner, self._inner, gathered)
        weights.down(gathered, given, pairs, gathers=False)
        return given

    def _through_shared(self, inputs: Tensor, slots: Tensor) -> Tensor | None:
        if self._weights.shared is None or self._space.shared is None:
            return None
        shared = self._space.shared[: len(inputs)]
        self._weights.shared(inputs, slots, shared)
        return shared

    def _add(self, given: Tensor, pairs: ExpertPairs, shared: Tensor | None, gates: Tensor | None, out: Tensor) -> None:
        """The sum of all that a token gets, to ``out``."""
        norms, expand, latent = self._weights.norms, self._weights.expand, self._space.latent
        weighs = not self._routing.weighs_inputs
        if self._to_hidden is not None:
            own, sums = self._to_hidden.own, self._to_hidden.made[: len(out)]
            shared = None if shared is None else shared[:, own.start : own.stop]
            add_pairs(given, pairs, sums, shared=shared, gates=gates, weighs=weighs)
            self._to_hidden.mates.gather(sums, self._to_hidden.hidden, out)
            return
        if norms is None and expand is None:
            add_pairs(given, pairs, out, shared=shared, gates=gates, weighs=weighs)
            return
        # What is shared is added behind norms, or an expansion.
        sums = out if latent is None else latent[: len(out)]
        add_pairs(given, pairs, sums, shared=None, gates=None, weighs=weighs)
        if expand is not None:
            expand(sums, out)
        if norms is not None and shared is not None:
            norms.experts_post(out, None, out)
            norms.shared_post(shared, None, shared)
        if shared is not None:
            out.add_(shared)

    def _normed(self, inputs: Tensor, norm: DeviceNorm | None) -> Tensor:
        """What one part reads, until the next reads something else."""
        if norm is None or self._space.normed is None:
            return inputs
        normed = self._space.normed[: len(inputs)]
        norm(inputs, None, normed)
        return normed
