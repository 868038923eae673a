"""Placement of the simulated scheduler, watched: who waits above the cells, and for how long.

Owns: where the invariants of placement are looked at, and what has to be remembered for them.
Must not know: steps, what goes wrong, or why.
"""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headway_scheduler.core.choosing.cell_load import CellLoad
from headway_scheduler.core.state.request import Request, RequestStatus
from headway_scheduler.placement.placement import Placed
from simulation import fault_invariants as invariants

if TYPE_CHECKING:
    from simulation.fault_scheduler import SchedulerProcess


_LONGEST_BEAT_S = 0.3
"""A scheduler with something to do beats more often than this."""


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
        self._room_since: dict[tuple[int, int, int], float] = {}
        """By cell, its epoch, and arrival: since when there has been room for this request."""
        self._has_placed = False
        """Whether a request was placed since the last check; it may have come back."""
        self._going_on: set[int] = set()
        self._checked_at = 0.0
        self._place_next = placement.place_next
        placement.place_next = self._watched_place_next  # type: ignore[method-assign]

    def _watched_place_next(self, cells: Sequence[CellLoad], now: float) -> Placed | None:
        self._going_on = set(map(id, self._placement._going_on))
        placed = self._place_next(cells, now)
        if placed is not None:
            self._has_placed = True
            request = placed.request
            draw = random.Random(f"hands off {self._world.schedule.seed} {request.new.request_id}").random()
            if request.status is RequestStatus.WAITING and draw < self._world.schedule.settings.hands_off:
                request.is_leaving = True
            if self._watches_fcfs:
                goes_on = id(request) in self._going_on
                invariants.placed_in_order(request, self._line_of(goes_on=goes_on), goes_on=goes_on)
        return placed

    def _waiting(self) -> list[Request]:
        placement = self._placement
        return [request for origin, request in placement._requests.items() if origin not in placement._homeless]

    def _line_of(self, *, goes_on: bool) -> list[Request]:
        """Who waits in the queue, or in the line of those who go on with their blocks."""
        return [other for other in self._waiting() if (other in self._placement._going_on) == goes_on]

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
        allowed = self._allowed_cells(waiting)
        before, self._idle = self._idle, {}
        room_before = self._room_at_the_last_check()
        for cell in self._fleet.open_cells:
            core = cell.core
            if core is None or cell.is_draining:
                continue
            if not core.num_unfinished:
                place = cell.number, core.epoch
                arrivals = {arrival for arrival, cells in allowed.items() if cell.number in cells}
                self._idle[place] = arrivals
                if not self._has_placed:
                    invariants.no_idle_cell(cell.number, before.get(place, set()) & arrivals)
            most = min(self._max_running, core.max_num_batched_tokens, core.capacity.max_num_rows)
            if core.num_waiting or core.num_running >= most:
                continue
            for request in waiting:
                if cell.number in allowed[request.arrival] and invariants.has_blocks_for(core, request):
                    key = cell.number, core.epoch, request.arrival
                    self._room_since[key] = room_before.get(key, self._world.now)
        self._has_placed = False
        if waiting and len(self._room_since) >= len(waiting):
            invariants.no_wait_beside_room(self._room_since, allowed, self._world.now)

    def _room_at_the_last_check(self) -> dict[tuple[int, int, int], float]:
        """Since when there was room; nothing if the scheduler has stood still since."""
        before, self._room_since = self._room_since, {}
        has_stood_still = self._world.now - self._checked_at > _LONGEST_BEAT_S
        self._checked_at = self._world.now
        return {} if has_stood_still else before

    def _allowed_cells(self, waiting: Sequence[Request]) -> dict[int, set[int]]:
        """By arrival: the cells that the policy would give each request, if they had room."""
        accepting = [load for load in self._fleet.transit.loads() if load.accepts]
        return {
            request.arrival: {load.number for load in self._placement.policy.cells_for(request, accepting)}
            for request in waiting
        }
