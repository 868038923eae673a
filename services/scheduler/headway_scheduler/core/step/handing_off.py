"""Requests that leave with their blocks, and requests whose pulled blocks are not right.

Owns: which rows a step exports, and what the answer to a step with transfers means. Must not know: where a request goes
on, or how blocks travel.

A leaving row is exported with the step that brings its next token, and then idles until the answer. A row with pulled
blocks that are not right is preempted; whatever steps in flight still compute for it is thrown away.
"""

from headway_scheduler.core.admission.core_state import CoreState
from headway_scheduler.core.admission.running_requests import RunningRequests
from headway_scheduler.core.memory.epoch import Epoch
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.counters import WasteReason
from headway_scheduler.core.state.indices import RowIndices
from headway_scheduler.core.state.request import Request, RequestStatus
from headway_scheduler.core.state.step_plan import InFlightStep, StepTransfers


class HandingOff:
    """Costs nothing in steps without transfers."""

    def __init__(self, state: CoreState, epoch: Epoch, running: RunningRequests) -> None:
        self._state = state
        self._epoch = epoch
        self._rows = epoch.rows
        self._running = running
        self._transfers = epoch.swapping.transfers

    def export(self, sampling: RowIndices) -> list[int]:
        """Export the leaving ones among the rows that sample in this step, which is complete; return those that leave."""
        rows, leaving = self._rows, self._epoch.leaving
        found = []
        for row in sorted(leaving.intersection(sampling.tolist())):
            request, num_tokens = rows.request_in(row), int(rows.num_computed_tokens[row])
            leaving.discard(row)
            if num_tokens == int(rows.last_position[row]):
                continue  # it is about to end
            blocks = rows.blocks_of(row)[: -(-num_tokens // rows.block_size)]
            exported = self._transfers.export(request, row, blocks, num_tokens)
            if exported is not None:
                self._state.counters.num_exported_blocks += len(blocks)
            elif request.must_leave:
                self._transfers.leave_without_blocks(request, row)
            else:
                request.is_leaving = False
                continue
            found.append(row)
        return found

    def let_idle(self, rows: list[int]) -> None:
        """These rows wait for the answer to the step that was just sent."""
        for row in rows:
            self._epoch.decoding.stop(row)
            self._epoch.decoding.idle.add(row)

    def preempt_stale(self, step: InFlightStep, stale: set[int]) -> None:
        """Compute again what follows from blocks that were not right."""
        assert step.transfers is not None
        for fetched in step.transfers.fetched:
            request = fetched.request
            if fetched.row not in stale or not self._state.has(request):
                continue
            self._state.counters.num_stale_pulls += 1
            if fetched.stored is None:
                self._epoch.swapping.drop_offloaded()
            else:
                request.has_lost_blocks = True
            self._forget_steps_of(request)
            if request.row >= 0:
                self._running.keep_tokens(request, WasteReason.RECOMPUTE)
                self._running.release_row(request.row, owed_tokens=False, cache=False)
                request.status = RequestStatus.PREEMPTED
                self._state.waiting.enter(request)
            elif request.num_swapped_tokens:
                self._epoch.swapping.forget(request)
            request.num_preemptions += 1

    def confirm(self, transfers: StepTransfers) -> tuple[Origin, ...]:
        """The step has returned: leases of what it fetched end. Return the requests that are now to be released."""
        for fetched in transfers.fetched:
            if fetched.stored is not None:
                self._transfers.end(fetched.stored)
        left = []
        for exported in transfers.exported:
            request = exported.request
            if request.row != exported.row or not request.is_leaving:
                self._transfers.drop_export(exported)
                continue
            request.stored = self._transfers.lease(exported)
            left.append(request.new.origin)
        return tuple(left)

    def _forget_steps_of(self, request: Request) -> None:
        """Later steps in flight ran on the same blocks: nothing that they bring for it counts."""
        for step in self._epoch.in_flight:
            step.disregard(request)
            for row, owed in step.leavers.items():
                if owed is request:
                    step.leavers[row] = None
                    request.num_unreturned -= 1
                    self._state.count_surplus(1)
            if step.transfers is not None:
                for exported in step.transfers.exported:
                    if exported.request is request:
                        self._transfers.drop_export(exported)
                step.transfers = step.transfers.without_exports_of(request)
