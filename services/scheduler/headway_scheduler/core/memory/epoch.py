"""The state of one executor: rows, blocks, and steps in flight.

Owns: these objects. Must not know: any decision.
"""

from collections import deque

import numpy as np

from headway_scheduler.core.memory.block_pool import BlockPool
from headway_scheduler.core.memory.decoding_rows import DecodingRows
from headway_scheduler.core.memory.prefix_cache import PrefixCache
from headway_scheduler.core.memory.row_table import RowTable
from headway_scheduler.core.memory.swapping import Swapping
from headway_scheduler.core.state.counters import SchedulerCounters
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.state.request import Request, RequestStatus
from headway_scheduler.core.state.step_plan import InFlightStep, StepPlan


class Epoch:
    """Made anew for each executor; ``num_batches`` disjoint batches may be in flight."""

    def __init__(
        self,
        limits: SchedulerLimits,
        capacity: ExecutorCapacity,
        counters: SchedulerCounters,
        swapping: Swapping,
        *,
        number: int,
        num_batches: int,
    ) -> None:
        self.number = number
        self.capacity = capacity
        self.max_num_batched_tokens = capacity.most_batched_tokens(limits.max_num_batched_tokens)
        # Each decoding request takes one token of the budget.
        self.max_rows_per_step = min(limits.max_num_seqs, self.max_num_batched_tokens)
        self.max_running = min(self.max_rows_per_step * num_batches, capacity.max_num_rows)
        self.next_step = 0
        self.cache = PrefixCache(capacity.num_blocks, capacity.block_size)
        self.pool = BlockPool(capacity.num_blocks, self.cache, counters)
        self.rows = RowTable(self.max_running, capacity.max_model_len, capacity.block_size)
        self.swapping = swapping
        self.decoding = DecodingRows(self.rows)
        self.prefilling: set[int] = set()
        """Rows in their prompt."""
        self.leaving: set[int] = set()
        """Rows whose request leaves with its next token."""
        self.finished_rows: list[int] = []
        """Rows released since the newest step. The next step names them to the executor."""
        self.in_flight: deque[InFlightStep] = deque()

    @property
    def awaits_answer(self) -> bool:
        """Whether the newest step speculates: what follows it depends on its answer."""
        return bool(self.in_flight) and bool(self.in_flight[-1].speculating)

    def budget_left(self, plan: StepPlan) -> int:
        """Tokens that the step may still get."""
        return plan.budget - plan.num_chunk_tokens - len(self.decoding.indices())

    def extend(self, plan: StepPlan, row: int, count: int) -> None:
        """Append ``count`` blocks to the table of ``row``."""
        if count > 0:
            blocks = self.pool.allocate(count)
            self.rows.append_blocks(row, blocks)
            plan.add_blocks(np.full(count, row), blocks)

    def requests_in_flight(self, step: int | None) -> list[Request]:
        """The live requests of one step in flight, or of all."""
        found: dict[int, Request] = {}
        for in_flight in self.in_flight:
            if step is None or in_flight.step == step:
                for request in self._requests_in(in_flight):
                    found[request.arrival] = request
        return list(found.values())

    def _requests_in(self, step: InFlightStep) -> list[Request]:
        prompts = {chunk.row: chunk.request for chunk in step.chunks if chunk.counts}
        requests = list(prompts.values())
        for row in step.sampling_rows.tolist():
            if row not in prompts:
                owner = step.leavers[row] if row in step.leavers else self.rows.requests[row]
                requests += [] if owner is None else [owner]
        return [request for request in requests if request.status is not RequestStatus.FINISHED]
