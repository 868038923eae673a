"""A step as all layers of a model on a device see it, and what a layer does with it.

Owns: these shapes. Must not know: what a layer computes, where a step's columns are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from headway_executor.models.recurrence import RowStates
from headway_kernels.gpu.recurrence.bounds import RowBounds


class StepStates(NamedTuple):
    """The states of all rows, and which of them a step has."""

    rows: RowStates
    bounds: RowBounds


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """Padded to the sizes of a launch. ``positions`` and ``slots`` are int32, ``[tokens]``; a slot of -1 is padding.

    ``pool`` is ``[num_layers, num_blocks, 2 * kv_heads, block_size, head_dim]``, of codes one wider, or, if layers stand behind
    each other in a block, ``[1, num_blocks, numbers]``. ``long_chunks`` attends with the chunks that are for a library, if
    there are any. ``states``: in a model that has some.
    """

    positions: Tensor
    slots: Tensor
    pool: Tensor
    has_decodes: bool
    has_chunks: bool
    long_chunks: Callable[[Tensor, Tensor, Tensor], None] | None
    states: StepStates | None


class Mixing(Protocol):
    """How a layer lets a token see others: ``[tokens, hidden] -> [tokens, hidden]``."""

    def __call__(self, inputs: Tensor, step: DeviceStep, out: Tensor) -> None:
        """Launch; allocates nothing. ``out`` is other memory than ``inputs``."""
        ...
