"""The activations between a feed-forward's products, into preallocated memory.

Owns: which operator computes which. Must not know: layers.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from headway_executor.models.config import Activation, FeedForwardConfig
from headway_kernels.gpu.activation import (
    Gate,
    activate_and_multiply,
    clamped_swish_and_multiply,
    gelu_and_multiply,
    silu_and_multiply,
    xielu,
)

Activate: TypeAlias = Callable[[Tensor, Tensor], None]
"""From ``[tokens, 2 * inner]`` (gates, then ups), or ``[tokens, inner]`` without a gate, to ``[tokens, inner]``."""

_GATED: Mapping[Activation, Activate] = MappingProxyType(
    {"silu": silu_and_multiply, "clamped_swish": clamped_swish_and_multiply, "gelu_tanh": gelu_and_multiply}
)
"""Those with a kernel of their own."""

_GATES: Mapping[Activation, Gate] = MappingProxyType(
    {"silu": Gate.SILU, "clamped_swish": Gate.CLAMPED, "gelu_tanh": Gate.GELU_TANH}
)


def gate_of(feed: FeedForwardConfig) -> Gate:
    """The activation that a product may have behind it in the same launch."""
    return _GATES.get(feed.activation, Gate.NONE) if feed.is_gated else Gate.NONE


def activation_of(feed: FeedForwardConfig, curve: Tensor | None = None) -> Activate:
    """The activation of a layer, of "xielu" with its ``curve``; it allocates nothing."""
    if curve is not None:
        return partial(xielu, curve=curve)
    if feed.is_gated and feed.activation in _GATED:
        return _GATED[feed.activation]
    if not feed.is_gated:
        return partial(_activate, feed.activation)

    def gated(gate_up: Tensor, out: Tensor) -> None:
        width = out.shape[1]
        _activate(feed.activation, gate_up[:, :width], out)
        out.mul_(gate_up[:, width:])

    def limited(gate_up: Tensor, out: Tensor) -> None:
        width = out.shape[1]
        _activate("silu", gate_up[:, :width], out)
        out.clamp_(max=feed.limit).mul_(gate_up[:, width:].clamp_(-feed.limit, feed.limit))

    if feed.activation == "limited_silu":
        return limited

    return gated


def activate_gates_(name: Activation, gates: Tensor, ups: Tensor) -> None:
    """``gates = activation(gates) * ups``, both ``[tokens, width]``, of an activation without numbers of its own."""
    if name in _GATES:
        activate_and_multiply(gates, ups, gates, _GATES[name])
    else:
        _activate(name, gates, gates)
        gates.mul_(ups)


def _activate(name: Activation, inputs: Tensor, out: Tensor) -> None:
    """One without a gate and without numbers of its own; ``out`` may be ``inputs``."""
    if name == "silu":
        torch.ops.aten.silu.out(inputs, out=out)
    elif name in {"gelu", "gelu_tanh"}:
        torch.ops.aten.gelu.out(inputs, approximate="tanh" if name == "gelu_tanh" else "none", out=out)
    else:
        torch.clamp_min(inputs, 0, out=out)
        if name == "relu2":
            out.square_()
