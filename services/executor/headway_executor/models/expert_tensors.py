"""The tensors of experts in the model's form, or one rank's part of each.

Owns: their names, experts that lie in one tensor. Must not know: files, the rest of a layer.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headway_executor.models.config import ExpertsConfig, FeedForwardConfig
from headway_executor.models.part import ModelPart
from headway_executor.models.tensor_names import ExpertNames
from headway_kernels.experts import Expert

Shapes = Iterator[tuple[str, tuple[int, ...]]]

_EACH_MATRIX = frozenset({"matrices", "apart"})
"""Ways in which gates, ups and ways back have a tensor each."""


def expert_shapes(config: ExpertsConfig, feed: FeedForwardConfig, hidden: int) -> Shapes:
    """Names behind a layer's prefix, and shapes."""
    names, count = config.names, config.routing.num_experts
    yield f"{names.router}.weight", (hidden, count) if config.has_turned_router else (count, hidden)
    if config.has_router_bias:
        yield f"{names.router}.bias", (count,)
    if names.correction is not None:
        yield names.correction, (config.correction_rows, count) if config.correction_rows else (count,)
    if names.norms is not None:
        for name in (names.norms.experts, names.norms.experts_post, names.norms.shared, names.norms.shared_post):
            yield f"{name}.weight", (hidden,)
        yield names.norms.router, (hidden,)
        yield names.norms.weights, (count,)
    if config.latent_size:
        before, behind = names.latent
        yield f"{before}.weight", (config.latent_size, hidden)
        yield f"{behind}.weight", (hidden, config.latent_size)
    width = config.latent_size or hidden
    if config.stack is None:
        for number in range(count):
            yield from _feed_forward(
                names.expert.format(number), names.gate_up, names.down, width, feed.intermediate_size, feed.is_gated
            )
    else:
        yield from _stacks(config, feed, width)
    if config.shared_size:
        yield from _feed_forward(
            names.shared, names.shared_gate_up, names.shared_down, hidden, config.shared_size, feed.is_gated
        )
    if names.shared_gate is not None:
        yield f"{names.shared_gate}.weight", (1, hidden)


def stacked_names(names: ExpertNames) -> tuple[str, ...]:
    """Of the tensors that hold all experts: gates and ups, or both apart, and the way back."""
    prefix = names.expert.removesuffix("{}.")
    return names.stacks or (f"{prefix}gate_up_proj", f"{prefix}down_proj")


def _stacks(config: ExpertsConfig, feed: FeedForwardConfig, hidden: int) -> Shapes:
    count, inner, is_turned = config.routing.num_experts, feed.intermediate_size, config.stack != "rows"
    if config.stack == "matrices":
        yield from ((name, (count * inner, hidden)) for name in stacked_names(config.names))
        return
    if config.stack == "apart":
        *ways, back = stacked_names(config.names)
        yield from ((name, (count, inner, hidden)) for name in ways)
        yield back, (count, hidden, inner)
        return
    gate_up, down = stacked_names(config.names)
    yield gate_up, (count, hidden, 2 * inner) if is_turned else (count, 2 * inner, hidden)
    yield down, (count, inner, hidden) if is_turned else (count, hidden, inner)
    if feed.has_bias:
        yield f"{gate_up}_bias", (count, 2 * inner)
        yield f"{down}_bias", (count, hidden)


