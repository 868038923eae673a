"""Linear layers in plain torch, also those of which each rank of several has a part.

Owns: their weights. Must not know: their use.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from headway_executor.ranks.stage_mates import ColumnMates, Cut

_MOST_OF_8_BITS = 127.0
_LEAST = 1e-30
"""Of what is rounded: a row of zeros has a scale, too."""


class Linear:
    """``weight`` ``[out, in]``, ``bias`` ``[out]`` or None; both are copied."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device) -> None:
        self._weight = placed(weight, dtype, device)
        self._bias = None if bias is None else placed(bias, dtype, device)

    def __call__(self, inputs: Tensor) -> Tensor:
        """``[tokens, in] -> [tokens, out]``, a new tensor."""
        return functional.linear(inputs, self._weight, self._bias)


class RoundingLinear:
    """Of ``own``, with each row of inputs rounded to integers of 8 bits with one scale."""

    def __init__(self, own: Callable[[Tensor], Tensor]) -> None:
        self._own = own

    def __call__(self, inputs: Tensor) -> Tensor:
        """See ``Linear``."""
        wide = inputs.float()
        factors = _MOST_OF_8_BITS / wide.abs().amax(-1, keepdim=True).clamp_(min=_LEAST)
        return self._own((wide * factors).round_().div_(factors).to(inputs.dtype))


class GatheredLinear:
    """Of ``own``, which has some of the outputs. It gathers them, and the inputs before, if they are ``cut``."""

    def __init__(
        self, own: Callable[[Tensor], Tensor], mates: ColumnMates, *, inputs: Cut | None = None, outputs: Cut
    ) -> None:
        self._own = own
        self._mates = mates
        self._inputs = inputs
        self._outputs = outputs

    def __call__(self, inputs: Tensor) -> Tensor:
        """See ``Linear``; ``inputs`` has the own columns if they are cut."""
        if self._inputs is not None:
            inputs = self._mates.gather(inputs, self._inputs)
        return self._mates.gather(self._own(inputs), self._outputs)


class SummedLinear:
    """Of ``own``, which has the weights of some of the inputs."""

    def __init__(self, own: Callable[[Tensor], Tensor], mates: ColumnMates) -> None:
        self._own = own
        self._mates = mates

    def __call__(self, inputs: Tensor) -> Tensor:
        """See ``Linear``; ``inputs`` has the own columns."""
        return self._mates.add_up(self._own(inputs))


def placed(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy, so that the mapped file can be closed."""
    return torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor)
