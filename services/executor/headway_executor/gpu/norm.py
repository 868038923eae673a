"""Norms of whole rows on a device, and products behind them.

Owns: which kernel computes a norm. Must not know: where in a layer a norm stands.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from headway_executor.gpu.linear import DeviceLinear
from headway_kernels.gpu.norm import add_layer_norm, add_rms_norm


@dataclass(frozen=True, slots=True)
class DeviceNorm:
    """By the root mean square, or if it ``is_centred`` a layer norm; ``weight`` and ``bias`` (or None) ``[width]``."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    is_centred: bool

    def __call__(self, rows: Tensor, update: Tensor | None, out: Tensor, factor: Tensor | None = None) -> None:
        """Add ``update`` (or nothing) to ``rows`` in place, then normalise them to ``out``, which may be either of the two.

        A ``factor``, ``[1]``, multiplies the sum, also in place.
        """
        if self.is_centred:
            assert factor is None, "no such model has layer norms"
            add_layer_norm(rows, update, self.weight, self.bias, out, eps=self.eps)
        else:
            add_rms_norm(rows, update, self.weight, out, eps=self.eps, factor=factor)


class NormedLinear(NamedTuple):
    """A ``DeviceLinear`` behind a norm, which changes the inputs."""

    norm: DeviceNorm
    product: DeviceLinear

    def __call__(self, inputs: Tensor, out: Tensor) -> None:
        """See ``DeviceLinear``."""
        self.norm(inputs, None, inputs)
        self.product(inputs, out)
