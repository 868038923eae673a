"""Proposals by a second, smaller model with the same vocabulary.

Owns: the draft's passes, and how far its keys and values reach. Must not know: verification.

The draft's pool has as many blocks as the target's, and both share the block tables. A row first computes its missing
positions in one chunk. New, swapped-in or copied-into blocks count as empty; shared blocks do not. The draft draws with
the target's random numbers: where the distributions agree, so do the draws.
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headway_executor.backend import StepBatch
from headway_executor.models.forward import ForwardPass, Int64Array, StepRows, last_tokens
from headway_executor.sampling.sampler import Sampler
from headway_executor.sampling.speculation.proposer import Asked
from headway_proto.columns import Int32Array
from headway_proto.step import ERRORED_ROW


class DraftPass(Protocol):
    """Runs the draft model."""

    def __call__(self, rows: StepRows, token_ids: Tensor) -> Int32Array:
        """Run ``rows``, draw the token behind each, and store it there in ``token_ids``.

        Return what was drawn, int32, ``[n]``, or ``ERRORED_ROW``; where nobody waits for it, zeros.
        """
        ...


class DraftForward:
    """A ``DraftPass`` of torch operators or the CPU kernels."""

    def __init__(self, forward: ForwardPass, sampler: Sampler) -> None:
        self._forward = forward
        self._sampler = sampler

    def __call__(self, rows: StepRows, token_ids: Tensor) -> Int32Array:
        """See ``DraftPass``."""
        logits = self._forward.run(rows, token_ids)
        ends = rows.num_computed + rows.num_new
        numbers, positions = (torch.from_numpy(column).to(token_ids.device) for column in (rows.numbers, ends))
        sampled = self._sampler.sample(logits, numbers, positions, token_ids).token_ids
        token_ids[numbers, positions] = sampled.clamp(min=0).to(torch.int32)
        drawn: Int32Array = sampled.to("cpu", torch.int32).numpy()
        return drawn


class DraftModel:
    """``run`` has a pool of ``num_blocks``, as many as the target, of ``block_size`` positions."""

    def __init__(self, run: DraftPass, *, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self._run = run
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._num_filled = np.zeros(num_blocks, dtype=np.int64)

    def follow(self, batch: StepBatch) -> None:
        """See ``Proposer.follow``."""
        rows, blocks = batch.new_blocks
        if not len(blocks):
            return
        first = 0
        for new in batch.new_rows:
            # The blocks of new rows come first, in their order; computed ones among them are shared with other rows.
            num_held = -(-new.num_computed_tokens // self._block_size)
            own = int(np.count_nonzero(rows[first:] == new.row))
            self.forget_blocks(blocks[first + num_held : first + own])
            first += own
        self.forget_blocks(blocks[first:])

    def forget_blocks(self, blocks: Int32Array) -> None:
        """See ``Proposer.forget_blocks``."""
        self._num_filled[blocks] = 0

    def propose(self, asked: Asked, token_ids: Tensor) -> Int64Array:
        """See ``Proposer.propose``."""
        limits = np.minimum(asked.limits, self._max_model_len - asked.num_tokens)
        counts = np.zeros_like(limits)
        going = np.flatnonzero(limits > 0)
        starts = np.minimum(self._reaches(asked), asked.num_tokens - 1)
        while len(going):
            ends = asked.num_tokens[going] + counts[going]
            drawn = self._draw(asked, going, starts[going], ends, token_ids)
            starts[going] = ends
            going = going[drawn != ERRORED_ROW]
            counts[going] += 1
            going = going[counts[going] < limits[going]]
        return counts

    def settle(self, asked: Asked, num_proposed: Int64Array, num_accepted: Int64Array) -> None:
        """See ``Proposer.settle``."""
        size = self._block_size
        for place in np.flatnonzero(num_proposed).tolist():
            proposed, accepted = int(num_proposed[place]), int(num_accepted[place])
            first = int(asked.num_tokens[place])
            # The last proposal was drawn but not run.
            reached = first + min(accepted, proposed - 1)
            indices = np.arange(-(-(first + proposed) // size))
            self._num_filled[asked.tables[place, : len(indices)]] = np.clip(reached - indices * size, 0, size)

    def _reaches(self, asked: Asked) -> Int64Array:
        """Return how many leading positions of each row the draft has computed."""
        size = self._block_size
        reached = np.zeros_like(asked.num_tokens)
        for place, (table, num_tokens) in enumerate(zip(asked.tables, asked.num_tokens.tolist(), strict=True)):
            filled = self._num_filled[table[: -(-num_tokens // size)]]
            short = np.flatnonzero(filled < size)
            reached[place] = int(short[0]) * size + int(filled[short[0]]) if len(short) else len(filled) * size
        return reached

    def _draw(
        self, asked: Asked, places: Int64Array, starts: Int64Array, ends: Int64Array, token_ids: Tensor
    ) -> Int32Array:
        num_new = ends - starts
        rows = StepRows(asked.numbers[places], num_new, starts, asked.tables[places], last_tokens(num_new))
        return self._run(rows, token_ids)
