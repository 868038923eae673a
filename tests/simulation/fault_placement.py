"""Placement of the simulated scheduler, watched: who waits above the cells, and for how long.

Owns: where the invariants of placement are looked at, and what has to be remembered for them.
Must not know: steps, what goes wrong, or why.
"""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headway_scheduler.core.state.request import Request, RequestStatus
from headway_scheduler.placement.cell_load import CellLoad
from headway_scheduler.placement.placement import Placed
from simulation import fault_invariants as invariants

if TYPE_CHECKING:
    from simulation.fault_scheduler import SchedulerProcess


class PlacementWatch:
    """Wraps the choice of the next request. ``process``: the scheduler."""

    def __init__(self, process: "SchedulerProcess") -> None:
        self._world = process.world
        self._fleet = process.engine.fleet
        self._placement = placement = self._fleet.placement
        limits = process.engine.limits
        self._watches_fcfs = limits.order in {"fcfs", "priority"}
        self._max_running = limits.max_num_seqs
        self._waits: dict[int, int] = {}
        """By arrival: steps of all cells since the request waits here."""
        self._idle: dict[tuple[int, int], set[int]] = {}
        """By cell without any request, and its epoch: the arrivals that waited."""
        self._room_since: dict[tuple[int, int], float] = {}
        """By cell and arrival: since when there has been room for this request."""
        self._has_placed = False
        """Whether a request was placed since the last check; it may have come back."""
        self._place_next = placement.place_next
        placement.place_next = self._watched_place_next  # type: ignore[method-assign]

    def _watched_place_next(self, cells: Sequence[CellLoad], now: float) -> Placed | None:
        placed = self._place_next(cells, now)
        if placed is not None:
            self._has_placed = True
            request = placed.request
            draw = random.Random(f"hands off {self._world.schedule.seed} {request.new.request_id}").random()
            if request.status is RequestStatus.WAITING and draw < self._world.schedule.settings.hands_off:
                request.is_leaving = True
            if self._watches_fcfs:
                invariants.placed_in_order(placed.request, self._waiting())
        return placed

    def _waiting(self) -> list[Request]:
        placement = self._placement
        return [request for origin, request in placement._requests.items() if origin not in placement._homeless]

    def count_step(self) -> None:
        """A step was sent to any executor, and nobody ran alone."""
        waiting = self._placement._requests.values()
        self._waits = {request.arrival: self._waits.get(request.arrival, 0) + 1 for request in waiting}
        invariants.no_starvation_above(self._waits, len(self._fleet.cells))

    def check(self) -> None:
        """After each beat: nobody waits here while a cell has room."""
        if not len(self._placement) or self._fleet.is_paused:
            self._idle, self._room_since, self._has_placed = {}, {}, False
            return
        waiting = self._waiting()
        arrivals = {request.arrival for request in waiting}
        before, self._idle = self._idle, {}
        room_before, self._room_since = self._room_since, {}
        for cell in self._fleet.open_cells:
            core = cell.core
            if core is None or cell.is_draining:
                continue
            if not core.num_unfinished:
                place = cell.number, core.epoch
                self._idle[place] = arrivals
                if not self._has_placed:
                    invariants.no_idle_cell(cell.number, before.get(place, set()) & arrivals)
            most = min(self._max_running, core.max_num_batched_tokens, core.capacity.max_num_rows)
            if core.num_waiting or core.num_running >= most:
                continue
            for request in waiting:
                if invariants.has_blocks_for(core, request):
                    key = cell.number, request.arrival
                    self._room_since[key] = room_before.get(key, self._world.now)
        self._has_placed = False
        if waiting and len(self._room_since) >= len(waiting):
            invariants.no_wait_beside_room(self._room_since, arrivals, self._world.now)
