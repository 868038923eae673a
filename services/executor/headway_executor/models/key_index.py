"""An index of keys: the few that a query sees (DeepSeek-AI 2025, "DeepSeek-V3.2-Exp", section 1; in transformers, GLM-5).

Owns: scores, and the choice. Must not know: weights, where keys are stored, attention.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import functional

from headway_executor.models.rope import rotate_

INDEX_EPS = 1e-6
"""Of the norm of an index's keys, whatever the other norms have."""


@dataclass(frozen=True, slots=True)
class IndexedTokens:
    """What new tokens ask and are asked: ``queries`` ``[tokens, heads, head_dim]``, with ``weights`` float32, ``[tokens, heads]``,
    and ``keys`` ``[tokens, head_dim]``. A query sees ``num_chosen`` keys at most.
    """

    queries: Tensor
    weights: Tensor
    keys: Tensor
    num_chosen: int

    def part(self, tokens: slice) -> "IndexedTokens":
        """Those of some tokens."""
        return replace(self, queries=self.queries[tokens], weights=self.weights[tokens], keys=self.keys[tokens])

    def chosen(self, keys: Tensor, visible: Tensor) -> Tensor:
        """Which keys the queries of ``rows`` see: bool, ``[rows, 1, new, keys]``.

        ``keys`` ``[rows, keys, head_dim]``, each row's own, more than ``num_chosen``; ``visible`` bool, of that shape without the
        second dimension, or one for all rows. Of ``rows``, each has as many new tokens.
        """
        rows, width = keys.shape[0], keys.shape[1]
        shape = (rows, len(self.queries) // rows)
        across, weights = keys.float().transpose(1, 2), self.weights.view(*shape, -1)
        queries = self.queries.view(*shape, *self.queries.shape[1:])
        # Head by head: the scores of all heads would take more memory than all keys.
        scores = across.new_zeros(*shape, width)
        for head in range(queries.shape[2]):
            scores += functional.relu(queries[:, :, head].float() @ across) * weights[:, :, head, None]
        scores.masked_fill_(~visible, float("-inf"))
        least = scores.topk(self.num_chosen, -1).values[..., -1:]
        # Of equal scores, which are zeros, the first ones: whatever lies beside this row.
        seen, level = scores > least, scores == least
        num_left = self.num_chosen - seen.sum(-1, keepdim=True)
        return seen.logical_or_(level & (level.cumsum(-1) <= num_left)).logical_and_(visible)[:, None]


@dataclass(frozen=True, slots=True)
class KeyIndex:
    """``compress`` gives the normed compressed row that ``queries`` read; ``keys`` normed keys. ``weights`` float32,
    ``[heads, hidden]``.
    """

    compress: Callable[[Tensor], Tensor]
    queries: Callable[[Tensor], Tensor]
    keys: Callable[[Tensor], Tensor]
    weights: Tensor
    num_chosen: int

    def __call__(self, hidden: Tensor, rotation: Tensor) -> IndexedTokens:
        """Of ``hidden``, ``[tokens, hidden]``; ``rotation``: see ``rotate_``."""
        num_heads = len(self.weights)
        keys = self.keys(hidden)
        queries = self.queries(self.compress(hidden)).view(len(hidden), num_heads, keys.shape[1])
        rotate_(queries, rotation)
        rotate_(keys[:, None], rotation)
        weights = functional.linear(hidden.float(), self.weights) * (num_heads * keys.shape[1]) ** -0.5
        return IndexedTokens(queries, weights, keys, self.num_chosen)
