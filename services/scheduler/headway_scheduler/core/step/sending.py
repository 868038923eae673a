"""Makes a complete plan a step in flight and its message.

Owns: that both agree. Must not know: how the plan was made.
"""

from typing import Any

import numpy as np

from headway_proto.columns import encode_column
from headway_proto.step import (
    DIGEST_INTERVAL_STEPS,
    AdapterOutput,
    BlockPull,
    LaneOutput,
    PoolingLaneOutput,
    PoolingOutput,
    SchedulerOutput,
    TransferringOutput,
    state_digest,
)
from headway_scheduler.core.admission.core_state import CoreState
from headway_scheduler.core.admission.running_requests import RunningRequests
from headway_scheduler.core.memory.epoch import Epoch
from headway_scheduler.core.memory.row_table import RowTable
from headway_scheduler.core.state.step_plan import InFlightStep, StepPlan
from headway_scheduler.core.step.handing_off import HandingOff


class Sending:
    """Commits plans."""

    def __init__(self, state: CoreState, epoch: Epoch, running: RunningRequests, handing_off: HandingOff) -> None:
        self._handing_off = handing_off
        self._observer = state.observer
        self._counters = state.counters
        self._epoch = epoch
        self._running = running

    def commit(self, plan: StepPlan, total: int) -> SchedulerOutput:
        """Commit the plan, of ``total`` tokens without proposals."""
        epoch, rows, decoding, step = self._epoch, self._epoch.rows, self._epoch.decoding, self._epoch.next_step
        load = None
        if self._observer.is_worth_it(plan, step):
            load = self._observer.load(plan, decoding.shape(), self._running.tightest.tightest_s)
        epoch.next_step += 1
        decoding.advance()
        completed = [chunk.row for chunk in plan.chunks if chunk.completes]
        if completed:
            decoding.enter(completed)
        # The rows that decode next in this lane are those that sample now: decodes and completed prompts.
        sampling = decoding.indices()
        leaving = self._handing_off.export(sampling) if epoch.leaving else []
        # Behind the exports, which must not get a host block that this step writes or reads.
        swap_out, swap_in, num_moved_blocks = epoch.swapping.take_moves(step)
        epoch.swapping.complete_plan()
        output = SchedulerOutput(
            epoch=epoch.number,
            step=step,
            scheduled_new_reqs=tuple(plan.new_requests),
            finished_rows=encode_column(sorted(epoch.finished_rows)) if epoch.finished_rows else b"",
            new_blocks=plan.new_blocks(),
            num_scheduled_tokens=plan.scheduled_tokens(decoding.idle, decoding.stalled, plan.held_back),
            swap_out=swap_out,
            swap_in=swap_in,
            total_num_scheduled_tokens=total,
            num_speculative_tokens=plan.speculative_tokens(),
        )
        exports, pulls, transfers = epoch.swapping.transfers.take(step)
        if exports or pulls or plan.has_lane or plan.adapters or plan.pooled:
            output = _extended(output, plan, exports, pulls, decoding.lane)
        epoch.finished_rows.clear()
        digest = digest_of(rows, has_lanes=plan.has_lane) if step % DIGEST_INTERVAL_STEPS == 0 else None
        epoch.send(
            InFlightStep(
                step,
                sampling,
                plan.chunks,
                digest=digest,
                load=load,
                num_moved_blocks=num_moved_blocks,
                speculating=plan.speculating,
                transfers=transfers,
                lane=decoding.lane,
            )
        )
        if leaving:
            self._handing_off.let_idle(leaving)
        if plan.held_back:
            decoding.let_decode(plan.held_back)
        self._counters.num_steps += 1
        return output


def _extended(
    output: SchedulerOutput, plan: StepPlan, exports: bytes, pulls: tuple[BlockPull, ...], lane: int
) -> SchedulerOutput:
    """The smallest message that holds what ``output`` does not."""
    kind = _kind_of(plan)
    fields: dict[str, Any] = {name: getattr(output, name) for name in SchedulerOutput.__struct_fields__}
    fields |= {"exports": exports, "pulls": pulls, "lane": lane, "adapters": tuple(plan.adapters)}
    if plan.pooled:
        fields["pooled"] = plan.pooled_rows()
    return kind(**{name: value for name, value in fields.items() if name in kind.__struct_fields__})


def _kind_of(plan: StepPlan) -> type[TransferringOutput]:
    if plan.has_lane:
        return PoolingLaneOutput if plan.adapters or plan.pooled else LaneOutput
    if plan.pooled:
        return PoolingOutput
    if plan.adapters:
        return AdapterOutput
    return TransferringOutput


def digest_of(rows: RowTable, *, has_lanes: bool) -> int:
    """The digest of the state that the executor mirrors."""
    live = rows.live_rows()
    lanes = np.array([rows.lane[row] for row in live.tolist()], dtype=np.int32) if has_lanes else None
    return state_digest(live, rows.num_computed_tokens[live], rows.num_blocks[live], rows.block_table, lanes)
