"""A rank that draws no tokens: it computes its part of each step and takes in the tokens that rank 0 draws.

Owns: what such a rank knows of its rows. Must not know: sampling, constraints.
"""

import time

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from headway_executor.backend import BackendConfig, StepBatch, StepResult
from headway_executor.models.forward import ForwardPass, StepRows, step_rows
from headway_executor.ranks.channel import Channel
from headway_executor.sampling.drawn_tokens import DrawnTokensIn
from headway_executor.sampling.pooling import PooledPart, PooledRows, whole_result, without
from headway_executor.sampling.prompt_logprobs import PromptReports, run_ahead_unreported
from headway_executor.sampling.refusals import Refusals
from headway_executor.sampling.speculation.proposer import Proposer
from headway_executor.sampling.speculation.verification import asked_of, with_proposals
from headway_proto.columns import EMPTY_COLUMN, Int32Array


class FollowingModel:
    """The steps of one rank. Its answers have the right number of tokens, all 0."""

    def __init__(
        self,
        config: BackendConfig,
        forward: ForwardPass,
        channel: Channel,
        proposer: Proposer | None,
        *,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self.forward = forward
        self._token_ids = torch.zeros((config.max_num_seqs, max_model_len + 1), dtype=torch.int32)
        self._drawn = DrawnTokensIn(channel, self._write, config.place)
        self._refusals = Refusals(vocab_size)
        self._prompts = PromptReports()
        self._pooled = PooledRows()
        self._proposer = proposer
        self._vocab_size = vocab_size

    def move_blocks(self, *, copies: Int32Array, swap_out: Int32Array, swap_in: Int32Array) -> None:
        """See ``ExecutorBackend.move_blocks``."""
        self.forward.pool.move(copies=copies, swap_out=swap_out, swap_in=swap_in)

    def load_blocks(self, contents: NDArray[np.uint8], blocks: Int32Array) -> None:
        """See ``ExecutorBackend.load_blocks``."""
        self.forward.pool.load_blocks(contents, blocks)

    def execute(self, batch: StepBatch) -> StepResult:
        """See ``ExecutorBackend.execute``."""
        started = time.perf_counter_ns()
        self._refusals.forget(batch.finished_rows)
        self._drawn.take_in(batch)
        adapters = self.forward.adapters
        if adapters is not None:
            adapters.leave(batch.finished_rows)
        for new in batch.new_rows:
            token_ids = self._refusals.admit(new.row, new.token_ids)
            self._token_ids[new.row, : len(token_ids)] = torch.from_numpy(token_ids.astype(np.int32))
            if adapters is not None and (why_not := adapters.enter(new.row, new.adapter)):
                self._refusals.add({new.row: why_not})
        self._prompts.begin_step(batch)
        self._pooled.begin_step(batch)
        if not len(batch.rows):
            return StepResult(sampled_token_ids=EMPTY_COLUMN)
        part = self._pooled.part_of(batch)
        result = self._run(batch) if part is None else self._pool(batch, part)
        elapsed_us = (time.perf_counter_ns() - started) // 1000
        return msgspec.structs.replace(result, device_time_us=elapsed_us)

    def _write(self, rows: Int32Array, positions: Int32Array, drawn: Int32Array) -> None:
        self._token_ids[rows, positions] = torch.from_numpy(drawn)

    def _pool(self, batch: StepBatch, part: PooledPart) -> StepResult:
        """A step with pooled rows: first the others, as on rank 0."""
        rest = without(batch, part)
        result = self._run(rest) if len(rest.rows) else StepResult(sampled_token_ids=EMPTY_COLUMN)
        self.forward.hidden(part.rows, self._token_ids)
        return whole_result(rest, result, part, (), ())

    def _run(self, batch: StepBatch) -> StepResult:
        rows, accepted, num_draws = step_rows(batch), None, int(np.count_nonzero(batch.samples))
        num_sampled = num_draws
        if batch.num_speculative_tokens is not None:
            assert self._proposer is not None
            refused = frozenset(self._refusals.among(batch.rows))
            asked = asked_of(batch, batch.num_speculative_tokens, refused)
            counts = self._proposer.propose(asked, self._token_ids)
            accepted = np.stack((asked.numbers, counts, np.zeros_like(counts))).astype(np.int32)
            if counts.any():
                rows, draws = with_proposals(batch, asked, counts)
                num_draws = len(draws.numbers)
        self._forward(batch, rows)
        if num_draws:
            self._drawn.expect(batch.rows[batch.samples != 0], num_draws)
        return StepResult(sampled_token_ids=np.zeros(num_sampled, dtype=np.int32), accepted_tokens=accepted)

    def _forward(self, batch: StepBatch, rows: StepRows) -> None:
        chunks = self._prompts.chunks(batch)
        if chunks:
            rows = run_ahead_unreported(self.forward, rows, self._token_ids, chunks, vocab_size=self._vocab_size)
        if len(rows.numbers):
            self.forward.run(rows, self._token_ids)
