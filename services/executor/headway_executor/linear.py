"""Linear layers in plain torch.

Owns: weights on a device, in a dtype, and products with them. Must not know: what a layer is for.
"""

import torch
from torch import Tensor
from torch.nn import functional


class Linear:
    """``weight`` shape ``[out, in]``, ``bias`` shape ``[out]`` or None; both are copied."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device) -> None:
        self._weight = placed(weight, dtype, device)
        self._bias = None if bias is None else placed(bias, dtype, device)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Multiply: ``[tokens, in] -> [tokens, out]``, same dtype, a new tensor."""
        return functional.linear(inputs, self._weight, self._bias)


def placed(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy of the tensor, so that the mapped file can be closed."""
    return torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor)
