"""Virtual time: arrivals and ends of steps in order, and the real core in between. Must not know: costs or decisions.

As in the scheduler process, an answer is processed, new requests are queued, and ``schedule`` is called until it
returns nothing. At the same instant, ends of steps come before arrivals, and arrivals come in the order of their
numbers.
"""

import heapq
from collections.abc import Callable

from headway_lab.simulate.collector import RunCollector
from headway_lab.simulate.device import VirtualDevice, stop_token_of
from headway_lab.workload.arrivals import Arrival, Arrivals
from headway_lab.workload.requests import PlannedRequest, Prompts
from headway_proto.sampling import SamplingParams
from headway_scheduler.core.admission.door import RequestRejected
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin

_OWNER = 0
_NEVER = float("inf")


class NoProgress(RuntimeError):  # noqa: N818 - it names a finding
    """Requests wait, nothing runs and nothing will arrive."""


class Simulation:
    """One run. ``on_progress`` gets the collector and the virtual time."""

    def __init__(
        self,
        scheduler: Scheduler,
        device: VirtualDevice,
        arrivals: Arrivals,
        prompts: Prompts,
        measurement: RunCollector,
        on_progress: Callable[[RunCollector, float], None] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._device = device
        self._arrivals = arrivals
        self._prompts = prompts
        self._measurement = measurement
        self._on_progress = on_progress
        self._stop_token_ids = frozenset({stop_token_of(scheduler.capacity.vocab_size)})
        self._pending: list[Arrival] = list(arrivals.first())
        heapq.heapify(self._pending)

    def run(self) -> None:
        """Run until every request has ended.

        Raises:
            NoProgress: the scheduler stopped for ever.
        """
        while True:
            end_s = self._device.next_end_s
            arrival_s = self._pending[0].time_s if self._pending else _NEVER
            if end_s is None and arrival_s == _NEVER:
                break
            if end_s is not None and end_s <= arrival_s:
                now = end_s
                self._take_answer(now)
            else:
                now = arrival_s
            while self._pending and self._pending[0].time_s <= now:
                self._submit(heapq.heappop(self._pending))
            self._schedule(now)
        if self._scheduler.num_unfinished:
            raise NoProgress(f"{self._scheduler.num_unfinished} requests wait and nothing runs")

    def _schedule(self, now: float) -> None:
        while (output := self._scheduler.schedule(now)) is not None:
            self._device.take(output, now)
        for _ in self._scheduler.take_shed():
            self._measurement.rejected()
            self._expect(self._arrivals.after_end(now, rejected=True))

    def _take_answer(self, now: float) -> None:
        step, answer = self._device.answer()
        events = self._scheduler.update(answer, now)
        measurement = self._measurement
        measurement.steps.append(step)
        measurement.queue.append((now, self._scheduler.num_running, self._scheduler.num_waiting))
        measurement.tokens(events.handles, now)
        for event in events.finished:
            measurement.finished(event, now)
            self._expect(self._arrivals.after_end(now))
        if self._on_progress is not None:
            self._on_progress(measurement, now)

    def _submit(self, arrival: Arrival) -> None:
        request = arrival.request
        self._measurement.arrived(request, arrival.time_s)
        try:
            self._scheduler.add_request(self._event(request), arrival.time_s)
        except RequestRejected:
            self._measurement.rejected()
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
