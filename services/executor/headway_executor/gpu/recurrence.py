"""A layer's state instead of its attention, or beside it: the products around it, and the kernels between them.

Owns: their launches and their memory. Must not know: norms before a layer, files, which layers there are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headway_executor.gpu.device_step import DeviceStep, Mixing, StepStates
from headway_executor.gpu.linear import DeviceLinear
from headway_executor.models.config import RecurrenceConfig, RecurrenceKind
from headway_kernels.gpu.norm import add_rms_norm
from headway_kernels.gpu.recurrence.channels import scan_channels, scan_unit
from headway_kernels.gpu.recurrence.convolution import convolve
from headway_kernels.gpu.recurrence.gates import GateKind, gate_results
from headway_kernels.gpu.recurrence.heads import HeadShape, run_heads
from headway_kernels.states import Convolution, HeadNumbers

_GATES = {"silu": GateKind.SILU, "sigmoid": GateKind.SIGMOID, "gelu_tanh": GateKind.GELU_TANH}


class SpaceWidths(NamedTuple):
    """Numbers of a token between the products: what those give that a layer has, and what kernels leave for each other."""

    made: int
    convolved: int
    results: int
    gates: int
    steps: int
    selected: int
    of_blocks: int


def widths_of(config: RecurrenceConfig) -> SpaceWidths:
    """0 of what a layer does not have."""
    return SpaceWidths(
        made=config.num_inputs,
        convolved=0 if config.kind == "gated" else config.channels,
        results=config.inner,
        gates=config.inner if config.gate_rank else 0,
        steps=config.num_steps if config.step_rank else 0,
        selected=sum(config.selection) if config.kind == "scanned" else 0,
        of_blocks=2 * config.inner if config.kind == "unit" else 0,
    )


class RecurrenceSpace:
    """Memory for what layers of the same ``widths`` compute, one after the other. Padding is never written there: zeros keep NaN
    out of the products.
    """

    def __init__(self, widths: SpaceWidths, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        spaces = [torch.zeros(num_tokens, width, dtype=dtype, device=device) for width in widths]
        self.made, self.convolved, self.results, self.gates, self.steps, self.selected, of_blocks = spaces
        self.of_blocks = of_blocks.view(-1)


@dataclass(frozen=True, slots=True)
class RecurrenceWeights:
    """``convolution`` and ``numbers`` float32, contiguous, taps ``[taps, channels]``. ``selection``, ``steps`` and ``gates`` are
    further products, or None: see ``RecurrenceConfig``. ``blocks`` of "unit" ``[num_blocks, width, 2 * width]``, in the model's dtype: inputs before
    outputs, of what is taken and of what stays; or None.
    """

    inputs: DeviceLinear
    convolution: Convolution
    numbers: HeadNumbers | None
    norm_eps: float
    output: DeviceLinear
    selection: DeviceLinear | None = None
    steps: DeviceLinear | None = None
    gates: DeviceLinear | None = None
    blocks: Tensor | None = None


class _Kind(Protocol):
    """What happens to tokens between the two products."""

    def __call__(self, made: Tensor, states: StepStates, results: Tensor) -> None:
        """``[tokens, num_inputs] -> [tokens, inner]``; the states go on."""
        ...


class DeviceRecurrence:
    """A layer's ``Mixing``; its states have the number ``index``."""

    def __init__(
        self, config: RecurrenceConfig, index: int, weights: RecurrenceWeights, space: RecurrenceSpace
    ) -> None:
        self._inputs = weights.inputs
        self._output = weights.output
        self._space = space
        self._between = _KINDS[config.kind](config, index, weights, space)

    def __call__(self, inputs: Tensor, step: DeviceStep, out: Tensor) -> None:
        """See ``Mixing``; the states of the step's rows go on."""
        assert step.states is not None
        made, results = self._space.made[: len(inputs)], self._space.results[: len(inputs)]
        self._inputs(inputs, made)
        self._between(made, step.states, results)
        self._output(results, out)


@dataclass(frozen=True, slots=True)
class Beside:
    """A ``Mixing``: attention and a state that read the same. ``space`` ``[max tokens, hidden]``, shared by layers."""

    attention: Mixing
    recurrence: Mixing
    space: Tensor

    def __call__(self, inputs: Tensor, step: DeviceStep, out: Tensor) -> None:
        """See ``Mixing``."""
        added = self.space[: len(inputs)]
        self.attention(inputs, step, out)
        self.recurrence(inputs, step, added)
        out.add_(added)


class _Gated:
    """A convolution between gates."""

    def __init__(
        self, config: RecurrenceConfig, index: int, weights: RecurrenceWeights, space: RecurrenceSpace
    ) -> None:
        del config, space
        self._index = index
        self._weights = weights.convolution

    def __call__(self, made: Tensor, states: StepStates, results: Tensor) -> None:
        past = states.rows.past[self._index]
        convolve(made, past, self._weights, states.bounds, results, is_gated=True, has_silu=False)


