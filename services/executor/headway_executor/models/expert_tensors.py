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
        return self._stacked(number) if self._config.is_stacked else self._single(self._names.expert.format(number))

    def shared(self) -> Expert | None:
        """The one that all tokens go through."""
        return self._single(self._names.shared) if self._config.shared_size else None

    def shared_gate(self) -> Tensor | None:
        """``[1, hidden]``, or None."""
        return None if self._names.shared_gate is None else self._read(f"{self._names.shared_gate}.weight", None)

    def _single(self, prefix: str) -> Expert:
        gate, up = (self._read(f"{prefix}{name}.weight", None) for name in self._names.gate_up)
        return Expert(gate_up=torch.cat([gate, up]), down=self._read(f"{prefix}{self._names.down}.weight", None))

    def _stacked(self, number: int) -> Expert:
        """Inputs before outputs, a gate and its up side by side."""
        name, down = self._names.gate_up[0], self._names.down
        gate_up, gate_up_bias, back, back_bias = (
            self._read(some, range(number, number + 1))[0] for some in (name, f"{name}_bias", down, f"{down}_bias")
        )
        return Expert(
            gate_up=_gates_first(gate_up.t()),
            down=back.t(),
            gate_up_bias=_gates_first(gate_up_bias),
            down_bias=back_bias,
        )


def _gates_first(pairs: Tensor) -> Tensor:
    return torch.cat([pairs[::2], pairs[1::2]])
