"""A flight as a workload: its requests and its step times."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np

from headway_lab.simulate.collector import RunCollector
from headway_lab.simulate.device import StepRecord
from headway_lab.simulate.roofline import StepTime
from headway_lab.workload.requests import Objectives, PlannedRequest
from headway_proto.columns import Int32Array, decode_column, decode_columns
from headway_proto.step import ExecutorOutput, SchedulerOutput
from headway_scheduler.core.policies.step_time import StepTimeModel
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.events import FinishedEvent
from headway_scheduler.core.state.limits import ExecutorCapacity
from headway_scheduler.core.state.step_shape import StepShape, prefill_pairs
from headway_scheduler.core.view import SchedulerView
from headway_scheduler.flight.records import Answered, Arrived, EpochBegan, Turn
from headway_scheduler.flight.replay import Event, Replay


class RunStep(NamedTuple):
    """A step that was answered."""

    shape: StepShape
    record: StepRecord
    device_s: float
    follows_at_once: bool
    """It was there when the one before it returned, so that the time between the two answers is its own."""


class _Sent(NamedTuple):
    shape: StepShape
    sent_s: float
    num_decodes: int
    num_swapped_blocks: int


class FittedCosts:
    """Learned step times. ``median_error`` is relative."""

    def __init__(self, steps: Sequence[RunStep], swap_us_per_block: float) -> None:
        """``steps`` are in order, at least one."""
        self.model_name, self.device_name = "recorded", "as recorded"
        self._swap_block_s = swap_us_per_block / 1e6
        self._model = StepTimeModel()
        for step in steps:
            self._model.observe(step.shape, step.device_s)
        between = [
            step.record.end_s - step.record.start_s - step.device_s - step.record.swap_s
            for step in steps
            if step.follows_at_once
        ]
        self._between_s = max(0.0, median(between)) if between else 0.0
        self._typical_s = median(step.device_s for step in steps)
        errors = [abs(self._device_s(step.shape) / step.device_s - 1.0) for step in steps if step.device_s > 0]
        self.median_error = median(errors) if errors else 0.0

    def _device_s(self, shape: StepShape) -> float:
        predicted_s = self._model.predict_s(shape)
        return self._typical_s if predicted_s is None else predicted_s

    def step_time(
        self, num_scheduled_tokens: Int32Array, num_computed_tokens: Int32Array, num_samples: int
    ) -> StepTime:
        """See ``StepCosts``."""
        del num_samples
        device_s = self._device_s(shape_of(num_scheduled_tokens, num_computed_tokens))
        return StepTime(device_s, 0.0, 0.0, 0.0, 0.0, self._between_s)

    def swap_time(self, num_blocks: int, block_size: int, host_bandwidth: float) -> float:
        """See ``StepCosts``; measured when the executor opened."""
        del block_size, host_bandwidth
        return num_blocks * self._swap_block_s


def shape_of(num_scheduled_tokens: Int32Array, num_computed_tokens: Int32Array) -> StepShape:
    """Return a step's shape. The arguments have shape ``[rows]``."""
    is_chunk = num_scheduled_tokens > 1
    pairs = sum(map(prefill_pairs, num_scheduled_tokens[is_chunk].tolist(), num_computed_tokens[is_chunk].tolist()))
    runs = num_scheduled_tokens > 0
    return StepShape(
        int(num_scheduled_tokens.sum()), int(np.count_nonzero(runs)), int(num_computed_tokens[runs].sum()), pairs
    )


