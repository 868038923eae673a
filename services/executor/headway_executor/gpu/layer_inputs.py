"""Inputs that each layer has of its own, beside the hidden state, into preallocated memory.

Owns: their table, what a layer makes of them. Must not know: attention, the order of a layer's parts, files.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headway_executor.gpu.activations import activate_gates_
from headway_executor.gpu.linear import DeviceLinear
from headway_executor.gpu.norm import DeviceNorm
from headway_executor.models.config import Activation, LayerInputs
from headway_kernels.gpu.rows import gather_rows


class LayerInputSpace:
    """Memory for a step's inputs of all layers, ``[max_num_tokens, layers, size]``, and for a layer's gates of them."""

    def __init__(
        self, inputs: LayerInputs, num_layers: int, max_num_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (max_num_tokens, num_layers, inputs.size)
        self.inputs = torch.empty(shape, dtype=dtype, device=device)
        self.words = torch.empty_like(self.inputs)
        self.gates = torch.empty((max_num_tokens, inputs.size), dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class LayerTable:
    """``words`` ``[vocab, layers * size]``; behind the ``projection`` of embeddings is a norm over ``size``."""

    words: Tensor
    projection: DeviceLinear
    norm: DeviceNorm
    space: LayerInputSpace

    def __call__(self, token_ids: Tensor, embeddings: Tensor) -> None:
        """Look up the inputs of a step; ``token_ids`` int32, ``[tokens]``, ``embeddings`` ``[tokens, hidden]``."""
        projected, words = self.space.inputs[: len(token_ids)], self.space.words[: len(token_ids)]
        size = projected.shape[2]
        self.projection(embeddings, projected.flatten(1))
        by_layer = projected.flatten(0, 1).mul_(embeddings.shape[1] ** -0.5)
        self.norm(by_layer, None, by_layer)
        gather_rows(self.words, token_ids, words.flatten(1))
        projected.add_(words.mul_(size**0.5)).mul_(2**-0.5)


@dataclass(frozen=True, slots=True)
class OwnInput:
    """What the layer with the number ``index`` makes of its inputs; ``post_norm`` is of what it gives."""

    index: int
    gate: DeviceLinear
    activation: Activation
    back: DeviceLinear
    post_norm: DeviceNorm
    space: LayerInputSpace

    def __call__(self, hidden: Tensor, out: Tensor) -> None:
        """``[tokens, hidden] -> [tokens, hidden]``; ``hidden`` gates the inputs."""
        gates = self.space.gates[: len(hidden)]
        self.gate(hidden, gates)
        activate_gates_(self.activation, gates, self.space.inputs[: len(hidden), self.index])
        self.back(gates, out)
        self.post_norm(out, None, out)
