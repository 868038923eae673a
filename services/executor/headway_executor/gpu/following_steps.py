"""The steps of a device that draws no tokens: another rank does, and tells them.

Owns: what such a rank knows of its rows. Must not know: sampling, constraints, how a kernel computes.
"""

from collections.abc import Callable

import numpy as np

from headway_executor.backend import StepBatch, StepResult
from headway_executor.gpu.device_parts import DeviceParts
from headway_executor.gpu.device_stage import DeviceStage
from headway_executor.gpu.open_model import nothing_drawn
from headway_executor.gpu.step_columns import shape_of
from headway_executor.gpu.tokens_among_mates import TokensAmongMates
from headway_executor.sampling.drawn_tokens import DrawnTokensIn
from headway_executor.sampling.refusals import Refusals
from headway_proto.columns import Int32Array


class FollowingSteps:
    """A ``StepLauncher``. Its answers have the right number of tokens, all 0. Tokens come from ``mates``, or else by ``drawn``."""

    def __init__(
        self, parts: DeviceParts, stage: DeviceStage, mates: TokensAmongMates | None, drawn: DrawnTokensIn | None
    ) -> None:
        self._parts = parts
        self._stage = stage
        self._mates = mates
        self._drawn = drawn
        self._refusals = Refusals(parts.vocab_size)

    def run(self, batch: StepBatch) -> Callable[[], StepResult]:
        """See ``StepLauncher``."""
        self._refusals.forget(batch.finished_rows)
        if self._drawn is not None:
            self._drawn.take_in(batch)
        self._parts.rows.apply(self._refusals.admitted(batch.new_rows), batch.new_blocks)
        if not len(batch.rows):
            return nothing_drawn
        shape = shape_of(batch)
        self._stage.receive(shape.num_tokens)
        self._parts.launch(batch, shape)
        pass_on = self._stage.pass_on(shape.num_tokens)
        if shape.num_sampled and self._mates is not None:
            self._mates.share(shape.num_sampled)
        if shape.num_sampled and self._drawn is not None:
            self._drawn.expect(batch.rows[batch.samples != 0], shape.num_sampled)

        def build() -> StepResult:
            pass_on()
            return StepResult(sampled_token_ids=np.zeros(shape.num_sampled, dtype=np.int32))

        return build

    def forget_blocks(self, blocks: Int32Array) -> None:
        """See ``StepLauncher``: it knows nothing of them."""

    def close(self) -> None:
        """See ``StepLauncher``: it has no threads."""
