"""Which keys an index lets a query see."""

import numpy as np
import pytest
import torch

from headway_executor.models.key_index import IndexedTokens

NUM_CHOSEN = 3


def chosen(scores: list[list[float]], *, num_hidden: int = 0) -> list[list[int]]:
    """The places that each of some new tokens sees, whose keys score so; the last ``num_hidden`` are not visible."""
    width = len(scores[0])
    keys = torch.eye(width)[None]
    index = IndexedTokens(torch.tensor(scores)[:, None], torch.ones(len(scores), 1), keys[0], NUM_CHOSEN)
    visible = torch.ones(1, len(scores), width, dtype=torch.bool)
    visible[..., width - num_hidden :] = False
    seen = index.chosen(keys, visible)
    assert seen.shape == (1, 1, len(scores), width)
    return [row.nonzero().flatten().tolist() for row in seen[0, 0]]


def test_the_best_are_seen() -> None:
    assert chosen([[1.0, 5.0, 2.0, 4.0, 3.0], [9.0, 1.0, 8.0, 7.0, 2.0]]) == [[1, 3, 4], [0, 2, 3]]


def test_of_equal_ones_the_first() -> None:
    """Scores below zero are zeros."""
    assert chosen([[-1.0, -2.0, 4.0, -3.0, -4.0]]) == [[0, 1, 2]]
    assert chosen([[2.0, 4.0, 2.0, 4.0, 2.0]]) == [[0, 1, 3]]


def test_what_is_not_visible_is_not_seen() -> None:
    assert chosen([[1.0, 2.0, 3.0, 8.0, 9.0]], num_hidden=2) == [[0, 1, 2]]
    assert chosen([[1.0, 2.0, 3.0, 8.0, 9.0]], num_hidden=3) == [[0, 1]], "of two, both"


@pytest.mark.parametrize("num_heads", [1, 5])
def test_scores_are_those_of_all_heads_by_their_weights(num_heads: int) -> None:
    torch.manual_seed(num_heads)
    rows, new, width, head_dim = 2, 3, 11, 4
    queries, keys = torch.randn(rows * new, num_heads, head_dim), torch.randn(rows, width, head_dim)
    weights = torch.randn(rows * new, num_heads)
    index = IndexedTokens(queries, weights, keys[0], NUM_CHOSEN)
    seen = index.chosen(keys, torch.ones(1, new, width, dtype=torch.bool))
    by_head = torch.einsum("rthd,rwd->rthw", queries.view(rows, new, num_heads, head_dim), keys).relu()
    scores = torch.einsum("rthw,rth->rtw", by_head, weights.view(rows, new, num_heads))
    for row, token in np.ndindex(rows, new):
        best = scores[row, token].sort(descending=True, stable=True).indices[:NUM_CHOSEN]
        assert seen[row, 0, token].nonzero().flatten().tolist() == sorted(best.tolist())
