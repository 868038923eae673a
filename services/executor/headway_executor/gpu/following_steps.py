"""The steps of a device that draws no tokens: another rank does, and tells them.

Owns: what such a rank knows of its rows. Must not know: sampling, constraints, how a kernel computes.
"""

from collections.abc import Callable

import numpy as np

from headway_executor.backend import StepBatch, StepResult
from headway_executor.gpu.device_parts import DeviceParts
from headway_executor.gpu.device_stage import DeviceStage
from headway_executor.gpu.open_model import nothing_drawn
from headway_executor.gpu.proposers import speculation_over
from headway_executor.gpu.runtime import fetched
from headway_executor.gpu.step_columns import shape_of
from headway_executor.gpu.tokens_among_mates import TokensAmongMates
from headway_executor.ranks.channel import Channel
from headway_executor.sampling.drawn_tokens import DrawnTokensIn
from headway_executor.sampling.refusals import Refusals
from headway_proto.columns import Int32Array


class FollowingSteps:
    """A ``StepLauncher``. Its answers have the right number of tokens, all 0. Tokens come from ``mates``, or else by ``channel``.

    Where rows speculate, it has the proposals of rank 0.
    """

    def __init__(
        self, parts: DeviceParts, stage: DeviceStage, mates: TokensAmongMates | None, channel: Channel | None
    ) -> None:
        config = parts.config
        self._parts = parts
        self._stage = stage
        self._mates = mates
        self._drawn = None if channel is None else DrawnTokensIn(channel, self._write, config.place)
        self._refusals = Refusals(parts.vocab_size)
        self._adapters = parts.adapters.adapters
        self._speculation = speculation_over(parts)

    def run(self, batch: StepBatch) -> Callable[[], StepResult]:
        """See ``StepLauncher``."""
        self._begin(batch)
        if not len(batch.rows):
            return nothing_drawn
        num_sampled, accepted = int(np.count_nonzero(batch.samples)), None
        if self._speculation is not None and batch.num_speculative_tokens is not None:
            step = self._speculation.propose(batch, frozenset(self._refusals.among(batch.rows)))
            batch = step.batch
            # What was right, rank 0 says.
            accepted = np.stack((step.asked.numbers, step.counts, np.zeros_like(step.counts))).astype(np.int32)
        shape = shape_of(batch)
        self._stage.receive(shape.num_tokens)
        self._parts.launch(batch, shape)
        pass_on = self._stage.pass_on(shape.num_tokens)
        if shape.num_sampled:
            self._take_draws(batch, shape.num_sampled)

        def build() -> StepResult:
            pass_on()
            return StepResult(sampled_token_ids=np.zeros(num_sampled, dtype=np.int32), accepted_tokens=accepted)

        return build

    def _begin(self, batch: StepBatch) -> None:
        """Take in what the step changes."""
        self._refusals.forget(batch.finished_rows)
        if self._drawn is not None:
            self._drawn.take_in(batch)
        self._adapters.leave(batch.finished_rows)
        for new in batch.new_rows:
            self._adapters.enter(new.row, new.adapter)  # Rank 0 says which of them cannot run.
        new_rows = self._refusals.admitted(batch.new_rows)
        self._parts.rows.apply(new_rows, batch.new_blocks)
        if self._speculation is not None:
            self._speculation.proposer.follow(batch, new_rows)

    def _take_draws(self, batch: StepBatch, num_drawn: int) -> None:
        if self._mates is not None:
            tokens = self._mates.share(num_drawn)
            if self._speculation is not None:
                drawn = fetched(self._parts.runtime, tokens)
                self._speculation.proposer.draw(batch, drawn.numpy, self._parts.runtime.mark())
        if self._drawn is not None:
            self._drawn.expect(batch.rows[batch.samples != 0], num_drawn)

    def _write(self, rows: Int32Array, positions: Int32Array, tokens: Int32Array) -> None:
        """Take in tokens that rank 0 told."""
        self._parts.rows.write(rows, positions, tokens)
        if self._speculation is not None:
            self._speculation.proposer.write(rows, positions, tokens)

    def forget_blocks(self, blocks: Int32Array) -> None:
        """See ``StepLauncher``: it knows nothing of them."""

    def close(self) -> None:
        """See ``StepLauncher``: it has no threads."""
