"""The cells of one scheduler, and the way of a request into a core and from one core to another.

Owns: the cells, their links, and when requests change cells. Must not know: gateways, frames' contents, or decisions.

With one cell, its core queues every request. With more, ``Placement`` does, and each core gets what it can start soon. A
cell whose executor is lost hands its requests back, so that others go on with them at once.
"""

from collections.abc import Iterator
from typing import Protocol

from headway_proto.step import BackendInfo
from headway_scheduler.cells.brake import Brake
from headway_scheduler.cells.cell import USED_WRONG_BLOCKS, Cell, Serving
from headway_scheduler.cells.core_calls import CoreCalls
from headway_scheduler.cells.fleet_adapters import FleetAdapters
from headway_scheduler.core.admission.door import ANOTHER_MODEL, check_request, limit_of
from headway_scheduler.core.choosing.policies import POLICIES, PlacementSettings
from headway_scheduler.core.choosing.roles import Role
from headway_scheduler.core.memory.pinned_prefixes import PinnedPrefix, PinRefused
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.events import FinishedEvent, StepEvents
from headway_scheduler.core.state.limits import ExecutorCapacity
from headway_scheduler.core.state.request import FinishReason
from headway_scheduler.flight.checkpoint import FleetState
from headway_scheduler.flight.recorder import PLACEMENT, NullRecorder
from headway_scheduler.links.executor_link import StepEvent
from headway_scheduler.links.executor_links import ExecutorLinks
from headway_scheduler.placement.placement import Placement
from headway_scheduler.placement.transit import Transit

DEFAULT_PLACEMENT = PlacementSettings()
TOO_LATE = "its first token can no longer come within its objective"


class Host(Serving, Protocol):
    """What the fleet needs of the scheduler process around it."""

    def fleet_changed(self, now: float) -> None:
        """An executor joined, began anew, or is gone."""

    def announce(self) -> None:
        """Send the state to every gateway."""


