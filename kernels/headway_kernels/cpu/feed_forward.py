"""The feed-forward of one layer, packed.

Owns: its products, names of activations. Must not know: layers, experts.
"""

from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

from headway_kernels.cpu.library import PackedLinear


class Activation(IntEnum):
    """Of a feed-forward. CLAMPED_SWISH is ``min(x, 7) * sigmoid(1.702 * x)`` and adds 1 to ups bounded by 7. XIELU is never
    gated.
    """

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    RELU = 3
    RELU2 = 4
    CLAMPED_SWISH = 5
    XIELU = 6
    LIMITED_SILU = 7


class DenseFeedForward(NamedTuple):
    """``gate_up`` is packed with ``gated`` where ``activates_in_product``; else it gives gates, then ups, or ups alone.
    ``curve`` ``[3]``, float32, contiguous, on the CPU: of XIELU, or ``[1]``, of LIMITED_SILU; see ``cpu/rows.h``. ``norm``, the
    same, ``[inner]``: root mean squares of what ``down`` reads; None: there is none.
    """

    gate_up: PackedLinear
    down: PackedLinear
    activation: Activation = Activation.SILU
    is_gated: bool = True
    curve: Tensor | None = None
    norm: Tensor | None = None


def activates_in_product(activation: Activation, *, is_gated: bool) -> bool:
    """Whether the product before an activation computes it."""
    return is_gated and activation == Activation.SILU
