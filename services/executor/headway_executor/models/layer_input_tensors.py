"""The tensors of inputs that each layer has of its own.

Owns: their names and shapes. Must not know: files, how a layer uses them.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

from headway_executor.models.config import LayerInputs, ModelConfig


class OwnInput(NamedTuple):
    """Of one layer: ``gate`` ``[size, hidden]``, ``back`` ``[hidden, size]``, and the weight of the norm behind it."""

    gate: Tensor
    back: Tensor
    post_norm: Tensor


class LayerInputTensors:
    """``read`` gives a whole tensor by its name; ``layer`` is the prefix of a layer's names."""

    def __init__(self, inputs: LayerInputs, layer: str, read: Callable[[str], Tensor]) -> None:
        self._names = inputs.names
        self._layer = layer
        self._read = read

    def table(self) -> Tensor:
        """``[vocab, layers * size]``."""
        return self._read(self._names.table)

    def projection(self) -> Tensor:
        """Of embeddings: ``[layers * size, hidden]``."""
        return self._read(f"{self._names.projection}.weight")

    def norm(self) -> Tensor:
        """Behind the projection: ``[size]``."""
        return self._read(f"{self._names.norm}.weight")

    def of_layer(self, index: int) -> OwnInput:
        """What is in a layer."""
        names = (self._names.gate, self._names.back, self._names.post_norm)
        return OwnInput(*(self._read(f"{self._layer.format(index)}{name}.weight") for name in names))


def layer_input_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of those outside of layers."""
    inputs = config.layer_inputs
    if inputs is None:
        return
    columns = config.num_layers * inputs.size
    yield inputs.names.table, (inputs.vocab_size, columns)
    yield f"{inputs.names.projection}.weight", (columns, config.hidden_size)
    yield f"{inputs.names.norm}.weight", (inputs.size,)


def own_input_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names, behind a layer's prefix, and shapes of those in each layer."""
    inputs = config.layer_inputs
    if inputs is None:
        return
    yield f"{inputs.names.gate}.weight", (inputs.size, config.hidden_size)
    yield f"{inputs.names.back}.weight", (config.hidden_size, inputs.size)
    yield f"{inputs.names.post_norm}.weight", (config.hidden_size,)
