"""Requests on their way: from the queue into a cell, and from one cell to another, with or without their blocks.

Owns: who is placed where, what comes back, the leases of blocks that travel, and who is sent on. Must not know: links,
frames, the records of a flight, or where cells come from.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from headway_scheduler.core.choosing.cell_load import CellLoad
from headway_scheduler.core.choosing.choice import has_preempted
from headway_scheduler.core.choosing.policies import RELIEVE_INTERVAL_S
from headway_scheduler.core.choosing.roles import Role
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.limits import ExecutorCapacity
from headway_scheduler.core.state.request import Request
from headway_scheduler.core.state.stored_blocks import StoredBlocks
from headway_scheduler.core.view import SchedulerView
from headway_scheduler.placement.placement import Placed, Placement


class TransitCalls(Protocol):
    """A core, and what is asked of it."""

    @property
    def core(self) -> Scheduler: ...  # noqa: D102 - see above

    def let_leave(self, origin: Origin) -> bool:
        """Let a running request go on elsewhere after its next token."""

    def release(self, origins: Sequence[Origin]) -> list[Request]:
        """Give up these requests; those that a step in flight owes a token come later."""

    def return_lease(self, stored: StoredBlocks) -> None:
        """Nobody needs these blocks of its executor's pool any more."""


class TransitCell(Protocol):
    """What is needed of a cell. ``calls``: None before an executor joins."""

    @property
    def number(self) -> int: ...  # noqa: D102 - its place among the cells
    @property
    def role(self) -> Role: ...  # noqa: D102 - what it is for
    @property
    def calls(self) -> TransitCalls | None: ...  # noqa: D102 - see above
    @property
    def is_open(self) -> bool: ...  # noqa: D102 - whether its executor is there
    @property
    def is_draining(self) -> bool: ...  # noqa: D102 - whether it takes no requests


class Transit:
    """Times in seconds. ``cells``: all of them, by number; cells may be added while it works."""

    def __init__(self, placement: Placement, cells: Sequence[TransitCell]) -> None:
        self.num_moved = 0
        """How often a request went from one cell to another."""
        self._placement = placement
        self._cells = cells
        self._left: dict[Origin, int] = {}
        """The cells that waiting requests came from."""
        self._relieve_at = float("-inf")
        self._cores: list[Scheduler] = []
        self._loads: dict[int, CellLoad] = {}
        """By cell; until an epoch begins anywhere."""
        self._capacities: list[ExecutorCapacity] = []
        """Different ones; executors are usually alike."""
        self.cores_changed()

    @property
    def num_on_the_way(self) -> int:
        """Requests that left a cell and have not reached another."""
        return len(self._left)

    def cores_changed(self) -> None:
        """A core began an epoch; it may be new, and its executor another."""
        self._cores = [cell.calls.core for cell in self._cells if cell.calls is not None]
        self._loads.clear()
        self._capacities.clear()

    def loads(self) -> list[CellLoad]:
        """What placement asks of the cells with an executor, in this round."""
        loads = []
        for cell in self._cells:
            if cell.is_open and cell.calls is not None:
                load = self._loads.get(cell.number)
                if load is None:
                    load = self._loads[cell.number] = self._load_of(cell, cell.calls.core)
                else:
                    load.begin_round(accepts=not cell.is_draining, role=cell.role)
                loads.append(load)
        return loads

    def _load_of(self, cell: TransitCell, core: Scheduler) -> CellLoad:
        if core.capacity not in self._capacities:
            self._capacities.append(core.capacity)
        kind = self._capacities.index(core.capacity)
        return CellLoad(cell.number, SchedulerView(core), accepts=not cell.is_draining, role=cell.role, kind=kind)

    def place(self, now: float) -> Iterator[Placed]:
        """Take requests that can start soon out of the queue. Each must be adopted before the next is asked for."""
        loads = self.loads()
        if not loads:
            return
        by_number = {load.number: load for load in loads}
        while (placed := self._placement.place_next(loads, now)) is not None:
            request = placed.request
            self.num_moved += self._left.pop(request.new.origin, placed.cell) != placed.cell
            if request.stored is not None and not self._can_reach(request.stored):
                self.forget_stored(request)
            yield placed
            by_number[placed.cell].read_anew()

    def take_back(self, requests: Sequence[Request]) -> None:
        """Let these requests wait for a cell."""
        if len(self._cells) == 1 and requests:
            # Its core has numbered the requests until now.
            for core in self._cores:
                self._placement.number_after(core.requests())
        for request in requests:
            placed = self._placement.placed(request.new.origin)
            self._left[request.new.origin] = 0 if placed is None else placed.cell
            self._placement.take_back(request)

    def forget(self, origin: Origin) -> None:
        """A request has ended, perhaps on its way."""
        self._left.pop(origin, None)

    def forget_all(self) -> None:
        """The requests on their way have ended."""
        self._left.clear()

    def return_leases(self, leases: Sequence[StoredBlocks]) -> None:
        """Tell the cells that keep the books of these pools."""
        for stored in leases:
            for cell in self._cells:
                calls = cell.calls
                if calls is not None and calls.core.capacity.host_pool == stored.pool:
                    calls.return_lease(stored)

    def forget_stored(self, request: Request) -> None:
        """The request ends, or goes on without the blocks that it left somewhere."""
        if request.stored is not None:
            self.return_leases((request.stored,))
            request.forget_stored()

    def distrust(self, epoch: int) -> None:
        """Who waits for a cell goes on without the blocks that this epoch wrote, or that were computed from such."""
        for request in self._placement.requests():
            if request.stored is not None and epoch in request.stored.sources:
                self._placement.forget_stored(request)

    def relieve_gaps(self, now: float) -> None:
        """Who misses its gaps in one cell goes on in another that has slack."""
        policy = self._placement.policy
        if now >= self._relieve_at and policy.has_roles:
            self._relieve_at = now + RELIEVE_INTERVAL_S
            for number, late in policy.to_relieve(self.loads()):
                self._calls_of(number).let_leave(late.new.origin)

    def relieve_preempted(self) -> bool:
        """Who lost its blocks in one cell goes on in another that has room. Return whether there was anybody."""
        if not has_preempted(self._cores):
            return False
        loads = self.loads()
        for load in loads:
            request = load.stranded()
            if request is not None and self._placement.would_place_beside(request, loads, load):
                self.take_back(self._calls_of(load.number).release([request.new.origin]))
                load.read_anew()
        return True

    def _calls_of(self, number: int) -> TransitCalls:
        """Of a cell whose load was asked for, so that it has a core."""
        calls = self._cells[number].calls
        assert calls is not None
        return calls

    def _can_reach(self, stored: StoredBlocks) -> bool:
        calls = (cell.calls for cell in self._cells if cell.is_open)
        pools = (those.core.capacity.host_pool for those in calls if those is not None)
        return stored.outlives_process or stored.pool in pools
