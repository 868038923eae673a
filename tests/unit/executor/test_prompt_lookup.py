"""Proposals out of the text so far, against a search that looks at everything."""

import numpy as np
import torch

from headway_executor.sampling.speculation.ngram import LONGEST, SHORTEST, PromptLookup, continuation
from headway_executor.sampling.speculation.proposer import Asked


def slowly(tokens: list[int], limit: int) -> list[int]:
    for length in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        for end in range(len(tokens) - 2, length - 2, -1):
            if tokens[end - length + 1 : end + 1] == tokens[-length:]:
                proposals = list(tokens)
                for _ in range(limit):
                    proposals.append(proposals[end + 1 + len(proposals) - len(tokens)])
                return proposals[len(tokens) :]
    return []


def test_the_search_finds_what_the_slow_one_finds() -> None:
    rng = np.random.default_rng(1)
    for _ in range(2000):
        tokens = rng.integers(0, int(rng.integers(2, 12)), size=int(rng.integers(1, 60)))
        if rng.random() < 0.3:
            tokens = np.resize(tokens[: int(rng.integers(1, 20))], len(tokens))
        limit = int(rng.integers(1, 12))
        assert continuation(tokens.astype(np.int32), limit).tolist() == slowly(tokens.tolist(), limit)


def test_a_repetition_goes_on_as_far_as_is_asked() -> None:
    assert continuation(np.array([7, 7, 7], dtype=np.int32), 5).tolist() == [7] * 5
    assert continuation(np.array([1, 2, 3, 1, 2, 3, 1, 2], dtype=np.int32), 5).tolist() == [3, 1, 2, 3, 1]


def test_the_longest_end_decides_and_then_the_latest_place() -> None:
    tokens = [1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3]
    assert continuation(np.array(tokens, dtype=np.int32), 1).tolist() == [9]
    assert continuation(np.array([4, *tokens[1:8], 7, 2, 3], dtype=np.int32), 1).tolist() == [8]
    assert continuation(np.array([1, 2, 3], dtype=np.int32), 4).tolist() == []


def test_proposals_stand_behind_the_tokens_of_their_rows() -> None:
    store = torch.zeros((3, 12), dtype=torch.int32)
    store[0, :4] = torch.tensor([5, 6, 5, 6], dtype=torch.int32)
    store[2, :3] = torch.tensor([1, 2, 3], dtype=torch.int32)
    rows, num_tokens, limits = (np.array(values, dtype=np.int64) for values in ([0, 2], [4, 3], [3, 3]))
    counts = PromptLookup().propose(Asked(rows, num_tokens, limits, np.zeros((2, 1), dtype=np.int32)), store)
    assert counts.tolist() == [3, 0]
    assert store[0].tolist() == [5, 6, 5, 6, 5, 6, 5, 0, 0, 0, 0, 0]
    assert store[2, 3:].eq(0).all()