class Fleet:
    """All cells of a scheduler. Times in seconds, monotonic. ``max_executors``: the most cells."""

    def __init__(
        self,
        host: Host,
        incarnation: int,
        recorder: NullRecorder,
        max_executors: int,
        settings: PlacementSettings = DEFAULT_PLACEMENT,
    ) -> None:
        self.links = ExecutorLinks(incarnation, max_executors)
        self.policy_name = settings.name_for(host.limits, max_executors)
        self.placement = Placement(host.limits, POLICIES[self.policy_name])
        self._settings = settings
        self.brake = Brake(num_trial_tokens=host.limits.steps_in_flight(num_lanes=1))
        self.info: BackendInfo | None = None
        """What the newest executor announced; all run the same model."""
        self._host = host
        self._recorder = recorder
        self._placement_recorder = recorder.of_cell(PLACEMENT)
        self._is_paused = False
        self._unproven: dict[Origin, None] = {}
        """Requests of lost steps that wait for a cell."""
        self.cells: list[Cell] = []
        self._news: set[int] = set()
        """The cells that may have something to send: with many cells, nothing is asked of the others."""
        self._has_preempted = False
        """Whether a request that lost its row may wait in a cell without news."""
        self._capacity: ExecutorCapacity | None = None
        """Of the core with room for the longest requests."""
        self.transit = Transit(self.placement, self.cells)
        self.adapters = FleetAdapters(self.cells, host.notices, host.announce)
        self._add_cell()

    @property
    def open_cells(self) -> list[Cell]:
        """The cells with an executor."""
        return [cell for cell in self.cells if cell.is_open]

    @property
    def calls(self) -> list[CoreCalls]:
        """The calls of the cores that exist."""
        return [cell.calls for cell in self.cells if cell.calls is not None]

    @property
    def cores(self) -> list[Scheduler]:
        """The cores that exist."""
        return [calls.core for calls in self.calls]

    @property
    def state(self) -> FleetState:
        """All cores, and the requests that no core has; a replay can go on from it."""
        cores = {cell.number: cell.core for cell in self.cells if cell.core is not None}
        return FleetState(cores, {request.new.origin: request for request in self.placement.requests()})

    @property
    def next_deadline(self) -> float:
        """The time of the next call of ``run``."""
        deadline = self.links.next_deadline
        for number in self._news:
            deadline = min(deadline, self.cells[number].next_deadline)
        return deadline

    @property
    def num_answers(self) -> int:
        """The measure of progress."""
        return sum(cell.num_answers for cell in self.cells)

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self.placement) + sum(core.num_waiting for core in self.cores)

    @property
    def num_unfinished(self) -> int:
        """Requests waiting or running."""
        return len(self.placement) + sum(core.num_unfinished for core in self.cores)

    @property
    def is_paused(self) -> bool:
        """Whether no request may start."""
        return self._is_paused

    def pause(self, *, is_paused: bool) -> None:
        """Stop or resume the start of requests in all cells."""
        self._is_paused = is_paused
        for calls in self.calls:
            calls.pause(is_paused=is_paused)

    def pin(self, name: str, tenant: str, token_ids: bytes) -> PinnedPrefix:
        """Keep a prefix in the cache of every cell, also of those that come later. ``token_ids`` is an int32 column.

        Raises:
            PinRefused: a cell cannot keep it; all pins stay as they were.
        """
        every = self.calls
        before = every[0].pins.get(name)
        pinned: list[PinnedPrefix] = []
        for calls in every:
            try:
                pinned.append(calls.pin(name, tenant, token_ids))
            except PinRefused:
                for earlier in every[: len(pinned)]:
                    earlier.restore_pin(name, before)
                raise
        return pinned[0]

    def unpin(self, name: str) -> bool:
        """Undo ``pin``. Return whether there was such a pin."""
        were_there = [calls.unpin(name) for calls in self.calls]
        return any(were_there)

    # ---------------------------------------------------------------------------------------------------------- beats

    def receive(self, peer: bytes, data: bytes, now: float) -> None:
        """Take in one frame of the step protocol."""
        self._act(*self.links.receive(peer, data, now), now)

    def unreachable(self, peer: bytes, now: float) -> None:
        """The transport could not reach this executor."""
        self._act(*self.links.unreachable(peer), now)

    def tick(self, now: float) -> None:
        """Send heartbeats and detect silence."""
        for number, events in self.links.tick(now):
            self._act(number, events, now)

    def schedule(self, now: float) -> None:
        """Place what waits, and send each executor its steps."""
        if len(self.cells) > 1:
            self.transit.relieve_gaps(now)
            if (self._has_preempted or self._news) and not self._is_paused:
                self._has_preempted = self.transit.relieve_preempted()
        if len(self.placement) and not self._is_paused:
            self._place(now)
        if self.brake.has_suspects:
            self._news.update(range(len(self.cells)))
        for cell in self._cells_with_news() if self._news else ():
            cell.schedule_steps(now)

    def cell_has_preempted(self) -> None:
        """A request that lost its row waits in a cell: another cell may have room for it."""
        self._has_preempted = len(self.cells) > 1

    def _cells_with_news(self) -> Iterator[Cell]:
        """By number, also those that have news only from one before them."""
        number = -1
        while later := [other for other in self._news if other > number]:
            number = min(later)
            yield self.cells[number]

    # ------------------------------------------------------------------------------------------- requests come and go

    def add(self, new: NewRequestEvent, now: float) -> None:
        """Queue a request.

        Raises:
            RequestRejected: it can never run, or the queue is full.
        """
        if len(self.cells) == 1 and not self.cells[0].is_draining and not len(self.placement):
            calls = self.cells[0].calls
            assert calls is not None
            calls.add_request(new, now)
            return
        capacity = self._capacity
        assert capacity is not None
        check_request(new, limit_of(new, capacity.max_request_tokens), capacity)
        self.placement.add(new, self.transit.loads, now)
        self._placement_recorder.arrived(now, new)

    def abort(self, origin: Origin, why: str, now: float) -> FinishedEvent | None:
        """Abort a request, wherever it is; None if it is unknown (it may just have ended)."""
        self._unproven.pop(origin, None)
        self.transit.forget(origin)
        cell = self.cell_of(origin)
        if cell is not None and cell.calls is not None:
            end = cell.calls.abort(origin, why, now)
            cell.end_leases()
            return end
        request = self.placement.find(origin)
        if request is not None:
            self._placement_recorder.aborted(now, origin, why)
            self.transit.forget_stored(request)
        return self.placement.finish(origin, FinishReason.ABORT)

    def cell_of(self, origin: Origin) -> Cell | None:
        """The cell whose core has this request."""
        placed = self.placement.placed(origin)
        for cell in self.cells if placed is None else (self.cells[placed.cell],):
            if cell.core is not None and cell.core.find(origin) is not None:
                return cell
        return None

    def drain_cell(self, number: int, *, is_draining: bool) -> None:
        """Let a cell's requests go on elsewhere and give it no others, or end that."""
        cell = self.cells[number]
        cell.is_draining = is_draining
        if is_draining and cell.calls is not None:
            calls, core = cell.calls, cell.calls.core
            requests = core.requests()
            self.placement.number_after(requests)
            # Those that run bring their blocks along; the others have none.
            self.transit.take_back(
                calls.release(
                    [
                        request.new.origin
                        for request in requests
                        if not (core.capacity.host_pool and calls.let_leave(request.new.origin, must_leave=True))
                    ]
                )
            )

    # ---------------------------------------------------------------------------------------------------------- cells

    def state_lost(self, cell: Cell, now: float) -> None:
        """What an executor had computed is gone: others may go on with its requests."""
        others = [other for other in self.open_cells if other is not cell]
        if others or cell.is_draining or (len(self.cells) > 1 and cell.link.is_open):
            self._take_all(cell, now)

    def cell_opened(self, cell: Cell, now: float) -> None:
        """An executor joined, or began anew: what waits may start there."""
        calls = cell.calls
        assert calls is not None
        assert cell.info is not None
        self._capacity = max((core.capacity for core in self.cores), key=lambda capacity: capacity.max_request_tokens)
        self.transit.cores_changed()
        running = frozenset(core.epoch for core in self.cores)
        for core in self.cores:
            core.moving.forget_ended_sources(running)
        same_model = self.info is None or self.info.model_fingerprint == cell.info.model_fingerprint
        self.info = cell.info
        self.links.executors_run(cell.info)
        calls.pause(is_paused=self._is_paused)
        self.adapters.cell_opened(cell)
        if len(self.cells) > 1:
            for other in self.cells:
                if other.is_open and other.calls is not None:
                    self.transit.take_back(other.calls.release_waiting())
                else:
                    self._take_all(other, now)
            calls.pin_as(self.calls[0])
            self.placement.cell_opened(calls.core.capacity)
            if not same_model:
                self._end_all(now)
        self._host.fleet_changed(now)

    def cell_lost(self, cell: Cell, now: float) -> None:
        """An executor is gone."""
        self.adapters.cell_lost(cell)
        self.state_lost(cell, now)
        self._host.fleet_changed(now)

    def distrust(self, epoch: int) -> None:
        """Nothing of what an executor wrote in this epoch is to be used, nor what others computed from it."""
        self.transit.distrust(epoch)
        for calls in self.calls:
            calls.distrust(epoch)

    def begin_anew(self, now: float) -> None:
        """The executors that have used what is not to be used begin anew."""
        for cell in self.cells:
            if cell.is_open and cell.core is not None and cell.core.moving.is_distrusted:
                cell.on_events(cell.link.reopen(USED_WRONG_BLOCKS, now), now)

    def num_requests_with(self, adapter: str) -> int:
        """Requests that have not ended and use the adapter of this identity; O(n)."""
        requests = [request for core in self.cores for request in core.requests()] + self.placement.requests()
        return sum(request.new.adapter == adapter for request in requests)

    def _take_all(self, cell: Cell, now: float) -> None:
        lost, cell.lost_steps_had = cell.lost_steps_had, ()
        requests = cell.release_all(now)
        self._unproven.update({request.new.origin: None for request in requests if request.new.origin in lost})
        self.transit.take_back(requests)

    def _end_all(self, now: float) -> None:
        """Another model: no tokens would follow from those of the requests that wait."""
        self._unproven.clear()
        for request in self.placement.requests():
            self._placement_recorder.aborted(now, request.new.origin, "", ANOTHER_MODEL)
            self.transit.forget_stored(request)
            end = self.placement.finish(request.new.origin, FinishReason.ERROR, ANOTHER_MODEL)
            if end is not None:
                self._host.deliver(StepEvents(finished=(end,)), now)
        self.transit.forget_all()

    def set_role(self, number: int, role: Role) -> None:
        """Give a cell another role. What does not fit it goes on elsewhere, if the policy knows roles.

        A running request takes its blocks along; without room for these on the host it stays until it ends.
        """
        cell = self.cells[number]
        cell.role = role
        self._host.notices.add("executor has another role", executor=number, role=role.value)
        if not self.placement.policy.has_roles or cell.calls is None or len(self.cells) == 1:
            return
        if not role.decodes:
            for request in cell.calls.core.requests():
                if request.row >= 0:
                    cell.calls.let_leave(request.new.origin)
        self.transit.take_back(cell.calls.release_waiting())

    def _place(self, now: float) -> None:
        """Give waiting requests to the cells that can start them soon."""
        for placed in self.transit.place(now):
            origin = placed.request.new.origin
            was_lost = origin in self._unproven
            self._unproven.pop(origin, None)
            self.cells[placed.cell].adopt(placed.request, slowly=was_lost)
        for end in self.placement.take_shed():
            self.transit.forget(end.origin)
            self._placement_recorder.aborted(now, end.origin, TOO_LATE)
            self._host.refuse_late(end, 0.0, now)

    def _act(self, number: int, events: list[StepEvent], now: float) -> None:
        while number >= len(self.cells):
            self._add_cell()
        if events:
            self.cells[number].on_events(events, now)

    def _add_cell(self) -> None:
        for core in self.cores:
            self.placement.number_after(core.requests())
        number = len(self.cells)
        cell = Cell(self.links[number], self._host, self, self._recorder.of_cell(number), self._news)
        cell.role = self._settings.role_of(number)
        self.cells.append(cell)
