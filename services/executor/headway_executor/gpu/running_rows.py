"""What running rows have beside tokens and blocks: what they may sample, and which adapter they use.

Owns: how a row enters and leaves the parts that know something of it. Must not know: launches of a model, a step's columns.
"""

from collections import deque

from headway_executor.backend import NewRow
from headway_executor.gpu.device_sampler import DeviceSampler, DrawnTokens
from headway_executor.gpu.runtime import Mark
from headway_executor.models.adapters import ModelAdapters
from headway_executor.sampling.constraints.rows import ConstrainedRows, StepMasks
from headway_executor.sampling.refusals import Refusals
from headway_proto.columns import Int32Array


class RunningRows:
    """The parts are those of one model."""

    def __init__(
        self, refusals: Refusals, sampler: DeviceSampler, constraints: ConstrainedRows, adapters: ModelAdapters
    ) -> None:
        self.refusals = refusals
        self._sampler = sampler
        self._constraints = constraints
        self._adapters = adapters
        self._unread: deque[tuple[Mark, StepMasks, DrawnTokens]] = deque()

    def enter(self, new_rows: tuple[NewRow, ...]) -> tuple[NewRow, ...]:
        """Rows begin; return them with tokens that a model can compute. What cannot run is among ``refusals``."""
        admitted = self.refusals.admitted(new_rows)
        self.refusals.add(self._sampler.add_rows(admitted))
        for new in admitted:
            self._constraints.add(new.row, new.sampling.constraint, new.token_ids[new.num_prompt_tokens :])
            if why_not := self._adapters.enter(new.row, new.adapter):
                self.refusals.add({new.row: why_not})
        return admitted

    def leave(self, rows: Int32Array) -> None:
        """Rows have ended."""
        self.refusals.forget(rows)
        self._sampler.forget(rows)
        self._constraints.forget(rows)
        self._adapters.leave(rows)

    def are_unmasked(self) -> bool:
        """Whether all rows may sample any token."""
        return not self._constraints.are_any()

    def masks(self, rows: Int32Array) -> StepMasks:
        """What rows may sample now. It waits for earlier draws of constrained rows, while the device runs this step."""
        while self._unread:
            reached, masks, drawn = self._unread.popleft()
            reached.wait()
            masks.advance(drawn.token_ids())
        masks = self._constraints.masks(rows)
        self.refusals.add(masks.failures)
        return masks

    def expect(self, reached: Mark, masks: StepMasks, drawn: DrawnTokens) -> None:
        """What was drawn within ``masks`` can be read behind ``reached``."""
        self._unread.append((reached, masks, drawn))

    def close(self) -> None:
        """End the threads that compile constraints."""
        self._constraints.close()
