"""Queries and rows of latent attention (DeepSeek-AI 2024, arXiv 2405.04434), as plain torch operators.

Owns: the products of single heads, and what is stored of a token. Must not know: weights, rotation, attention.

A key is a product with a token's compressed row. So its score is that of the query times the same product, with the row
itself; and what values add up to is the product of what rows add up to (section 2.1.2). A row then serves all heads, as key
and as value.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LatentQkv:
    """``query`` gives ``[tokens, heads * key_dim]``; ``compress`` ``[tokens, rank + shared channels]``, of which ``norm`` takes
    the first ``rank``. ``absorb`` takes queries, ``[tokens, heads, key_dim]``, to ``[tokens, heads, rank]``. ``gates`` gives one
    for each head.
    """

    query: Callable[[Tensor], Tensor]
    compress: Callable[[Tensor], Tensor]
    norm: Callable[[Tensor], Tensor]
    absorb: Callable[[Tensor], Tensor]
    rank: int
    num_heads: int
    gates: Callable[[Tensor], Tensor] | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[tokens, (heads + 1) * row]``: queries, then the token's row, whose first channels are the shared ones, not rotated
        yet; then perhaps gates, as wide as queries.
        """
        compressed, queries = self.compress(hidden), self.query(hidden).view(len(hidden), self.num_heads, -1)
        shared = compressed[:, self.rank :]
        wide = torch.cat([queries[..., : shared.shape[1]], self.absorb(queries)], 2)
        made = [wide.flatten(1), shared, self.norm(compressed[:, : self.rank])]
        if self.gates is not None:
            made.append(self.gates(hidden).repeat_interleave(wide.shape[2], 1))
        return torch.cat(made, 1)


@dataclass(frozen=True, slots=True)
class LatentValues:
    """From sums of rows, ``[tokens, heads * row]``, to what heads give, ``[tokens, heads * width]``; ``expand`` takes
    ``[tokens, heads, rank]`` to ``[tokens, heads, width]``.
    """

    expand: Callable[[Tensor], Tensor]
    rank: int
    num_heads: int

    def __call__(self, attended: Tensor) -> Tensor:
        """See the class."""
        return self.expand(attended.view(len(attended), self.num_heads, -1)[..., -self.rank :]).flatten(1)


@dataclass(frozen=True, slots=True)
class HeadProducts:
    """A product of each head: ``weight`` ``[heads, in, out]``."""

    weight: Tensor

    def __call__(self, inputs: Tensor) -> Tensor:
        """``[tokens, heads, in] -> [tokens, heads, out]``."""
        return torch.bmm(inputs.transpose(0, 1), self.weight).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class InTurn:
    """Functions one after the other."""

    steps: tuple[Callable[[Tensor], Tensor], ...]

    def __call__(self, inputs: Tensor) -> Tensor:
        """The last one's result."""
        for step in self.steps:
            inputs = step(inputs)
        return inputs
