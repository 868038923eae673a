"""Proposals by prompt lookup: the tokens that followed an earlier occurrence of the row's last few tokens.

Owns: the search. Must not know: models.

It takes the latest occurrence of the longest suffix of ``LONGEST`` to ``SHORTEST`` tokens. Close to the end, the
repetition goes on (Saxena, "Prompt lookup decoding", 2023).
"""

import numpy as np
import torch
from torch import Tensor

from headway_executor.backend import StepBatch
from headway_executor.models.forward import Int64Array
from headway_executor.sampling.speculation.proposer import Asked
from headway_proto.columns import EMPTY_COLUMN, Int32Array

LONGEST = 8
SHORTEST = 2


class PromptLookup:
    """A ``Proposer`` without a state."""

    def follow(self, batch: StepBatch) -> None:
        """See ``Proposer.follow``."""

    def forget_blocks(self, blocks: Int32Array) -> None:
        """See ``Proposer.forget_blocks``."""

    def propose(self, asked: Asked, token_ids: Tensor) -> Int64Array:
        """See ``Proposer.propose``."""
        counts = np.zeros(len(asked.numbers), dtype=np.int64)
        for place, (row, num_tokens, limit) in enumerate(
            zip(asked.numbers.tolist(), asked.num_tokens.tolist(), asked.limits.tolist(), strict=True)
        ):
            found = continuation(token_ids[row, :num_tokens].cpu().numpy(), limit)
            counts[place] = len(found)
            if len(found):
                token_ids[row, num_tokens : num_tokens + len(found)] = torch.from_numpy(found)
        return counts

    def settle(self, asked: Asked, num_proposed: Int64Array, num_accepted: Int64Array) -> None:
        """See ``Proposer.settle``."""


def continuation(token_ids: Int32Array, limit: int) -> Int32Array:
    """Propose ``limit`` tokens (int32) or none."""
    last = len(token_ids) - 1
    ends = np.flatnonzero(token_ids[:last] == token_ids[last])
    length = 1
    while len(ends) and length < LONGEST:
        longer = ends[ends >= length]
        longer = longer[token_ids[longer - length] == token_ids[last - length]]
        if not len(longer):
            break
        ends = longer
        length += 1
    if not len(ends) or length < SHORTEST:
        return EMPTY_COLUMN
    distance = last - int(ends[-1])
    if limit <= distance:
        return token_ids[last + 1 - distance :][:limit].copy()
    return np.resize(token_ids[last + 1 - distance :], limit)
