"""The state of one layer that has one instead of keys and values, packed.

Owns: its C struct. Must not know: checkpoints, the executor, how the library computes.
"""

import ctypes
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

from headway_kernels.cpu.library import PackedLinear, address
from headway_kernels.states import HeadNumbers

MOST_TAPS = 8
"""Of a convolution; see ``recurrence.h``."""


class StateKind(IntEnum):
    """See ``recurrence.h``."""

    GATED_CONVOLUTION = 0
    DELTA = 1
    SELECTIVE = 2
    SCANNED = 3
    UNIT = 4


class StateGate(IntEnum):
    """See ``recurrence.h``."""

    SILU = 0
    SIGMOID = 1
    GELU_TANH = 2


class StateSizes(NamedTuple):
    """Of a state; a convolution alone has one head, and no key heads."""

    kind: StateKind
    gate: StateGate
    taps: int
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    norm_dim: int
    keys_take_turns: bool = False
    gates_behind: bool = False
    doubles_strengths: bool = False
    decays_channels: bool = False
    step_rank: int = 0
    gate_rank: int = 0
    num_blocks: int = 0


class _RecurrenceStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in StateSizes._fields),
        ("gates_at", ctypes.c_int64),
        ("strengths_at", ctypes.c_int64),
        ("selected_at", ctypes.c_int64),
        ("steps_at", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("selection_norm", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("block_bias", ctypes.c_void_p),
        ("taps_of", ctypes.c_void_p),
        ("taps_bias", ctypes.c_void_p),
        ("decay", ctypes.c_void_p),
        ("step_bias", ctypes.c_void_p),
        ("skip", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("norm_eps", ctypes.c_float),
        ("decay_bound", ctypes.c_float),
        ("past", ctypes.c_void_p),
        ("heads", ctypes.c_void_p),
    )


class PackedRecurrence:
    """One layer's. ``inputs`` gives a token's inputs, ``output`` takes results. ``decay_bound``: see ``recurrence.h``. ``taps``
    ``[taps, channels]``, oldest first, and ``taps_bias`` ``[channels]`` or None: float32, contiguous. ``numbers``: the same; None
    for a convolution alone. ``selection``, ``steps`` and ``gates`` are further products, or None.
    """

    def __init__(
        self,
        sizes: StateSizes,
        decay_bound: float,
        inputs: PackedLinear,
        output: PackedLinear,
        taps: Tensor,
        taps_bias: Tensor | None,
        numbers: HeadNumbers | None,
        norm_eps: float,
        *,
        selection: PackedLinear | None = None,
        steps: PackedLinear | None = None,
        gates: PackedLinear | None = None,
    ) -> None:
        assert sizes.taps <= MOST_TAPS
        self.inner = sizes.num_heads * sizes.value_dim
        self.inputs, self.output = inputs, output
        self.selection, self.steps, self.gates = selection, steps, gates
        self._kept = (taps, taps_bias, numbers)
        self._states: tuple[Tensor, Tensor] | None = None
        of_heads = {} if numbers is None else {name: address(part) for name, part in numbers._asdict().items()}
        self.struct = _RecurrenceStruct(
            **sizes._asdict(),
            **self._places(sizes),
            decay_bound=decay_bound,
            taps_of=taps.data_ptr(),
            taps_bias=address(taps_bias),
            norm_eps=norm_eps,
            **of_heads,
        )

    def _places(self, sizes: StateSizes) -> dict[str, int]:
        """Where parts of a token's inputs are; what further products give is behind the rest, as each writes whole panels."""
        channels = 2 * sizes.num_key_heads * sizes.key_dim + self.inner
        strengths = channels + (sizes.gate_rank or self.inner)
        places = {
            "gates_at": channels,
            "strengths_at": strengths,
            "steps_at": strengths + (sizes.num_heads if sizes.kind == StateKind.DELTA else 0),
        }
        columns = self.inputs.padded_outputs
        for name in ("selection", "steps", "gates"):
            product = getattr(self, name)
            if product is not None:
                places["selected_at" if name == "selection" else f"{name}_at"] = columns
                columns += product.padded_outputs
        return places | {"columns": columns}

    @property
    def has_memory(self) -> bool:
        """Whether ``use`` has been called."""
        return self._states is not None

    def use(self, past: Tensor, heads: Tensor) -> None:
        """Keep the states of rows in this memory, float32, at first zeros, of as many numbers as ``recurrence.h`` says."""
        self._states = past, heads
        self.struct.past, self.struct.heads = past.data_ptr(), heads.data_ptr()
