"""The rows of each step, for a timeline."""

from enum import Enum

import msgspec

from headway.settings import ConfigurationError, shown
from headway_proto.columns import decode_columns
from headway_proto.step import SchedulerOutput
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.request import Request, RequestStatus
from headway_scheduler.core.view import SchedulerView
from headway_scheduler.flight.records import Answered, EpochBegan, Turn
from headway_scheduler.flight.replay import Event

_NEVER = float("inf")


class Kind(Enum):
    """A row's work in a step."""

    PREFILL = "prefill"
    DECODE = "decode"
    IDLE = "sits out"
    PREEMPTED = "preempted"


class Cell(msgspec.Struct, frozen=True):
    """A row in a step."""

    row: int
    request_id: str
    kind: Kind
    num_tokens: int


class TimelineStep(msgspec.Struct):
    """A step from ``begin_s`` to ``answered_s`` by the scheduler's clock."""

    number: int
    epoch: int
    step: int
    sent_s: float
    num_running: int
    num_waiting: int
    num_tokens: int
    cells: tuple[Cell, ...]
    begin_s: float = _NEVER
    answered_s: float = _NEVER
    device_s: float = 0.0


class StepRange(msgspec.Struct, frozen=True):
    """Steps from ``first`` to before ``end``."""

    first: int
    end: int

    @classmethod
    def parse(cls, text: str) -> "StepRange":
        """Read ``FIRST:END``.

        Raises:
            ConfigurationError: the text has another form.
        """
        first, _, end = text.partition(":")
        if first.isascii() and first.isdigit() and end.isascii() and end.isdigit() and int(first) < int(end):
            return cls(int(first), int(end))
        raise ConfigurationError(
            f"--steps: {shown(text)} is not allowed; allowed: FIRST:END, two whole numbers, rising"
        )


class StepCollector:
    """Collects a range of steps from a replay."""

    def __init__(self, wanted: StepRange) -> None:
        self._wanted = wanted
        self._under_way: dict[int, TimelineStep] = {}
        self._owners: dict[int, Request] = {}
        self._last_answer_s = 0.0
        self.num_steps = 0
        """Of the whole recording, so far."""
        self.steps: list[TimelineStep] = []

    def record(self, event: Event, core: Scheduler | None) -> None:
        """Process one event."""
        match event.record:
            case Turn() if event.output is not None and core is not None:
                self._on_step(event.output, event.now, SchedulerView(core))
            case Answered() if not event.record.mismatch:
                self._on_answer(event.record)
            case EpochBegan():
                self._under_way.clear()
                self._owners.clear()

    def _on_step(self, output: SchedulerOutput, now: float, view: SchedulerView) -> None:
        is_wanted = self._wanted.first <= self.num_steps < self._wanted.end
        # The step before the first counts too: it shows which requests lose a row in the first.
        cells = self._cells(output, view) if is_wanted or self.num_steps == self._wanted.first - 1 else ()
        if is_wanted:
            total = output.total_num_scheduled_tokens
            step = TimelineStep(
                self.num_steps, output.epoch, output.step, now, view.num_running, view.num_waiting, total, cells
            )
            self.steps.append(step)
            self._under_way[output.step] = step
        self.num_steps += 1

    def _cells(self, output: SchedulerOutput, view: SchedulerView) -> tuple[Cell, ...]:
        exceptions: dict[int, int] = {}
        if output.num_scheduled_tokens:
            exceptions = dict(zip(*decode_columns(output.num_scheduled_tokens, 2).tolist(), strict=True))
        before, self._owners = self._owners, view.owners()
        cells = {
            row: Cell(row, request.new.request_id, Kind.PREEMPTED, 0)
            for row, request in before.items()
            if request.status is RequestStatus.PREEMPTED and self._owners.get(row) is not request
        }
        for row, request in self._owners.items():
            num_tokens = exceptions.get(row, 1)
            num_before = view.figures_of(request).num_computed_tokens - num_tokens
            kind = Kind.IDLE
            if num_tokens:
                kind = Kind.PREFILL if num_before < request.num_admitted_tokens else Kind.DECODE
            cells[row] = Cell(row, request.new.request_id, kind, num_tokens)
        return tuple(cells[row] for row in sorted(cells))

    def _on_answer(self, record: Answered) -> None:
        step = self._under_way.pop(record.output.step, None)
        if step is not None:
            step.begin_s = max(step.sent_s, self._last_answer_s)
            step.answered_s = record.now
            step.device_s = record.output.device_time_us / 1e6
        self._last_answer_s = record.now