def _feed_forward(prefix: str, gate_up: Sequence[str], down: str, hidden: int, inner: int, is_gated: bool) -> Shapes:
    """Gates and ups may be in one tensor; without a gate there are ups alone."""
    for name in gate_up:
        yield f"{prefix}{name}.weight", ((2 if is_gated else 1) * inner // len(gate_up), hidden)
    yield f"{prefix}{down}.weight", (hidden, inner)


class Reading(Protocol):
    """Reads a tensor of a layer, by the name behind its prefix, or some of its rows and of its last dimension."""

    def __call__(self, name: str, rows: range | None = None, columns: range | None = None) -> Tensor: ...  # noqa: D102


class NormsOfExperts(NamedTuple):
    """Weights of norms, ``[hidden]``, and factors on the weight of each expert, ``[experts]``."""

    router: Tensor
    weights: Tensor
    experts: Tensor
    experts_post: Tensor
    shared: Tensor
    shared_post: Tensor


class ExpertTensors:
    """Those of one layer. A rank of several has its columns of each expert, and the whole router."""

    def __init__(self, config: ExpertsConfig, feed: FeedForwardConfig, part: ModelPart, read: Reading) -> None:
        self._config = config
        self._size, self._has_bias, self._is_gated = feed.intermediate_size, feed.has_bias, feed.is_gated
        self._names = config.names
        self._stacks = stacked_names(config.names)
        self._gate_up, self._down = self._stacks[0], self._stacks[-1]
        self._part = part
        self._read = read

    def router(self) -> tuple[Tensor, Tensor | None]:
        """``[experts, hidden]``, and bias."""
        name = self._names.router
        weight = self._read(f"{name}.weight")
        weight = weight.t().contiguous() if self._config.has_turned_router else weight
        return weight, self._read(f"{name}.bias") if self._config.has_router_bias else None

    def correction(self) -> Tensor | None:
        """``[experts]``, or None."""
        if self._names.correction is None:
            return None
        return self._read(self._names.correction).flatten()[: self._config.routing.num_experts]

    def norms(self) -> NormsOfExperts | None:
        """See ``ExpertNorms``; or None."""
        names = self._names.norms
        if names is None:
            return None
        around = (names.experts, names.experts_post, names.shared, names.shared_post)
        scales = self._read(names.router)
        return NormsOfExperts(
            scales.float() * scales.shape[0] ** -0.5,
            self._read(names.weights),
            *(self._read(f"{name}.weight") for name in around),
        )

    def expert(self, number: int) -> Expert:
        """One of those that are chosen."""
        return self._expert(number)

    def shared(self) -> Expert | None:
        """The one that all tokens go through."""
        return self._expert(None) if self._config.shared_size else None

    def latent(self) -> tuple[Tensor, Tensor] | None:
        """``[latent_size, hidden]`` and ``[hidden, latent_size]``, or None."""
        if not self._config.latent_size:
            return None
        before, behind = (self._read(f"{name}.weight") for name in self._names.latent)
        return before, behind

    def shared_gate(self) -> Tensor | None:
        """``[1, hidden]``, or None. The sigmoid of 0 is a half."""
        if self._config.halves_shared:
            return torch.zeros_like(self.router()[0][:1])
        return None if self._names.shared_gate is None else self._read(f"{self._names.shared_gate}.weight")

    def gate_up(self, number: int | None) -> tuple[Tensor, Tensor | None]:
        """``[2 * inner, hidden]``, gates first, and bias, of one expert; None: of the shared one. Not gated: ``[inner, hidden]``."""
        inner, _ = self._own(number)
        if self._config.stack in _EACH_MATRIX and number is not None:
            return torch.cat([self._of_one(name, number, inner) for name in self._stacks[:-1]]), None
        if self._config.stack == "pairs" and number is not None:
            pairs = None if inner is None else range(2 * inner.start, 2 * inner.stop)
            bias = self._stacked_bias(self._gate_up, number, pairs)
            weight = _gates_first(self._stacked(self._gate_up, number, pairs))
            return weight, None if bias is None else _gates_first(bias)
        if self._config.stack is not None and number is not None:
            if inner is None:
                return self._stacked(self._gate_up, number), None
            ups = range(self._size + inner.start, self._size + inner.stop)
            return torch.cat([self._stacked(self._gate_up, number, own) for own in (inner, ups)]), None
        names = self._names.gate_up if number is not None else self._names.shared_gate_up
        if len(names) == 1 and self._is_gated:
            return self._halves(self._read(f"{self._prefix(number)}{names[0]}.weight"), inner), None
        parts = [self._read(f"{self._prefix(number)}{name}.weight", inner) for name in names]
        return torch.cat(parts), None

    def down(self, number: int | None) -> tuple[Tensor, Tensor | None]:
        """``[hidden, inner]``, and bias; as ``gate_up``."""
        _, (outputs, inputs) = self._own(number)
        if self._config.stack == "matrices" and number is not None:
            return self._of_one(self._down, number, inputs, outputs).t(), None
        if self._config.stack == "apart" and number is not None:
            return self._of_one(self._down, number, outputs, inputs), None
        if self._config.stack is not None and number is not None:
            bias = self._stacked_bias(self._down, number, outputs) if self._adds_bias else None
            return self._stacked(self._down, number, outputs, inputs), bias
        name = self._names.down if number is not None else self._names.shared_down
        return self._read(f"{self._prefix(number)}{name}.weight", outputs, inputs), None

    def _of_one(self, name: str, number: int, rows: range | None, columns: range | None = None) -> Tensor:
        """Some rows of one expert, in the tensor that has such a matrix of all of them."""
        if self._config.stack == "matrices":
            own, first = range(self._size) if rows is None else rows, number * self._size
            return self._read(name, range(first + own.start, first + own.stop), columns)
        of_one = self._read(name, range(number, number + 1), columns)[0]
        return of_one if rows is None else of_one[rows.start : rows.stop]

    def _stacked(self, name: str, number: int, outputs: range | None = None, inputs: range | None = None) -> Tensor:
        """Of one expert, ``[outputs, inputs]``."""
        is_turned = self._config.stack != "rows"
        columns, rows = (outputs, inputs) if is_turned else (inputs, outputs)
        stored = self._read(name, range(number, number + 1), columns)[0]
        own = stored if rows is None else stored[rows.start : rows.stop]
        return own.t() if is_turned else own

    def _stacked_bias(self, name: str, number: int, outputs: range | None) -> Tensor | None:
        if not self._has_bias:
            return None
        return self._read(f"{name}_bias", range(number, number + 1), outputs)[0]

    def _expert(self, number: int | None) -> Expert:
        (gate_up, gate_up_bias), (down, down_bias) = self.gate_up(number), self.down(number)
        return Expert(gate_up=gate_up, down=down, gate_up_bias=gate_up_bias, down_bias=down_bias)

    @staticmethod
    def _halves(both: Tensor, inner: range | None) -> Tensor:
        """All gates before all ups: the own ones of each."""
        return both if inner is None else torch.cat([half[inner.start : inner.stop] for half in both.chunk(2)])

    def _prefix(self, number: int | None) -> str:
        return self._names.shared if number is None else self._names.expert.format(number)

    @property
    def _adds_bias(self) -> bool:
        """In the fast form, the ranks' outputs are added."""
        return not self._part.is_fast or self._part.place.tensor_rank == 0

    def _own(self, number: int | None) -> tuple[range | None, tuple[range | None, range | None]]:
        """The own columns of an expert; rows and columns of its projection back. None: all."""
        if self._part.is_whole_stage:
            return None, (None, None)
        inner = self._part.own_of_expert(self._config.shared_size if number is None else self._size)
        return inner, ((None, inner) if self._part.is_fast else (self._part.own_hidden, None))


def _gates_first(pairs: Tensor) -> Tensor:
    return torch.cat([pairs[::2], pairs[1::2]])
