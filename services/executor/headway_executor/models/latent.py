"""Queries, keys and values of latent attention (DeepSeek-AI 2024, arXiv 2405.04434), as plain torch operators.

Owns: expanding compressed rows. Must not know: weights, rotation, attention.

Keys and values are expanded before they are stored, so a pool holds whole heads, as with other attention.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LatentQkv:
    """``query`` gives ``[tokens, heads * key_dim]``; ``compress`` ``[tokens, rank + shared channels]``.

    ``expand`` takes the first ``rank`` columns of that to keys, then values, ``[tokens, 2 * heads * key_dim]``. The other
    columns are channels that all keys share, at ``places`` (int64) of a head. ``gates`` gives as many columns as ``query``.
    """

    query: Callable[[Tensor], Tensor]
    compress: Callable[[Tensor], Tensor]
    expand: Callable[[Tensor], Tensor]
    rank: int
    num_heads: int
    places: Tensor
    gates: Callable[[Tensor], Tensor] | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[tokens, 3 * heads * key_dim]``: queries, keys, values, and perhaps gates; keys are not rotated yet."""
        compressed = self.compress(hidden)
        expanded = self.expand(compressed[:, : self.rank])
        heads = expanded.view(len(hidden), 2 * self.num_heads, -1)
        heads[:, : self.num_heads].index_copy_(
            2, self.places, compressed[:, None, self.rank :].expand(-1, self.num_heads, -1)
        )
        return torch.cat([self.query(hidden), expanded, *([] if self.gates is None else [self.gates(hidden)])], 1)


@dataclass(frozen=True, slots=True)
class InTurn:
    """Functions one after the other."""

    steps: tuple[Callable[[Tensor], Tensor], ...]

    def __call__(self, inputs: Tensor) -> Tensor:
        """The last one's result."""
        for step in self.steps:
            inputs = step(inputs)
        return inputs
