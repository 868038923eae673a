"""The ways to make one vector of a prompt's hidden states.

Owns: their numbers on the wire, their names, and which need every hidden state. Must not know: how they are computed.
"""

NO_POOLING = 0
"""The request generates tokens."""

POOL_LAST = 1
"""The last token's hidden state, behind the final norm."""

POOL_MEAN = 2
"""The mean over all tokens."""

POOL_CLS = 3
"""The first token's."""

POOL_SCORE = 4
"""The score of a pair of texts, by the head of a reranker, which makes nothing else: one number."""

_NEEDS_ALL = frozenset({POOL_MEAN, POOL_CLS, POOL_SCORE})


def needs_every_token(pooling: int) -> bool:
    """Whether all tokens must run in one stay of the request: the KV cache keeps no hidden states."""
    return pooling in _NEEDS_ALL


def is_known(pooling: int) -> bool:
    """Whether it is one of the numbers above."""
    return NO_POOLING <= pooling <= POOL_SCORE
