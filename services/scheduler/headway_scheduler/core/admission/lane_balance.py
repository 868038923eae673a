"""How the rows that decode are spread over the lanes of an executor.

Owns: in which lane's steps a prompt may end. Must not know: which prompt runs, or whose turn it is.

A row decodes in the lane in whose step its prompt ended, for as long as it has its row. The slowest step in a pipeline
holds up the others, so each lane takes its share: of the requests that run, and of those that wait and may soon. A prompt
that would end in a full lane runs all but its last token, which keeps the step busy, and ends in another lane's step. The
lane with the fewest rows is never full while a prompt is to end.
"""

from headway_scheduler.core.admission.core_state import CoreState
from headway_scheduler.core.memory.epoch import Epoch
from headway_scheduler.core.state.step_plan import StepPlan


class LaneBalance:
    """Without several lanes there is always room. No step has more rows than ``Epoch.max_rows_per_step``."""

    def __init__(self, state: CoreState, epoch: Epoch) -> None:
        self._waiting = state.waiting
        self._epoch = epoch

    def most_of(self, plan: StepPlan, num_tokens: int, num_left: int) -> int:
        """How many of the next ``num_tokens`` of a prompt, which has ``num_left``, may run in this step."""
        if not plan.has_lane:
            return num_tokens
        num_rows = self._epoch.decoding.num_rows
        if num_rows + len(plan.chunks) >= self._epoch.max_rows_per_step:
            return 0
        if num_tokens == num_left and num_rows + plan.num_completing >= self._share():
            return num_tokens - 1
        return num_tokens

    def _share(self) -> int:
        """The rows of a lane: a full one of all rows, or of those that are live or will soon be."""
        epoch = self._epoch
        num_live, num_coming = epoch.rows.num_live, 0
        if self._waiting:
            num_coming = max(1, min(len(self._waiting), epoch.max_running - num_live, epoch.pool.num_free))
        return -(-min(epoch.max_running, num_live + num_coming) // epoch.num_lanes)