class _Heads:
    """A matrix for each head."""

    def __init__(
        self, config: RecurrenceConfig, index: int, weights: RecurrenceWeights, space: RecurrenceSpace
    ) -> None:
        self._index = index
        self._weights = weights
        self._space = space
        self._is_delta = config.kind == "delta"
        sizes = [config.channels, config.gate_rank or config.inner, config.num_heads * self._is_delta]
        self._sizes = [*sizes, config.num_inputs - sum(sizes)]
        self._has_steps = config.num_steps > 0
        self._gate = _GATES[config.gate]
        self._gates_first = not (self._is_delta or config.gates_behind)
        self._shape = HeadShape(
            num_heads=config.num_heads,
            num_key_heads=config.num_key_heads,
            key_dim=config.key_dim,
            value_dim=config.value_dim,
            is_delta=self._is_delta,
            keys_take_turns=config.keys_take_turns,
            doubles_strengths=config.doubles_strengths,
            decay_bound=config.decay_bound,
        )

    def __call__(self, made: Tensor, states: StepStates, results: Tensor) -> None:
        (rows, bounds), weights, numbers = states, self._weights, self._weights.numbers
        assert numbers is not None
        convolved = self._space.convolved[: len(made)]
        convolve(made, rows.past[self._index], weights.convolution, bounds, convolved, is_gated=False, has_silu=True)
        _, gates, strengths, steps = torch.split(made, self._sizes, 1)
        gates = _through(weights.gates, gates, self._space.gates)
        steps = _through(weights.steps, steps, self._space.steps)
        run_heads(
            self._shape,
            convolved,
            strengths if self._is_delta else None,
            steps if self._has_steps else None,
            numbers,
            rows.heads[self._index],
            bounds,
            results,
        )
        gate_results(
            results,
            gates,
            numbers.norm,
            bounds.query_start,
            kind=self._gate,
            are_first=self._gates_first,
            eps=weights.norm_eps,
        )


class _Scanned:
    """Some numbers for each channel, whose steps, keys and queries further products make of the convolved values."""

    def __init__(
        self, config: RecurrenceConfig, index: int, weights: RecurrenceWeights, space: RecurrenceSpace
    ) -> None:
        self._sizes = config.selection
        self._index = index
        self._weights = weights
        self._space = space
        numbers = weights.numbers
        norm = None if numbers is None else numbers.selection_norm
        self._norms: Sequence[Tensor] | None = None if norm is None else torch.split(norm, config.selection)

    def __call__(self, made: Tensor, states: StepStates, results: Tensor) -> None:
        (rows, bounds), weights, num_tokens = states, self._weights, len(made)
        assert weights.selection is not None
        assert weights.numbers is not None
        values, selected = self._space.convolved[:num_tokens], self._space.selected[:num_tokens]
        convolve(made, rows.past[self._index], weights.convolution, bounds, values, is_gated=False, has_silu=True)
        weights.selection(values, selected)
        if self._norms is not None:
            for part, norm in zip(torch.split(selected, self._sizes, 1), self._norms, strict=True):
                add_rms_norm(part, None, norm, part, eps=weights.norm_eps)
        low, pairs = selected[:, : self._sizes[0]], selected[:, self._sizes[0] :]
        steps = _through(weights.steps, low, self._space.steps)
        gates = made[:, values.shape[1] :]
        scan_channels(values, steps, pairs, gates, weights.numbers, rows.heads[self._index], bounds, results)


class _Unit:
    """One number for each channel; matrices of blocks of channels say what is taken and what stays."""

    def __init__(
        self, config: RecurrenceConfig, index: int, weights: RecurrenceWeights, space: RecurrenceSpace
    ) -> None:
        self._gate = _GATES[config.gate]
        self._index = index
        self._weights = weights
        self._space = space

    def __call__(self, made: Tensor, states: StepStates, results: Tensor) -> None:
        (rows, bounds), weights, num_tokens = states, self._weights, len(made)
        assert weights.blocks is not None
        assert weights.numbers is not None
        values = self._space.convolved[:num_tokens]
        convolve(made, rows.past[self._index], weights.convolution, bounds, values, is_gated=False, has_silu=False)
        num_blocks, width, both = weights.blocks.shape
        of_blocks = self._space.of_blocks[: num_tokens * num_blocks * both].view(num_blocks, num_tokens, both)
        torch.bmm(values.view(num_tokens, num_blocks, width).transpose(0, 1), weights.blocks, out=of_blocks)
        gates = made[:, values.shape[1] :]
        scan_unit(values, of_blocks, gates, weights.numbers, rows.heads[self._index], bounds, results, self._gate)


_KINDS: Mapping[RecurrenceKind, Callable[[RecurrenceConfig, int, RecurrenceWeights, RecurrenceSpace], _Kind]] = (
    MappingProxyType({"gated": _Gated, "delta": _Heads, "selective": _Heads, "scanned": _Scanned, "unit": _Unit})
)


def _through(product: DeviceLinear | None, inputs: Tensor, space: Tensor) -> Tensor:
    """What a product makes of inputs, in its memory; without one, they are it."""
    if product is None:
        return inputs
    made = space[: len(inputs)]
    product(inputs, made)
    return made
