"""Virtual time: arrivals and ends of steps in order, and the real cores in between. Must not know: costs or decisions.

As in the scheduler process, an answer is processed, new requests are queued, and ``schedule`` is called until it
returns nothing. At the same instant, ends of steps come before arrivals, and arrivals come in the order of their
numbers.
"""

import heapq
from collections.abc import Callable, Sequence

from headway_lab.simulate.collector import RunCollector
from headway_lab.simulate.device import stop_token_of
from headway_lab.simulate.stations import Router, Station
from headway_lab.workload.arrivals import Arrival, Arrivals
from headway_lab.workload.requests import PlannedRequest, Prompts
from headway_proto.sampling import SamplingParams
from headway_scheduler.core.admission.door import RequestRejected
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.events import FinishedEvent

_OWNER = 0
_NEVER = float("inf")
_TOO_LATE = "ttft_slo_ms: no first token was possible in time, and the scheduler sheds such requests"


class NoProgress(RuntimeError):  # noqa: N818 - it names a finding
    """Requests wait, nothing runs and nothing will arrive."""


class Simulation:
    """One run. ``on_progress`` gets the collector and the virtual time."""

    def __init__(
        self,
        router: Router,
        arrivals: Arrivals,
        prompts: Prompts,
        measurement: RunCollector,
        on_progress: Callable[[RunCollector, float], None] | None = None,
    ) -> None:
        self._router = router
        self._stations = router.stations
        self._arrivals = arrivals
        self._prompts = prompts
        self._measurement = measurement
        self._on_progress = on_progress
        self._stop_token_ids = frozenset({stop_token_of(self._stations[0].core.capacity.vocab_size)})
        self._pending: list[Arrival] = list(arrivals.first())
        heapq.heapify(self._pending)

    def run(self) -> None:
        """Run until every request has ended.

        Raises:
            NoProgress: the scheduler stopped for ever.
        """
        while True:
            ends = [(station.next_end_s, number) for number, station in enumerate(self._stations)]
            end_s, number = min([(end, number) for end, number in ends if end is not None], default=(_NEVER, 0))
            arrival_s = self._pending[0].time_s if self._pending else _NEVER
            now = min(end_s, arrival_s)
            if now == _NEVER:
                break
            if end_s <= arrival_s:
                self._take_answer(self._stations[number], now)
            while self._pending and self._pending[0].time_s <= now:
                self._submit(heapq.heappop(self._pending))
            self._schedule(now)
        num_unfinished = self._router.num_waiting + sum(station.core.num_unfinished for station in self._stations)
        if num_unfinished:
            raise NoProgress(f"{num_unfinished} requests wait and nothing runs")

    def _schedule(self, now: float) -> None:
        self._end_shed(self._router.place(now), now)
        for station in self._stations:
            if station.has_news:
                shed = station.schedule(now)
                self._router.pass_on(station)
                for end in shed:
                    self._router.count_end(end)
                self._end_shed(shed, now)

    def _end_shed(self, shed: Sequence[FinishedEvent], now: float) -> None:
        for _ in shed:
            self._measurement.rejected(_TOO_LATE)
            self._expect(self._arrivals.after_end(now, rejected=True))

    def _take_answer(self, station: Station, now: float) -> None:
        step, events = station.take_answer(now)
        self._router.pass_on(station, events.left)
        measurement = self._measurement
        measurement.steps.append(step)
        num_running = sum(station.core.num_running for station in self._stations)
        num_waiting = self._router.num_waiting + sum(station.core.num_waiting for station in self._stations)
        measurement.queue.append((now, num_running, num_waiting))
        measurement.tokens(events.handles, now)
        for event in events.finished:
            self._router.count_end(event)
            measurement.finished(event, now)
            self._expect(self._arrivals.after_end(now))
        if self._on_progress is not None:
            self._on_progress(measurement, now)

    def _submit(self, arrival: Arrival) -> None:
        request = arrival.request
        self._measurement.arrived(request, arrival.time_s)
        try:
            self._router.add(self._event(request), arrival.time_s)
        except RequestRejected as error:
            self._measurement.rejected(f"{error.field}: {error.message}" if error.field else error.message)
            self._expect(self._arrivals.after_end(arrival.time_s, rejected=True))

    def _expect(self, arrival: Arrival | None) -> None:
        if arrival is not None:
            heapq.heappush(self._pending, arrival)

    def _event(self, request: PlannedRequest) -> NewRequestEvent:
        return NewRequestEvent(
            origin=Origin(_OWNER, request.number),
            request_id=str(request.number),
            token_ids=self._prompts.prompt(request),
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.max_tokens or request.num_output_tokens,
            sampling=SamplingParams(seed=request.number),
            stop_token_ids=self._stop_token_ids if request.is_stopped else frozenset(),
            priority=request.priority,
            tenant=request.tenant,
            ttft_slo_ms=request.objectives.ttft_slo_ms,
            itl_slo_ms=request.objectives.itl_slo_ms,
        )
