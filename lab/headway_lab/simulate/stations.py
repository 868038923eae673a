"""Simulated executors, each with its core, and the two ways to share requests among them.

Owns: which core gets a request, by the scheduler's own placement or in turn. Must not know: arrivals, figures, or how
requests and their blocks find another core: that is the scheduler's ``Transit``.
"""

from collections.abc import Sequence
from typing import Protocol

from headway_lab.simulate.device import StepRecord, VirtualDevice
from headway_scheduler.cells.core_calls import CoreCalls
from headway_scheduler.core.admission.door import check_request, limit_of
from headway_scheduler.core.choosing.policies import PlacementPolicy
from headway_scheduler.core.choosing.roles import Role
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.events import FinishedEvent, StepEvents
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.flight.recorder import NullRecorder
from headway_scheduler.placement.placement import AGGREGATED, Placement
from headway_scheduler.placement.transit import Transit


class Station:
    """One executor and its core. Times in seconds."""

    is_open = True
    is_draining = False

    def __init__(self, core: Scheduler, device: VirtualDevice, number: int = 0, role: Role = Role.BOTH) -> None:
        self.core = core
        self.number = number
        self.role = role
        self.has_news = False
        """Whether the core may have another step now."""
        self.num_ended = 0
        self.busy_s = 0.0
        self.calls = CoreCalls(core, NullRecorder(), self._note_news)
        self._device = device

    @property
    def next_end_s(self) -> float | None:
        """The end of the oldest unanswered step, if any."""
        return self._device.next_end_s

    def take_answer(self, now: float) -> tuple[StepRecord, StepEvents]:
        """End the oldest step."""
        step, answer = self._device.answer()
        events = self.core.update(answer, now)
        self.has_news = True
        self.num_ended += len(events.finished)
        self.busy_s += step.end_s - step.start_s - step.overlap_s
        return step, events

    def schedule(self, now: float) -> tuple[FinishedEvent, ...]:
        """Send as many steps as may be in flight; return the requests that were shed."""
        self.has_news = False
        while (output := self.core.schedule(now)) is not None:
            self._device.take(output, now)
        return self.core.take_shed()

    def _note_news(self) -> None:
        self.has_news = True


class Router(Protocol):
    """Shares requests among stations."""

    stations: Sequence[Station]

    @property
    def num_waiting(self) -> int: ...  # noqa: D102 - requests that no core has

    @property
    def num_moved(self) -> int: ...  # noqa: D102 - how often a request went from one core to another

    def add(self, new: NewRequestEvent, now: float) -> None:
        """Take a request.

        Raises:
            RequestRejected: it can never run, or the queue is full.
        """

    def place(self, now: float) -> tuple[FinishedEvent, ...]:
        """Give cores what they get now; return the requests that were shed."""

    def count_end(self, end: FinishedEvent) -> None:
        """A request has ended in a core."""

    def pass_on(self, station: Station, left: Sequence[Origin] = ()) -> None:
        """Take what this executor gives up: requests that ``left``, and blocks of others that it needs no more."""


class InTurn:
    """Replicas: each has its own queue, and the next request goes to the next of them."""

    num_waiting = 0
    num_moved = 0

    def __init__(self, stations: Sequence[Station]) -> None:
        self.stations = stations
        self._num_taken = 0

    def add(self, new: NewRequestEvent, now: float) -> None:
        """See ``Router``."""
        station = self.stations[self._num_taken % len(self.stations)]
        self._num_taken += 1
        station.calls.add_request(new, now)

    def place(self, now: float) -> tuple[FinishedEvent, ...]:
        """See ``Router``: nothing waits above the cores."""
        del now
        return ()

    def count_end(self, end: FinishedEvent) -> None:
        """See ``Router``."""

    def pass_on(self, station: Station, left: Sequence[Origin] = ()) -> None:
        """See ``Router``: nobody leaves."""


class OneQueue:
    """Executors behind one scheduler: its placement chooses, as ``headway_scheduler.cells.fleet`` asks it to."""

    def __init__(
        self, stations: Sequence[Station], limits: SchedulerLimits, policy: PlacementPolicy = AGGREGATED
    ) -> None:
        self.stations = stations
        self._placement = Placement(limits, policy)
        self._transit = Transit(self._placement, stations)
        for station in stations:
            self._placement.cell_opened(station.core.capacity)

    @property
    def num_waiting(self) -> int:
        """See ``Router``."""
        return len(self._placement)

    @property
    def num_moved(self) -> int:
        """See ``Router``."""
        return self._transit.num_moved

    def add(self, new: NewRequestEvent, now: float) -> None:
        """See ``Router``."""
        capacity = self.stations[0].core.capacity
        check_request(new, limit_of(new, capacity.max_request_tokens), capacity)
        self._placement.add(new, self._transit.loads, now)

    def place(self, now: float) -> tuple[FinishedEvent, ...]:
        """See ``Router``."""
        self._transit.relieve_gaps(now)
        self._transit.relieve_preempted()
        if not len(self._placement):
            return ()
        for placed in self._transit.place(now):
            self.stations[placed.cell].calls.adopt(placed.request)
        shed = self._placement.take_shed()
        for end in shed:
            self._transit.forget(end.origin)
        return shed

    def count_end(self, end: FinishedEvent) -> None:
        """See ``Router``."""
        self._placement.count_end(end)

    def pass_on(self, station: Station, left: Sequence[Origin] = ()) -> None:
        """See ``Router``."""
        self._transit.take_back(station.calls.release(left))
        self._transit.return_leases(station.core.moving.take_ended_leases())
