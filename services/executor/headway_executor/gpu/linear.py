"""Linear layers on a GPU, into memory that is already there.

Owns: the form of a weight (the model's dtype, or 8-bit codes with a scale per output) and the choice of the product.
Must not know: what a layer is for.
"""

from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from headway_kernels.gpu.quantized_linear import quantize, quantized_linear, workspace_elements

QuantizationKind: TypeAlias = Literal["int8", "fp8"]


class DeviceLinear(Protocol):
    """``out = inputs @ weight.T + bias``: ``[tokens, in] -> [tokens, out]``, both in the model's dtype."""

    def __call__(self, inputs: Tensor, out: Tensor) -> None:
        """Multiply; allocates nothing."""
        ...


class DenseLinear:
    """``weight`` shape ``[out, in]``, ``bias`` shape ``[out]`` or None, both of the model's dtype, on its device."""

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
    """Memory for partial sums, which the quantised layers of a model share."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(0, dtype=torch.float32, device=device)

    def grow(self, num_elements: int) -> None:
        """Hold at least so many numbers; call before any step."""
        if self.memory.numel() < num_elements:
            self.memory = torch.empty(num_elements, dtype=torch.float32, device=self.memory.device)


class QuantizedLinear:
    """A layer with weights as codes of ``kind``; ``dtype`` is the model's."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        kind: QuantizationKind,
        *,
        dtype: torch.dtype,
        workspace: SplitWorkspace,
    ) -> None:
        self._codes, self._scales = quantize(weight, kind)
        self._bias = bias
        self._workspace = workspace
        num_outputs, num_inputs = weight.shape
        workspace.grow(workspace_elements(num_outputs, num_inputs, dtype))

    def __call__(self, inputs: Tensor, out: Tensor) -> None:
        """See ``DeviceLinear``."""
        quantized_linear(inputs, self._codes, self._scales, self._bias, out, self._workspace.memory)
