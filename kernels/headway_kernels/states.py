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

    Without ``step_bias`` there are no steps, and ``decay`` is the logarithm. Where each channel of a key has a step, ``step_bias`` is ``[heads * key_dim]``. Where each channel of a value has one, there
    are ``decay`` ``[key_dim, channels]`` and others ``[channels]``, and ``selection_norm`` ``[step_rank + 2 * key_dim]``, or
    None. With ``blocks`` ``[2, num_blocks, width, width]``, inputs before outputs, and ``block_bias`` ``[2, channels]``, there is
    ``decay`` ``[channels]`` beside.
    """

    decay: Tensor
    step_bias: Tensor | None
    skip: Tensor | None
    norm: Tensor | None
    selection_norm: Tensor | None = None
    blocks: Tensor | None = None
    block_bias: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> "HeadNumbers":
        """The same, each tensor changed."""
        return HeadNumbers(*(None if part is None else change(part) for part in self))  # type: ignore[arg-type]


class Convolution(NamedTuple):
    """``taps`` ``[channels, taps]``, oldest first; ``bias`` ``[channels]`` or None."""

    taps: Tensor
    bias: Tensor | None
