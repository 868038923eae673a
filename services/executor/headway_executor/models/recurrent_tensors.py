"""The tensors of a layer with a state, in the model's form.

Owns: their names, the order of inputs and channels. Must not know: files, the rest of a layer.

A token's inputs are here, side by side: queries, keys and values, which the convolution is over; gates; then one number of
each head, how much of a value is written ("delta" alone), and one that says how much of the state stays. Checkpoints have
them in other orders.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from headway_executor.models.config import Multipliers, RecurrenceConfig
from headway_kernels.states import Convolution, HeadNumbers

_BY_KEY_HEAD = 2
"""So many tensors of inputs, where one has parts of a key head side by side (Qwen3-Next)."""
_APART = 6
"""So many, where each part has one (OLMo)."""
_UNIT_DECAY = -8.0
"""Of "unit", in all models (De et al. 2024, arXiv 2402.19427)."""


def recurrent_shapes(config: RecurrenceConfig, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names behind a layer's prefix, and shapes."""
    names = config.names
    for name, count in zip(names.inputs, _input_widths(config), strict=True):
        yield f"{name}.weight", (count, hidden)
        if config.has_bias:
            yield f"{name}.bias", (count,)
    for name, count in zip(names.convolution, _convolution_widths(config), strict=True):
        yield f"{name}.weight", (count, 1, config.taps)
        if config.has_convolution_bias:
            yield f"{name}.bias", (count,)
    yield f"{names.output}.weight", (hidden, config.inner)
    if config.has_bias:
        yield f"{names.output}.bias", (hidden,)
    if config.kind == "scanned":
        yield from _scanned_shapes(config)
    elif config.kind == "unit":
        yield from _unit_shapes(config)
    elif config.kind != "gated":
        yield from _shapes_of_heads(config)


