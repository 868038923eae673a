"""The decode pass: a block for each decoding row that has filled its last one.

Owns: which rows are due. Must not know: prompts, or how a row is preempted.
"""

import numpy as np

from headway_scheduler.core.admission.making_way import MakingWay
from headway_scheduler.core.memory.epoch import Epoch
from headway_scheduler.core.state.indices import RowIndices
from headway_scheduler.core.state.step_plan import StepPlan


class DecodePass:
    """Touches only rows whose due tick is this step of their lane."""

    def __init__(self, epoch: Epoch, making_way: MakingWay) -> None:
        self._epoch = epoch
        self._rows = epoch.rows
        self._pool = epoch.pool
        self._making_way = making_way

    def serve(self, plan: StepPlan) -> None:
        """Give each due row a block, let it wait for one, or stop it at its end."""
        rows, decoding = self._rows, self._epoch.decoding
        decoding.stop_ended()
        due = decoding.due()
        if decoding.stalled:
            stalled = sorted(decoding.stalled.difference(plan.sits_out))
            due = np.sort(np.concatenate((due, np.asarray(stalled, dtype=np.intp))))
        if len(due) > self._pool.num_free:
            self._extend_one_by_one(plan, due[rows.order_key[due].argsort()].tolist())
        elif len(due):
            # There is a block for each row, so their order does not matter.
            self._extend(plan, due)

    def _extend(self, plan: StepPlan, due: RowIndices) -> None:
        blocks = self._pool.allocate(len(due))
        self._rows.append_one_block_each(due, blocks)
        plan.add_blocks(due, blocks)
        self._epoch.decoding.go_on(due)

    def _extend_one_by_one(self, plan: StepPlan, due: list[int]) -> None:
        decoding = self._epoch.decoding
        for row in due:
            if self._rows.requests[row] is None:
                continue  # preempted for a row before it
            decoding.stop(row)
            decoding.stalled.add(row)
            if self._making_way.obtain_block(plan, row):
                self._epoch.extend(plan, row, 1)
                decoding.stalled.discard(row)
                decoding.start([row])
