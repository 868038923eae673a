"""Speculative steps on a device: proposals reach the token store there, and run as rows of one token each.

Owns: how many proposals a step has room for, where their tokens are. Must not know: launches, how a proposer finds them.

A row with proposals is verified by decodes side by side: they share its block table, and each sees one position more than
the one before. So verification launches what decodes launch, in the same graphs, and a token has the bits that it would
have without proposals, as far as decodes do not depend on the size of a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from headway_executor.backend import NewRow, StepBatch, StepResult
from headway_executor.gpu.runtime import Mark
from headway_executor.models.forward import Int64Array
from headway_executor.sampling.speculation.proposer import Asked
from headway_executor.sampling.speculation.verification import (
    Draws,
    as_rows_of_one_token,
    asked_of,
    counting,
    num_accepted,
    result_of,
)
from headway_proto.columns import Int32Array
from headway_proto.step import RowError, RowLogprobs

MOST_PROPOSALS = 256
"""Of a step: in a batch in which more would be of use, products are no longer bound by memory."""

Tokens = Callable[[], Int32Array]
"""Of all draws or proposals in order, once the device has passed their copies; int32."""


def most_rows_of(max_num_seqs: int, max_num_batched_tokens: int, num_speculative_tokens: int) -> int:
    """The rows of the largest step, if each may have so many proposals."""
    proposals = min(num_speculative_tokens * max_num_seqs, MOST_PROPOSALS)
    return max(max_num_seqs, min(max_num_seqs + proposals, max_num_batched_tokens, 65_535))


class DeviceProposer(Protocol):
    """A ``Proposer`` whose proposals reach the device's token store."""

    def follow(self, batch: StepBatch, new_rows: tuple[NewRow, ...]) -> None:
        """Record a step before it runs; ``new_rows`` as they are stored."""
        ...

    def draw(self, batch: StepBatch, drawn: Tokens, reached: Mark) -> None:
        """Record what a step draws, which can be asked for once the device has reached a mark."""
        ...

    def write(self, rows: Int32Array, positions: Int32Array, tokens: Int32Array) -> None:
        """Record tokens that another rank drew; all ``[n]``."""
        ...

    def forget_blocks(self, blocks: Int32Array) -> None:
        """See ``Proposer``."""
        ...

    def propose(self, asked: Asked) -> tuple[Int64Array, Tokens]:
        """Store proposals behind the known tokens; return their counts, int64, ``[n]``, and what they are."""
        ...

    def settle(self, asked: Asked, num_proposed: Int64Array, num_accepted: Int64Array) -> None:
        """See ``Proposer``."""
        ...


@dataclass(frozen=True, slots=True)
class SpeculativeStep:
    """A step with its proposals, ``batch``: rows occur once for each of their draws."""

    batch: StepBatch
    asked: Asked
    counts: Int64Array
    draws: Draws
    tokens: Tokens
    proposer: DeviceProposer

    def result(
        self, drawn: Int32Array, logprobs: Sequence[RowLogprobs], errors: Sequence[RowError]
    ) -> tuple[Int32Array, StepResult]:
        """The rows of the tokens that count, int32, and the step's result; ``drawn`` int32, of all draws."""
        accepted = num_accepted(drawn, self.draws, self.asked, self.tokens(), self.counts)
        kept = counting(self.draws, self.asked, accepted)
        self.proposer.settle(self.asked, self.counts, accepted)
        found = result_of(drawn, logprobs, errors, kept, self.draws, self.asked, self.counts, accepted)
        return self.draws.numbers[kept].astype(np.int32), found


class DeviceSpeculation:
    """The steps with proposals of an open model that has memory for steps of so many rows and tokens."""

    def __init__(self, proposer: DeviceProposer, *, most_rows: int, most_tokens: int) -> None:
        self.proposer = proposer
        self._most_rows = most_rows
        self._most_tokens = most_tokens

    def propose(self, batch: StepBatch, refused: frozenset[int]) -> SpeculativeStep:
        """Find and store proposals for a step with ``num_speculative_tokens``.

        It is answered before the next one is sent, so the host's block table stays as it is.
        """
        assert batch.num_speculative_tokens is not None
        asked = self._within_room(asked_of(batch, batch.num_speculative_tokens, refused), batch)
        counts, tokens = self.proposer.propose(asked)
        rows, draws = as_rows_of_one_token(batch, asked, counts)
        return SpeculativeStep(rows, asked, counts, draws, tokens, self.proposer)

    def _within_room(self, asked: Asked, batch: StepBatch) -> Asked:
        """A proposal less costs time at most; the first rows get theirs."""
        room = min(self._most_rows - len(batch.rows), self._most_tokens - int(batch.num_scheduled_tokens.sum()))
        before = np.cumsum(asked.limits) - asked.limits
        return replace(asked, limits=np.clip(room - before, 0, asked.limits))