def _shapes_of_heads(config: RecurrenceConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    names = config.names
    if not config.slopes:
        yield names.decay, config.decay_shape or (config.num_heads,)
        yield names.step_bias, (config.num_steps,)
    if names.skip:
        yield names.skip, (config.num_heads,)
    if config.gate_rank:
        yield f"{names.gates}.weight", (config.inner, config.gate_rank)
    if config.step_rank:
        yield f"{names.steps}.weight", (config.num_steps, config.step_rank)
    if config.norm_dim:
        yield f"{names.norm}.weight", (config.value_dim if config.kind == "delta" else config.inner,)


def _scanned_shapes(config: RecurrenceConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    names = config.names
    yield f"{names.selection}.weight", (sum(config.selection), config.inner)
    yield f"{names.steps}.weight", (config.inner, config.step_rank)
    yield names.step_bias, (config.inner,)
    yield names.decay, (config.inner, config.key_dim)
    yield names.skip, (config.inner,)
    for name, width in zip(names.selection_norms, config.selection, strict=False):
        yield f"{name}.weight", (width,)


def _unit_shapes(config: RecurrenceConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    blocks = config.num_blocks, config.inner // config.num_blocks
    yield config.names.decay, (config.inner,)
    for name in config.names.blocks:
        yield f"{name}_weight", (*blocks, blocks[1])
        yield f"{name}_bias", blocks


def _convolution_widths(config: RecurrenceConfig) -> tuple[int, ...]:
    """Channels of each tensor of the convolution."""
    count = len(config.names.convolution)
    if not count:
        return ()
    if count == 1 or config.is_cut_alike:
        return (config.channels // count,) * count
    keys = config.num_key_heads * config.key_dim
    return keys, keys, config.inner


def _input_widths(config: RecurrenceConfig) -> tuple[int, ...]:
    """Outputs of each tensor of inputs."""
    if config.slopes or config.kind == "unit":
        return config.channels, config.inner
    if config.kind != "delta":
        return (config.num_inputs,)
    if len(config.names.inputs) == _BY_KEY_HEAD:
        return config.channels + config.inner, 2 * config.num_heads
    keys = config.num_key_heads * config.key_dim
    channels = (keys, keys, config.inner) if len(config.names.inputs) == _APART else (config.channels,)
    return *channels, config.gate_rank or config.inner, config.num_heads, config.step_rank or config.num_steps


def times(weight: Tensor, factor: float) -> Tensor:
    """A weight, or the scales of one, multiplied; codes stay as they are."""
    return weight if factor == 1 or weight.dtype == torch.uint8 else weight.float() * factor


class RecurrentTensors:
    """Those of one layer; ``read`` takes a name behind the layer's prefix."""

    def __init__(
        self, config: RecurrenceConfig, read: Callable[[str], Tensor], multipliers: Multipliers | None = None
    ) -> None:
        self._config = config
        self._multipliers = multipliers or Multipliers()
        self._read = read

    def inputs(self) -> tuple[Tensor, Tensor | None]:
        """``[num_inputs, hidden]``, and bias."""
        return self._in_order("weight"), self._in_order("bias") if self._config.has_bias else None

    def output(self) -> tuple[Tensor, Tensor | None]:
        """``[hidden, inner]``, and bias."""
        name = self._config.names.output
        return times(self._read(f"{name}.weight"), self._multipliers.from_state), self._read(
            f"{name}.bias"
        ) if self._config.has_bias else None

    def convolution(self) -> Convolution:
        """Of the channels in their order here."""
        names, bias = self._config.names.convolution, None
        if not names:
            return Convolution(torch.ones(self._config.channels, 1), None)
        taps = torch.cat([self._read(f"{name}.weight").squeeze(1) for name in names])
        if self._config.has_convolution_bias:
            bias = self._values_last(torch.cat([self._read(f"{name}.bias") for name in names]))
        return Convolution(self._values_last(taps), bias)

    def head_numbers(self) -> HeadNumbers | None:
        """In float32; None if there is no state of heads."""
        config, names = self._config, self._config.names
        if config.kind == "gated":
            return None
        norm = None
        if config.norm_dim:
            norm = self._read(f"{names.norm}.weight").float().view(-1, config.norm_dim)
            norm = norm.expand(config.inner // config.norm_dim, -1)
        if config.kind == "scanned":
            return HeadNumbers(
                decay=-self._read(names.decay).float().exp().t(),
                step_bias=self._read(names.step_bias).float(),
                skip=self._read(names.skip).float(),
                norm=None,
                selection_norm=self._selection_norm(),
            )
        if config.kind == "unit":
            weights, biases = (
                torch.stack([self._read(f"{name}_{kind}").float() for name in names.blocks])
                for kind in ("weight", "bias")
            )
            decay = _UNIT_DECAY * functional.softplus(self._read(names.decay).float())
            return HeadNumbers(decay, None, None, None, blocks=weights, block_bias=biases.flatten(1))
        if config.slopes:
            return HeadNumbers(decay=torch.tensor(config.slopes), step_bias=None, skip=None, norm=norm)
        return HeadNumbers(
            decay=-self._read(names.decay).float().flatten().exp(),
            step_bias=self._read(names.step_bias).float(),
            skip=self._read(names.skip).float() if names.skip else None,
            norm=norm,
        )

    def selection(self) -> Tensor | None:
        """Of "scanned": ``[step_rank + 2 * key_dim, inner]``; else None."""
        names = self._config.names
        return self._read(f"{names.selection}.weight") if names.selection else None

    def steps(self) -> Tensor | None:
        """``[num_steps, step_rank]``, or None."""
        return self._read(f"{self._config.names.steps}.weight") if self._config.step_rank else None

    def gates(self) -> Tensor | None:
        """``[inner, gate_rank]``, or None."""
        return self._read(f"{self._config.names.gates}.weight") if self._config.gate_rank else None

    def _selection_norm(self) -> Tensor | None:
        config, names = self._config, self._config.names.selection_norms
        if config.selection_norm == "plain":
            return torch.ones(sum(config.selection))
        return torch.cat([self._read(f"{name}.weight").float() for name in names]) if names else None

    def _in_order(self, kind: str) -> Tensor:
        config = self._config
        stored = [self._read(f"{name}.{kind}") for name in config.names.inputs]
        if config.kind == "gated":
            before, behind, values = stored[0].chunk(3)
            return torch.cat([values, before, behind])
        if config.kind == "scanned":
            return stored[0]
        if config.kind == "unit":
            return torch.cat(stored)
        if config.slopes:
            by_head = stored[0].view(config.num_heads, 3, config.value_dim, *stored[0].shape[1:])
            return torch.cat([*(part.flatten(0, 1) for part in by_head.unbind(1)), stored[1]])
        if config.kind == "selective":
            keys = config.num_key_heads * config.key_dim
            parts = torch.split(stored[0], [config.inner, config.inner, keys, keys, config.num_heads])
            gates, values, keys_, queries, steps = map(times, parts, self._multipliers.to_state)
            return torch.cat([queries, keys_, values, gates, steps])
        return torch.cat(self._of_key_heads(*stored) if len(stored) == _BY_KEY_HEAD else stored)

    def _of_key_heads(self, most: Tensor, rest: Tensor) -> list[Tensor]:
        config = self._config
        ratio = config.num_heads // config.num_key_heads
        values = ratio * config.value_dim
        parts = [
            *self._split(most, [config.key_dim, config.key_dim, values, values]),
            *self._split(rest, [ratio, ratio]),
        ]
        return [part.flatten(0, 1) for part in parts]

    def _split(self, stored: Tensor, widths: list[int]) -> tuple[Tensor, ...]:
        return torch.split(stored.view(self._config.num_key_heads, -1, *stored.shape[1:]), widths, 1)

    def _values_last(self, channels: Tensor) -> Tensor:
        """As stored, but values, keys, queries ("selective") are turned round."""
        config = self._config
        if config.kind != "selective":
            return channels
        keys = config.num_key_heads * config.key_dim
        return torch.cat(torch.split(channels, [config.inner, keys, keys])[::-1])
