"""Latencies, rates and each tenant's service, as the scheduler sees them.

Owns: these figures. Must not know: readers, the clock. All rows that decode in a step have the same gap since the
previous one, so a decode step costs one observation. Rows that start or resume have their own. (A row that was held
back is counted with the others, despite its longer gap.)
"""

from collections import Counter, OrderedDict, defaultdict, deque
from typing import NamedTuple

import msgspec

from headway_process.histogram import Histogram, fine_durations
from headway_scheduler.core.state.events import FinishedEvent, StepEvents
from headway_scheduler.core.state.request import FinishReason
from headway_scheduler.figures.fleet_view import FleetView

MARK_INTERVAL_S = 5.0
NUM_MARKS = 12
"""Percentiles cover the last minute."""
RATE_MARKS = 2
"""Rates cover the last five to ten seconds."""
MAX_TENANTS = 64
"""A new tenant replaces the one unused for the longest time."""

_MAX_STARTERS = 256

# They include vLLM's bounds for the same histogram, for its dashboards.
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
_GAP_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0),
    *(480.0, 960.0, 1920.0, 7680.0),
)
_REQUEST_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_STEP_TOKENS = (1.0, *(float(1 << power) for power in range(3, 15)))
_PREDICTION_RATIO = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)


class TenantTokens(msgspec.Struct):
    """Tokens of started prompts and ended outputs."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


class TenantService(NamedTuple):
    """``counter``: service under the order ``fair``."""

    tenant: str
    num_running: int
    num_waiting: int
    num_prompt_tokens: int
    num_output_tokens: int
    counter: float | None


class PredictionError(msgspec.Struct):
    """Predicted minus actual output tokens, summed over ``count`` ended requests."""

    count: int = 0
    sum_absolute: int = 0
    sum_signed: int = 0
    sum_actual: int = 0


class Rates(NamedTuple):
    """Recent tokens per second. A prompt counts when it starts."""

    prompt_tokens_per_s: float
    output_tokens_per_s: float


class _Totals(NamedTuple):
    time: float
    num_prompt_tokens: int
    num_output_tokens: int


class ExecutorStatistics:
    """What is measured of one executor."""

    def __init__(self) -> None:
        self.since: float | None = None
        """When it joined; None without one."""
        self.last_answer_at: float | None = None
        self.last_device_time_us = 0
        self.decoded_at = 0.0
        self.starters: deque[tuple[float, int]] = deque(maxlen=_MAX_STARTERS)
        """(time, count) of rows that got a token without decoding, since rows last decoded."""


class ServingStatistics:
    """Times in seconds, monotonic."""

    def __init__(self) -> None:
        fine = fine_durations()
        self.first_token_s = Histogram(_FIRST_TOKEN_S, fine, NUM_MARKS)
        self.gap_s = Histogram(_GAP_S, fine, NUM_MARKS)
        self.queue_s = Histogram(_REQUEST_S, fine, NUM_MARKS)
        self.prefill_s = Histogram(_REQUEST_S)
        self.decode_s = Histogram(_REQUEST_S)
        self.request_s = Histogram(_REQUEST_S, fine, NUM_MARKS)
        self.time_per_output_token_s = Histogram(_GAP_S)
        self.prompt_tokens = Histogram(_REQUEST_TOKENS)
        self.output_tokens = Histogram(_REQUEST_TOKENS)
        self.step_tokens = Histogram(_STEP_TOKENS)
        """The caller observes each sent step."""
        self.prediction_ratio = Histogram(_PREDICTION_RATIO)
        self._with_recent = (self.first_token_s, self.gap_s, self.queue_s, self.request_s)
        self.ends: Counter[FinishReason] = Counter()
        self.prediction_error = PredictionError()
        self.started_at: float | None = None
        self.executors: defaultdict[int, ExecutorStatistics] = defaultdict(ExecutorStatistics)
        """By the number of the cell."""
        self.num_epochs = 0
        self.num_executor_losses = 0
        self.tenants: OrderedDict[str, TenantTokens] = OrderedDict()
        """By name, the most recent one last."""
        self.next_mark_at = 0.0
        self._totals: deque[_Totals] = deque(maxlen=RATE_MARKS)

    def count_arrival(self, tenant: str) -> None:
        """Count an accepted request."""
        if tenant:
            self._tokens_of(tenant)

    def count_answer(self, events: StepEvents, device_time_us: int, now: float, cell: int = 0) -> None:
        """A step of ``cell`` returned with ``events``."""
        executor = self.executors[cell]
        num_starters = len(events.first_tokens) + len(events.resumed_gaps_s)
        num_decoded = len(events.token_ids) - num_starters
        if num_decoded > 0:
            if executor.starters:
                num_decoded = self._observe_first_gaps(executor, num_decoded, now)
            self.gap_s.observe(now - executor.decoded_at, num_decoded)
            executor.decoded_at = now
        if num_starters:
            self._observe_starters(executor, events, now)
        if events.admitted:
            self._observe_admissions(events)
        executor.last_answer_at = now
        executor.last_device_time_us = device_time_us

    def count_end(self, end: FinishedEvent, now: float) -> None:
        """Count an ended request."""
        self.ends[end.reason] += 1
        num_new_tokens = end.num_output_tokens - end.num_held_tokens
        if num_new_tokens == 1:
            self._forget_starter(end.first_token_time)
        if end.tenant:
            self._tokens_of(end.tenant).num_output_tokens += num_new_tokens
        if end.reason not in {FinishReason.STOP, FinishReason.LENGTH}:
            return
        self.request_s.observe(now - end.arrival_time)
        self.prompt_tokens.observe(end.num_prompt_tokens)
        self.output_tokens.observe(end.num_output_tokens)
        if end.first_token_time is not None and end.scheduled_time is not None:
            decode_s = now - end.first_token_time
            self.prefill_s.observe(end.first_token_time - end.scheduled_time)
            self.decode_s.observe(decode_s)
            if num_new_tokens > 1:
                self.time_per_output_token_s.observe(decode_s / (num_new_tokens - 1))
        if end.num_predicted_tokens is not None and end.num_output_tokens:
            self._observe_prediction(end.num_predicted_tokens, end.num_output_tokens)

    def count_epoch(self, now: float, cell: int = 0) -> None:
        """An epoch of ``cell`` began."""
        self.num_epochs += 1
        executor = self.executors[cell]
        if executor.since is None:
            executor.since = now
        executor.starters.clear()

    def count_executor_loss(self, cell: int = 0) -> None:
        """The executor of ``cell`` was lost."""
        self.num_executor_losses += 1
        self.executors[cell].since = None

    def keep_time(self, now: float, view: FleetView | None) -> None:
        """Move the recent window on; call it before reading."""
        if self.started_at is None:
            self.started_at = now
        if now < self.next_mark_at:
            return
        self.next_mark_at = now + MARK_INTERVAL_S
        if view is None or not view.num_running:
            for executor in self.executors.values():
                executor.starters.clear()  # they have ended, or will start again
        for histogram in self._with_recent:
            histogram.mark()
        self._totals.append(_Totals(now, 0, 0) if view is None else _totals(view, now))

    def rates(self, view: FleetView, now: float) -> Rates:
        """The rates of the last seconds."""
        if not self._totals or now <= self._totals[0].time:
            return Rates(0.0, 0.0)
        before, after = self._totals[0], _totals(view, now)
        elapsed_s = now - before.time
        return Rates(
            (after.num_prompt_tokens - before.num_prompt_tokens) / elapsed_s,
            (after.num_output_tokens - before.num_output_tokens) / elapsed_s,
        )

    def tenant_services(self, view: FleetView) -> list[TenantService]:
        """One entry per tenant; O(live requests)."""
        if not self.tenants:
            return []
        running: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        num_new_tokens: Counter[str] = Counter()
        for request, executor in view.requests():
            new = request.new
            (running if request.row >= 0 else waiting)[new.tenant] += 1
            num_new_tokens[new.tenant] += view.figures_of(request, executor).num_tokens - len(new.token_ids)
        return [
            TenantService(
                tenant=name,
                num_running=running[name],
                num_waiting=waiting[name],
                num_prompt_tokens=tokens.num_prompt_tokens,
                num_output_tokens=tokens.num_output_tokens + num_new_tokens[name],
                counter=view.service_of(name),
            )
            for name, tokens in self.tenants.items()
        ]

    def _observe_first_gaps(self, executor: ExecutorStatistics, num_decoded: int, now: float) -> int:
        """Observe the first gap of started rows; return how many other rows decode."""
        for since, count in executor.starters:
            num_of_these = min(count, num_decoded)
            self.gap_s.observe(now - since, num_of_these)
            num_decoded -= num_of_these
        executor.starters.clear()
        return num_decoded

    def _observe_starters(self, executor: ExecutorStatistics, events: StepEvents, now: float) -> None:
        for first in events.first_tokens:
            self.first_token_s.observe(now - first.arrival_time)
        for gap_s in events.resumed_gaps_s:
            self.gap_s.observe(gap_s)
        executor.starters.append((now, len(events.first_tokens) + len(events.resumed_gaps_s)))

    def _forget_starter(self, since: float | None) -> None:
        """A row that started then has ended; it will not decode."""
        for executor in self.executors.values():
            for place, (time, count) in enumerate(executor.starters):
                if time == since:
                    executor.starters[place] = time, count - 1
                    if count == 1:
                        del executor.starters[place]
                    return

    def _observe_admissions(self, events: StepEvents) -> None:
        for admitted in events.admitted:
            self.queue_s.observe(admitted.scheduled_time - admitted.arrival_time)
            if admitted.tenant:
                self._tokens_of(admitted.tenant).num_prompt_tokens += admitted.num_prompt_tokens

    def _observe_prediction(self, predicted: int, actual: int) -> None:
        error = self.prediction_error
        error.count += 1
        error.sum_absolute += abs(predicted - actual)
        error.sum_signed += predicted - actual
        error.sum_actual += actual
        self.prediction_ratio.observe(abs(predicted - actual) / actual)

    def _tokens_of(self, tenant: str) -> TenantTokens:
        tokens = self.tenants.get(tenant)
        if tokens is None:
            if len(self.tenants) == MAX_TENANTS:
                self.tenants.popitem(last=False)
            tokens = self.tenants[tenant] = TenantTokens()
        self.tenants.move_to_end(tenant)
        return tokens


def _totals(view: FleetView, now: float) -> _Totals:
    return _Totals(now, view.counters.num_prompt_tokens, view.counters.num_output_tokens)
