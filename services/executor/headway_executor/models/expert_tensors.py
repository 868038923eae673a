"""The tensors of experts in the model's form.

Owns: their names, experts that lie in one tensor. Must not know: files, the rest of a layer.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from headway_executor.models.config import ExpertsConfig, FeedForwardConfig
from headway_kernels.experts import Expert

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def expert_shapes(config: ExpertsConfig, feed: FeedForwardConfig, hidden: int) -> Shapes:
    """Names behind a layer's prefix, and shapes."""
    names, count = config.names, config.routing.num_experts
    yield f"{names.router}.weight", (count, hidden)
    if config.has_router_bias:
        yield f"{names.router}.bias", (count,)
    if names.correction is not None:
        yield names.correction, (count,)
    if config.is_stacked:
        inner = feed.intermediate_size
        yield names.gate_up[0], (count, hidden, 2 * inner)
        yield f"{names.gate_up[0]}_bias", (count, 2 * inner)
        yield names.down, (count, inner, hidden)
        yield f"{names.down}_bias", (count, hidden)
        return
    for number in range(count):
        yield from _feed_forward(config, names.expert.format(number), hidden, feed.intermediate_size)
    if config.shared_size:
        yield from _feed_forward(config, names.shared, hidden, config.shared_size)
    if names.shared_gate is not None:
        yield f"{names.shared_gate}.weight", (1, hidden)


def _feed_forward(config: ExpertsConfig, prefix: str, hidden: int, inner: int) -> Shapes:
    for name in config.names.gate_up:
        yield f"{prefix}{name}.weight", (inner, hidden)
    yield f"{prefix}{config.names.down}.weight", (hidden, inner)


class ExpertTensors:
    """Those of one layer; ``read`` takes a name behind the layer's prefix, and rows or None."""

    def __init__(self, config: ExpertsConfig, read: Callable[[str, range | None], Tensor]) -> None:
        self._config = config
        self._names = config.names
        self._read = read

    def router(self) -> tuple[Tensor, Tensor | None]:
        """``[experts, hidden]``, and bias."""
        name = self._names.router
        weight = self._read(f"{name}.weight", None)
        return weight, self._read(f"{name}.bias", None) if self._config.has_router_bias else None

    def correction(self) -> Tensor | None:
        """``[experts]``, or None."""
        return None if self._names.correction is None else self._read(self._names.correction, None)

    def expert(self, number: int) -> Expert:
        """One of those that are chosen."""
        return self._expert(number)

    def shared(self) -> Expert | None:
        """The one that all tokens go through."""
        return self._expert(None) if self._config.shared_size else None

    def shared_gate(self) -> Tensor | None:
        """``[1, hidden]``, or None."""
        return None if self._names.shared_gate is None else self._read(f"{self._names.shared_gate}.weight", None)

    def gate_up(self, number: int | None) -> tuple[Tensor, Tensor | None]:
        """``[2 * inner, hidden]``, gates first, and bias, of one expert; None: of the shared one."""
        if self._config.is_stacked and number is not None:
            weight, bias = self._stacked(self._names.gate_up[0], number)
            return _gates_first(weight), _gates_first(bias)
        parts = [self._read(f"{self._prefix(number)}{name}.weight", None) for name in self._names.gate_up]
        return torch.cat(parts), None

    def down(self, number: int | None) -> tuple[Tensor, Tensor | None]:
        """``[hidden, inner]``, and bias; as ``gate_up``."""
        if self._config.is_stacked and number is not None:
            return self._stacked(self._names.down, number)
        return self._read(f"{self._prefix(number)}{self._names.down}.weight", None), None

    def _expert(self, number: int | None) -> Expert:
        (gate_up, gate_up_bias), (down, down_bias) = self.gate_up(number), self.down(number)
        return Expert(gate_up=gate_up, down=down, gate_up_bias=gate_up_bias, down_bias=down_bias)

    def _prefix(self, number: int | None) -> str:
        return self._names.shared if number is None else self._names.expert.format(number)

    def _stacked(self, name: str, number: int) -> tuple[Tensor, Tensor]:
        """Outputs before inputs, and bias; in the file, a gate and its up lie side by side."""
        rows = range(number, number + 1)
        return self._read(name, rows)[0].t(), self._read(f"{name}_bias", rows)[0]


def _gates_first(pairs: Tensor) -> Tensor:
    return torch.cat([pairs[::2], pairs[1::2]])
