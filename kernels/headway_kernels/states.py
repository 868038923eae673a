"""What a layer with a state has beside its products.

Owns: these tensors together. Must not know: checkpoints, devices, how a state is computed.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class HeadNumbers(NamedTuple):
    """Of each head: ``decay`` (below 0) times a step gives the logarithm of what stays, ``step_bias`` is added to steps, and
    ``skip`` times a value to the result, or None; all ``[heads]``. ``norm`` ``[norms, norm_dim]``: of heads, or of all channels;
    or None.
    """

    decay: Tensor
    step_bias: Tensor
    skip: Tensor | None
    norm: Tensor | None

    def each(self, change: Callable[[Tensor], Tensor]) -> "HeadNumbers":
        """The same, each tensor changed."""
        skip, norm = (None if part is None else change(part) for part in (self.skip, self.norm))
        return HeadNumbers(change(self.decay), change(self.step_bias), skip, norm)


class Convolution(NamedTuple):
    """``taps`` ``[channels, taps]``, oldest first; ``bias`` ``[channels]`` or None."""

    taps: Tensor
    bias: Tensor | None
