"""Linear layers on a GPU, into preallocated memory.

Owns: dense weights, weights as codes. Must not know: a layer's use, files.
"""

from typing import Protocol

import torch
from torch import Tensor

from headway_executor.models.adapted import StepAdapters
from headway_kernels.gpu.quantized_linear import quantized_linear, workspace_elements
from headway_kernels.gpu.weights import DeviceWeight


class DeviceLinear(Protocol):
    """``out = inputs @ weight.T + bias``: ``[tokens, in] -> [tokens, out]``."""

    def __call__(self, inputs: Tensor, out: Tensor) -> None:
        """Multiply; allocates nothing."""
        ...


class DenseLinear:
    """``weight`` ``[out, in]``, ``bias`` ``[out]`` or None, in the model's dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._transposed = weight.t()
        self._bias = bias

    def __call__(self, inputs: Tensor, out: Tensor) -> None:
        """See ``DeviceLinear``."""
        if self._bias is None:
            torch.mm(inputs, self._transposed, out=out)
        else:
            torch.addmm(self._bias, inputs, self._transposed, out=out)


class SplitWorkspace:
    """Shared memory for partial sums."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(0, dtype=torch.float32, device=device)

    def grow(self, num_elements: int) -> None:
        """Call before any step."""
        if self.memory.numel() < num_elements:
            self.memory = torch.empty(num_elements, dtype=torch.float32, device=self.memory.device)


class CodedLinear:
    """Weights as codes; ``bias`` ``[out]`` or None, in ``dtype``, the model's."""

    def __init__(
        self, weight: DeviceWeight, bias: Tensor | None, *, dtype: torch.dtype, workspace: SplitWorkspace
    ) -> None:
        self._weight = weight
        self._bias = bias
        self._workspace = workspace
        workspace.grow(workspace_elements(weight, dtype))

    def __call__(self, inputs: Tensor, out: Tensor) -> None:
        """See ``DeviceLinear``."""
        quantized_linear(inputs, self._weight, self._bias, out, self._workspace.memory)


class AdaptedLinear:
    """A ``DeviceLinear``, and what each row's adapter adds to it at a ``site`` of a layer; only this allocates."""

    def __init__(self, product: DeviceLinear, step: StepAdapters, layer: int, site: str) -> None:
        self._product = product
        self._step = step
        self._layer = layer
        self._site = site

    def __call__(self, inputs: Tensor, out: Tensor) -> None:
        """See ``DeviceLinear``."""
        self._product(inputs, out)
        self._step.add(self._layer, self._site, inputs, out)
