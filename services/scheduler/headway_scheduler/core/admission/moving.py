"""Requests that leave this core for another executor's, or come from one.

Owns: that nothing of a request stays behind, and which of its fields belong to one core. Must not know: the other core,
or why a request moves.

A move is a preemption here and a resume there: the request keeps its tokens, its arrival and its times. A *hand-off* is
a move with blocks: the request is marked as leaving, its next token's step copies its blocks to the host, and whoever
goes on with it pulls them from there. The blocks are leased until then.
"""

from headway_scheduler.core.admission.admission import Admission
from headway_scheduler.core.admission.core_state import CoreState
from headway_scheduler.core.admission.door import limit_of
from headway_scheduler.core.admission.intake import enter
from headway_scheduler.core.admission.running_requests import RunningRequests
from headway_scheduler.core.memory.epoch import Epoch
from headway_scheduler.core.memory.swapping import Swapping
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.counters import WasteReason
from headway_scheduler.core.state.request import Request, RequestStatus
from headway_scheduler.core.state.step_plan import StepTransfers
from headway_scheduler.core.state.stored_blocks import StoredBlocks


class Moving:
    """Releases and adopts requests."""

    def __init__(self, state: CoreState, epoch: Epoch, running: RunningRequests, admission: Admission) -> None:
        self._state = state
        self._epoch = epoch
        self._running = running
        self._admission = admission

    def let_leave(self, origin: Origin, *, must_leave: bool = False) -> bool:
        """Let a running request leave with its next token; the answer's ``left`` tells when it is to be released.

        Without room for its blocks on the host it stays, unless it ``must_leave``. Returns whether it runs here.
        """
        request = self._state.requests.get(origin)
        if request is None or request.row < 0:
            return False
        if not request.is_leaving:
            self._epoch.leaving.add(request.row)
        request.is_leaving, request.must_leave = True, must_leave or request.must_leave
        return True

    def return_lease(self, stored: StoredBlocks) -> bool:
        """Nobody needs these blocks any more; False if this pool is another by now."""
        return self._epoch.swapping.books.return_lease(stored)

    def take_ended_leases(self) -> tuple[StoredBlocks, ...]:
        """The leases that this core's requests have needed, and need no more; each is in the books of some core."""
        ended = tuple(self._state.ended_leases)
        self._state.ended_leases.clear()
        return ended

    def release(self, origin: Origin) -> Request | None:
        """Give up a live request. A running one is preempted.

        None: it is unknown, or steps in flight still owe it tokens; then ask again after the next answer.
        """
        request = self._state.requests.get(origin)
        if request is None or (request.row >= 0 and self._epoch.awaits_answer):
            return None
        if request.row >= 0:
            row = request.row
            self._running.keep_tokens(request, WasteReason.RECOMPUTE)
            self._running.release_row(row, owed_tokens=True)
            self._let_wait(request)
        if request.num_unreturned:
            return None
        self._let_go(request)
        return request

    def release_waiting(self) -> list[Request]:
        """Give up the requests that wait and that no step owes a token, in service order."""
        waiting = [request for request in self._state.waiting.queue.in_order() if not request.num_unreturned]
        for request in waiting:
            self._let_go(request)
        return waiting

    def release_all(self) -> list[Request]:
        """The executor is lost, with all that it computed, and no request has a row: give up all, by arrival."""
        requests = sorted(self._state.requests.values(), key=lambda request: request.arrival)
        for request in requests:
            request.forget_executor()
            self._let_go(request)
        return requests

    def recall(self) -> Swapping | None:
        """The executor is lost: send every running request back to its place in the queue.

        What the host holds of requests is kept for them, and so is what steps without an answer were to fetch. But what
        distrusted epochs wrote is given up, and so are the books if this epoch is one of them. Returns whose books may go on.
        """
        rows, swapping = self._epoch.rows, self._epoch.swapping
        for row in rows.live_rows().tolist():
            request = rows.request_in(row)
            self._running.keep_tokens(request, WasteReason.NEW_EPOCH)
            rows.give_back(row)
            self._let_wait(request)
        for request in self._state.requests.values():
            swapping.lend(request)
            request.keep_a_token_to_run()
            if request.stored is not None and not request.stored.num_tokens:
                swapping.forget(request)  # nothing of it can be used
        for step in self._epoch.in_flight:
            if step.transfers is not None:
                self._undo(step.transfers)
        for number in self._epoch.distrusted:
            self._forget_blocks_of(number)
        return None if self._epoch.distrusted else swapping

    @property
    def is_distrusted(self) -> bool:
        """Whether the executor's blocks may be anything, so that only a new epoch helps."""
        return bool(self._epoch.distrusted)

    def distrust(self, epoch: int) -> None:
        """An executor was found in another state in this epoch, here or elsewhere: what it wrote may be anything.

        Requests that wait with such blocks forget them. If this core's executor wrote or used some, it is distrusted:
        with its epoch, what it has copied to the host is given up.
        """
        self._forget_blocks_of(epoch)
        if epoch == self._epoch.number or epoch in self._epoch.swapping.books.sources:
            self._epoch.distrusted.update((epoch, self._epoch.number))

    def _forget_blocks_of(self, epoch: int) -> None:
        """No request that waits here goes on with stored blocks that this epoch wrote, or that were computed from such.

        The books that leased them are given up as well, so nothing is returned.
        """
        for request in self._state.requests.values():
            if request.stored is not None and epoch in request.stored.sources:
                request.forget_stored()

    def forget_ended_sources(self, epochs: frozenset[int]) -> None:
        """See ``HostBooks``."""
        self._epoch.swapping.books.forget_ended_sources(epochs)

    def _undo(self, transfers: StepTransfers) -> None:
        """No answer will come to a step with these transfers."""
        swapping = self._epoch.swapping
        for exported in transfers.exported:
            swapping.transfers.drop_export(exported)
        for fetched in transfers.fetched:
            request = fetched.request
            if fetched.stored is None:
                continue
            if not self._state.has(request) or request.stored is not None:
                swapping.transfers.end(fetched.stored)
            else:
                request.stored = fetched.stored
                request.num_swapped_tokens = fetched.stored.num_tokens

    def adopt(self, request: Request, *, spares: bool = True) -> None:
        """Queue a request that another core released. The caller has seen that this executor can hold it.

        ``spares``: if it is to be computed again, then in steps that spare the rows that are here.
        """
        state = self._state
        request.limit = limit_of(request.new, state.max_request_tokens)
        request.start = -1
        start, first = request.device_us_marks
        request.device_us_marks = start + state.counters.device_us, first + state.counters.device_us
        state.waiting.queue.adopt(request)
        if spares:
            state.losses.come(request)
        enter(state, request)

    def _let_wait(self, request: Request) -> None:
        request.status = RequestStatus.PREEMPTED
        self._state.waiting.enter(request)

    def _let_go(self, request: Request) -> None:
        """Remove a waiting request from everything that this core keeps of it."""
        state = self._state
        for step in self._epoch.in_flight:
            # Its row may soon have the same number elsewhere, so the answer must not find it here.
            step.disregard(request)
        state.waiting.leave(request)
        self._epoch.swapping.lend(request)
        if request.stored is not None:
            request.num_swapped_tokens = request.stored.num_tokens
        request.is_leaving = request.must_leave = False
        state.losses.forget(request)
        self._admission.forget(request)
        state.waiting.queue.forget(request)
        start, first = request.device_us_marks
        request.device_us_marks = start - state.counters.device_us, first - state.counters.device_us
        request.num_cached_blocks = 0
        del state.requests[request.new.origin]
