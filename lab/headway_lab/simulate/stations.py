"""Simulated executors, each with its core, and the two ways to share requests among them.

Owns: which core gets a request, by the scheduler's own placement or in turn. Must not know: arrivals or figures.
"""

from collections.abc import Sequence
from typing import Protocol

from headway_lab.simulate.device import StepRecord, VirtualDevice
from headway_scheduler.core.admission.door import check_request, limit_of
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import NewRequestEvent
from headway_scheduler.core.state.events import FinishedEvent, StepEvents
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.core.view import SchedulerView
from headway_scheduler.placement.cell_load import CellLoad
from headway_scheduler.placement.placement import Placement


class Station:
    """One executor and its core. Times in seconds."""

    def __init__(self, core: Scheduler, device: VirtualDevice) -> None:
        self.core = core
        self.has_news = False
        """Whether the core may have another step now."""
        self.num_ended = 0
        self.busy_s = 0.0
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


class Router(Protocol):
    """Shares requests among stations."""

    stations: Sequence[Station]

    @property
    def num_waiting(self) -> int: ...  # noqa: D102 - requests that no core has

    def add(self, new: NewRequestEvent, now: float) -> None:
        """Take a request.

        Raises:
            RequestRejected: it can never run, or the queue is full.
        """

    def place(self, now: float) -> tuple[FinishedEvent, ...]:
        """Give cores what they get now; return the requests that were shed."""

    def count_end(self, end: FinishedEvent) -> None:
        """A request has ended in a core."""


class InTurn:
    """Replicas: each has its own queue, and the next request goes to the next of them."""

    num_waiting = 0

    def __init__(self, stations: Sequence[Station]) -> None:
        self.stations = stations
        self._num_taken = 0

    def add(self, new: NewRequestEvent, now: float) -> None:
        """See ``Router``."""
        station = self.stations[self._num_taken % len(self.stations)]
        self._num_taken += 1
        station.has_news = True
        station.core.add_request(new, now)

    def place(self, now: float) -> tuple[FinishedEvent, ...]:
        """See ``Router``: nothing waits above the cores."""
        del now
        return ()

    def count_end(self, end: FinishedEvent) -> None:
        """See ``Router``."""


class OneQueue:
    """Executors behind one scheduler: its placement chooses, as ``headway_scheduler.fleet`` asks it to."""

    def __init__(self, stations: Sequence[Station], limits: SchedulerLimits) -> None:
        self.stations = stations
        self._placement = Placement(limits)
        for station in stations:
            self._placement.cell_opened(station.core.capacity)

    @property
    def num_waiting(self) -> int:
        """See ``Router``."""
        return len(self._placement)

    def add(self, new: NewRequestEvent, now: float) -> None:
        """See ``Router``."""
        capacity = self.stations[0].core.capacity
        check_request(new, limit_of(new, capacity.max_request_tokens), capacity)
        self._placement.add(new, self._loads(), now)

    def place(self, now: float) -> tuple[FinishedEvent, ...]:
        """See ``Router``."""
        if not len(self._placement):
            return ()
        loads = self._loads()  # anew for each round: a load remembers what it has asked
        while (placed := self._placement.place_next(loads, now)) is not None:
            station = self.stations[placed.cell]
            station.core.moving.adopt(placed.request)
            station.has_news = True
        return self._placement.take_shed()

    def count_end(self, end: FinishedEvent) -> None:
        """See ``Router``."""
        self._placement.count_end(end)

    def _loads(self) -> list[CellLoad]:
        views = [SchedulerView(station.core) for station in self.stations]
        return [CellLoad(number, view, accepts=True) for number, view in enumerate(views)]