class Recording:
    """Collects a replay. Times count from the first event."""

    def __init__(self) -> None:
        self._first_s: float | None = None
        self.capacity: ExecutorCapacity | None = None
        """The newest executor's."""
        self.num_executors = 1
        self.steps: list[RunStep] = []
        self._arrivals: list[Arrived] = []
        self._number_of: dict[tuple[int, int], int] = {}
        self._num_output: dict[int, int] = {}
        self._ends: list[tuple[int, FinishedEvent, float]] = []
        self._tokens: list[tuple[Int32Array, float]] = []
        self._under_way: dict[tuple[int, int], _Sent] = {}
        """By executor and number of the step."""
        self._last_answer_s: dict[int, float] = {}
        self._queue: list[tuple[float, int, int]] = []
        self._num_proposed = 0
        self._num_accepted = 0

    @property
    def acceptance(self) -> float:
        """The share of accepted proposed tokens."""
        return self._num_accepted / max(self._num_proposed, 1)

    def record(self, event: Event, replay: Replay) -> None:
        """Process one event."""
        record = event.record
        if self._first_s is None and event.now:
            self._first_s = event.now
        now = event.now - (self._first_s or 0.0)
        match record:
            case EpochBegan():
                self.capacity = record.capacity
                self.num_executors = max(self.num_executors, len(replay.cores))
                for place in [place for place in self._under_way if place[0] == event.cell]:
                    del self._under_way[place]
            case Arrived():
                self._number_of[record.origin.owner, record.origin.handle] = len(self._arrivals)
                self._arrivals.append(msgspec.structs.replace(record, now=now))
            case Turn() if event.output is not None:
                view = SchedulerView(replay.cores[event.cell])
                self._under_way[event.cell, event.output.step] = _sent(event.output, now, view)
            case Answered() if not record.mismatch:
                self._on_answer(record.output, event, now, replay)
        for end in (*event.events.finished, *event.shed):
            number = self._number_of.get((end.origin.owner, end.origin.handle))
            if number is not None:
                self._ends.append((number, end, now))

    def _on_answer(self, output: ExecutorOutput, event: Event, now: float, replay: Replay) -> None:
        sent = self._under_way.pop((event.cell, output.step), None)
        if sent is None:
            return  # it was sent before the recording begins
        device_s = output.device_time_us / 1e6
        last_answer_s = self._last_answer_s.get(event.cell, float("-inf"))
        start_s = max(sent.sent_s, last_answer_s)
        _, num_proposed, num_accepted = decode_columns(output.accepted_tokens, 3).sum(axis=1).tolist()
        self._num_proposed += num_proposed
        self._num_accepted += num_accepted
        shape, swap_s = sent.shape, output.move_time_us / 1e6
        shape = shape._replace(num_tokens=shape.num_tokens + num_proposed)
        record = StepRecord(
            start_s, now, shape.num_tokens, shape.num_rows, sent.num_decodes, sent.num_swapped_blocks, swap_s
        )
        at_once = sent.sent_s < last_answer_s
        self.steps.append(RunStep(shape, record, device_s or now - start_s, at_once))
        self._last_answer_s[event.cell] = now
        owners, handles = event.events.owners.tolist(), event.events.handles.tolist()
        found = map(self._number_of.get, zip(owners, handles, strict=True))
        numbers = [number for number in found if number is not None]  # others arrived before the recording begins
        for number in numbers:
            self._num_output[number] = self._num_output.get(number, 0) + 1
        self._tokens.append((np.asarray(numbers, dtype=np.int32), now))
        views = [SchedulerView(core) for core in replay.cores.values()]
        num_waiting = sum(view.num_waiting for view in views) + len(replay.moving)
        self._queue.append((now, sum(view.num_running for view in views), num_waiting))

    def requests(self) -> tuple[list[PlannedRequest], list[float]]:
        """Return every request that got a token, and the arrival times."""
        kept = [(place, record) for place, record in enumerate(self._arrivals) if self._num_output.get(place)]
        requests = [_planned(number, record, self._num_output[place]) for number, (place, record) in enumerate(kept)]
        return requests, [record.now for _, record in kept]

    @property
    def num_without_tokens(self) -> int:
        """The number of other requests."""
        return sum(not self._num_output.get(place) for place in range(len(self._arrivals)))

    def prompts(self) -> "RecordedPrompts":
        """Return the prompts of ``requests``."""
        kept = [record for place, record in enumerate(self._arrivals) if self._num_output.get(place)]
        return RecordedPrompts([decode_column(record.token_ids) for record in kept])

    def measurement(self) -> RunCollector:
        """Return the recording as a simulation."""
        measurement = RunCollector(len(self._arrivals))
        for number, record in enumerate(self._arrivals):
            measurement.arrived(_planned(number, record, self._num_output.get(number, 1)), record.now)
        for numbers, now in self._tokens:
            measurement.tokens(numbers, now)
        for number, end, now in self._ends:
            measurement.finished(msgspec.structs.replace(end, origin=Origin(0, number)), now)
        measurement.steps.extend(step.record for step in self.steps)
        measurement.queue.extend(self._queue)
        return measurement


class RecordedPrompts:
    """A recording's prompts, by number."""

    def __init__(self, prompts: Sequence[Int32Array]) -> None:
        self._prompts = prompts

    def prompt(self, request: PlannedRequest) -> Int32Array:
        """See ``Prompts``."""
        return self._prompts[request.number]


def _planned(number: int, record: Arrived, num_output_tokens: int) -> PlannedRequest:
    num_tokens = len(decode_column(record.token_ids))
    num_held = num_tokens - record.num_prompt_tokens
    return PlannedRequest(
        number=number,
        num_prompt_tokens=num_tokens,
        num_output_tokens=num_output_tokens,
        tenant=record.tenant,
        priority=record.priority,
        objectives=Objectives(ttft_slo_ms=record.ttft_slo_ms, itl_slo_ms=record.itl_slo_ms),
        max_tokens=max(record.max_tokens - num_held, num_output_tokens),
    )


def _sent(output: SchedulerOutput, now: float, view: SchedulerView) -> _Sent:
    _, scheduled, num_computed = view.rows_of_newest_step()
    shape = shape_of(scheduled, num_computed)
    num_moved = (len(output.swap_out) + len(output.swap_in)) // 8
    return _Sent(shape, now, int(np.count_nonzero(scheduled == 1)), num_moved)
