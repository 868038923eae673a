"""The token ids that end some running request.

Owns: how many requests stop at each id. Must not know: which ones.

Most requests share a few sets of stop tokens, so sets are counted first.
"""

from collections import Counter

import numpy as np


class StopTokens:
    """``ends_some``, shape ``[vocab_size]``: whether a running request stops here."""

    def __init__(self, vocab_size: int) -> None:
        self.ends_some = np.zeros(vocab_size, dtype=np.bool_)
        self._uses_of_set: dict[frozenset[int], int] = {}
        self._sets_with: Counter[int] = Counter()

    def add(self, token_ids: frozenset[int]) -> None:
        """Count a running request that stops at these ids."""
        uses = self._uses_of_set.get(token_ids, 0)
        self._uses_of_set[token_ids] = uses + 1
        if not uses:
            self._count(token_ids, 1)

    def remove(self, token_ids: frozenset[int]) -> None:
        """Count one such request less."""
        uses = self._uses_of_set[token_ids] - 1
        if uses:
            self._uses_of_set[token_ids] = uses
        else:
            del self._uses_of_set[token_ids]
            self._count(token_ids, -1)

    def _count(self, token_ids: frozenset[int], change: int) -> None:
        for token_id in token_ids:
            self._sets_with[token_id] += change
            self.ends_some[token_id] = self._sets_with[token_id] > 0
            if not self._sets_with[token_id]:
                del self._sets_with[token_id]
