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
    """Made anew for each executor.

    ``decoding`` is the lane of the step that is planned. An executor with several lanes gets steps of each in turn, as
    many as its pipeline has stages and one more, so that no stage waits for the scheduler. Its lanes share that number:
    what one lane has in flight beyond its share could only wait for the lane's own tokens. ``overlaps_own_steps``: see
    ``BatchingPolicy``; otherwise each lane, or without lanes each of the steps in flight, is a batch.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        capacity: ExecutorCapacity,
        counters: SchedulerCounters,
        swapping: Swapping,
        *,
        number: int,
        overlaps_own_steps: bool,
    ) -> None:
        self.number = number
        self.capacity = capacity
        self.max_num_batched_tokens = capacity.most_batched_tokens(limits.max_num_batched_tokens)
        # Each decoding request takes one token of the budget.
        self.max_rows_per_step = min(limits.max_num_seqs, self.max_num_batched_tokens)
        self.num_lanes = num_lanes = capacity.num_lanes
        self.max_in_flight = limits.steps_in_flight(num_lanes)
        self._max_in_flight_of_lane = -(-self.max_in_flight // num_lanes)
        most_rows = min(limits.max_num_seqs, self.max_num_batched_tokens * num_lanes)
        if not overlaps_own_steps:
            most_rows = self.max_rows_per_step * (num_lanes if num_lanes > 1 else self.max_in_flight)
            self._max_in_flight_of_lane = 1
        self.max_running = min(most_rows, capacity.max_num_rows)
        self.next_step = 0
        self.cache = PrefixCache(capacity.num_blocks, capacity.block_size)
        self.pool = BlockPool(capacity.num_blocks, self.cache, counters)
        self.rows = RowTable(self.max_running, capacity.max_model_len, capacity.block_size)
        self.swapping = swapping
        self.lanes = [DecodingRows(self.rows, lane) for lane in range(num_lanes)]
        self.decoding = self.lanes[0]
        self.prefilling: set[int] = set()
        """Rows in their prompt."""
        self.leaving: set[int] = set()
        """Rows whose request leaves with its next token."""
        self.finished_rows: list[int] = []
        """Rows released since the newest step. The next step names them to the executor."""
        self.in_flight: deque[InFlightStep] = deque()
        self.distrusted: set[int] = set()
        """This epoch and others, if its executor may have computed anything: see ``Moving.distrust``."""
        self._newest_lane = -1

    def new_plan(self, now: float) -> StepPlan:
        """An empty plan."""
        return StepPlan(self.max_num_batched_tokens, now, has_lane=self.num_lanes > 1)

    def lanes_in_turn(self) -> list[DecodingRows]:
        """The lanes that may have the next step, the one whose turn it is first."""
        if self.num_lanes == 1:
            return self.lanes
        num_in_flight = [0] * self.num_lanes
        for step in self.in_flight:
            num_in_flight[step.lane] += 1
        first = self._newest_lane + 1
        in_turn = self.lanes[first:] + self.lanes[:first]
        return [lane for lane in in_turn if num_in_flight[lane.lane] < self._max_in_flight_of_lane]

    def send(self, step: InFlightStep) -> None:
        """This step, of the lane ``decoding``, is in flight."""
        self.in_flight.append(step)
        self._newest_lane = step.lane

    @property
    def has_stalled_rows(self) -> bool:
        """Whether a row of any lane waits for a block."""
        return any(lane.stalled for lane in self.lanes)

    @property
    def awaits_answer(self) -> bool:
        """Whether the newest step speculates: what follows it depends on its answer."""
        return bool(self.in_flight) and bool(self.in_flight[-1].speculating)

    def budget_left(self, plan: StepPlan) -> int:
        """Tokens that the step may still get."""
        return plan.budget - plan.num_chunk_tokens - self.decoding.num_decoding

    def extend(self, plan: StepPlan, row: int, count: int) -> None:
        """Append ``count`` blocks to the table of ``row``."""
        if count > 0:
            blocks = self.pool.allocate(count)
            self.rows.append_blocks(row, blocks)
            plan.add_blocks(np.full(count, row), blocks)

    def requests_in_flight(self, step: int | None) -> tuple[list[Request], bool]:
        """The live requests of one step in flight, or of all; and whether it ran a row for one that is gone."""
        found: dict[int, Request] = {}
        has_gone = False
        for in_flight in self.in_flight:
            if step is None or in_flight.step == step:
                live = self._requests_in(in_flight)
                rows = {*in_flight.sampling_rows.tolist(), *(chunk.row for chunk in in_flight.chunks)}
                has_gone = has_gone or len(live) < len(rows)
                for request in live:
                    found[request.arrival] = request
        return list(found.values()), has_gone

    def _requests_in(self, step: InFlightStep) -> list[Request]:
        prompts = {chunk.row: chunk.request for chunk in step.chunks if chunk.counts}
        requests = list(prompts.values())
        for row in step.sampling_rows.tolist():
            if row not in prompts:
                owner = step.leavers[row] if row in step.leavers else self.rows.requests[row]
                requests += [] if owner is None else [owner]
        return [request for request in requests if request.status is not RequestStatus.FINISHED]
