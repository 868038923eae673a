"""What leaves a step that speculates has the target's distribution: a chi-square test with the real sampler.

The model is a table: the logits after each token. Of every row, two tokens are drawn: the first, and behind it the second,
in the same step if the first was what had been proposed and in the next step otherwise.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from headway_executor.backend import StepBatch
from headway_executor.sampling.sampler import Sampler
from headway_executor.sampling.speculation.proposer import Asked
from headway_executor.sampling.speculation.verification import counting, num_accepted, with_proposals
from headway_proto.columns import Int32Array
from headway_proto.sampling import SamplingParams

VOCAB_SIZE = 6
NUM_ROWS = 30_000
LEAST_P_VALUE = 0.001
"""The draws are the same in every run, so the test is too: it does not fail once in a thousand times."""

NONE = np.zeros((2, 0), dtype=np.int32)


def p_value(observed: np.ndarray, expected: np.ndarray) -> float:
    """Of Pearson's statistic, by Wilson and Hilferty's approximation (1931)."""
    freedom = len(observed) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    spread = 2 / (9 * freedom)
    deviation = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(deviation / math.sqrt(2))


def two_tokens_each(
    table: Tensor, sampler: Sampler, propose: Callable[[Asked, Tensor], Int32Array]
) -> tuple[np.ndarray, float]:
    """Both tokens of each row, shape ``[rows, 2]``, and which share of the proposals was right."""
    store = torch.zeros((NUM_ROWS, 4), dtype=torch.int32)
    rows = np.arange(NUM_ROWS, dtype=np.int32)
    ones = np.ones_like(rows)
    batch = StepBatch(
        step=0,
        finished_rows=NONE[0],
        new_rows=(),
        new_blocks=NONE,
        rows=rows,
        num_scheduled_tokens=ones,
        num_computed_tokens=0 * rows,
        samples=ones,
        block_table=np.zeros((NUM_ROWS, 1), dtype=np.int32),
    )
    wide = rows.astype(np.int64)
    counts = np.ones_like(wide)
    asked = Asked(wide, counts, counts, batch.block_table)
    store[:, 1] = torch.from_numpy(propose(asked, store))
    _, draws = with_proposals(batch, asked, counts)
    numbers, positions = torch.from_numpy(draws.numbers), torch.from_numpy(draws.positions)
    drawn = sampler.sample(table[store[numbers, positions - 1].long()], numbers, positions, store).token_ids
    host = drawn.to(torch.int32).numpy()
    accepted = num_accepted(host, draws, asked, store[:, 1].numpy().copy(), counts)
    kept = counting(draws, asked, accepted)
    store[numbers[kept], positions[kept]] = drawn[kept].to(torch.int32)
    late = torch.from_numpy(np.flatnonzero(accepted == 0))
    logits = table[store[late, 1].long()]
    store[late, 2] = sampler.sample(logits, late, torch.full_like(late, 2), store).token_ids.to(torch.int32)
    return store[:, 1:3].numpy(), float(accepted.mean())


@pytest.mark.parametrize("proposes", ["the likeliest", "the least likely", "a coupled draft", "the draft is the model"])
def test_the_distribution_is_the_targets(proposes: str) -> None:
    torch.manual_seed(3)
    table, other = torch.randn(VOCAB_SIZE, VOCAB_SIZE) * 1.3, torch.randn(VOCAB_SIZE, VOCAB_SIZE) * 0.5
    sampler = Sampler(vocab_size=VOCAB_SIZE, max_num_rows=NUM_ROWS, device=torch.device("cpu"))
    for row in range(NUM_ROWS):
        sampler.add_row(row, SamplingParams(temperature=1.0, seed=1000 + row), 1)
    own = table if proposes == "the draft is the model" else table + other

    def propose(asked: Asked, store: Tensor) -> Int32Array:
        if proposes == "the likeliest":
            return np.full(NUM_ROWS, int(table[0].argmax()), dtype=np.int32)
        if proposes == "the least likely":
            return np.full(NUM_ROWS, int(table[0].argmin()), dtype=np.int32)
        rows = torch.from_numpy(asked.numbers)
        token_ids = sampler.sample(own[store[rows, 0].long()], rows, torch.ones_like(rows), store).token_ids
        return token_ids.to(torch.int32).numpy()

    tokens, acceptance = two_tokens_each(table, sampler, propose)
    first = table[0].double().softmax(-1).numpy()
    chances = first[:, None] * table.double().softmax(-1).numpy()
    observed = np.bincount(tokens[:, 0] * VOCAB_SIZE + tokens[:, 1], minlength=VOCAB_SIZE**2)
    assert p_value(observed, chances.ravel() * NUM_ROWS) > LEAST_P_VALUE
    if proposes == "the draft is the model":
        assert acceptance == 1.0
    elif proposes != "a coupled draft":  # a proposal is right as often as the target draws it
        likely = first.max() if proposes == "the likeliest" else first.min()
        assert abs(acceptance - likely) < 4 * math.sqrt(likely * (1 - likely) / NUM_ROWS)


def test_the_statistic_finds_a_distribution_that_is_not() -> None:
    expected = np.full(10, 1000.0)
    assert p_value(expected + 10, expected) > 0.5
    skewed = expected.copy()
    skewed[0] += 250
    assert p_value(skewed, expected) < LEAST_P_VALUE
