"""Linear layers in plain torch.

Owns: their weights. Must not know: their use.
"""

import torch
from torch import Tensor
from torch.nn import functional


class Linear:
    """``weight`` ``[out, in]``, ``bias`` ``[out]`` or None; both are copied."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device) -> None:
        self._weight = placed(weight, dtype, device)
        self._bias = None if bias is None else placed(bias, dtype, device)

    def __call__(self, inputs: Tensor) -> Tensor:
        """``[tokens, in] -> [tokens, out]``, a new tensor."""
        return functional.linear(inputs, self._weight, self._bias)


def placed(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy, so that the mapped file can be closed."""
    return torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor)
