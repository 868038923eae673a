"""The rows of each step, for a timeline."""

from collections.abc import Sequence
from enum import Enum

import msgspec

from headway.flags.settings import ConfigurationError
from headway_proto.columns import decode_column, decode_columns
from headway_proto.step import SchedulerOutput, TransferringOutput
from headway_proto.wording import shown
from headway_scheduler.core.state.request import Request, RequestStatus
from headway_scheduler.core.view import SchedulerView
from headway_scheduler.flight.records import Answered, EpochBegan, Turn
from headway_scheduler.flight.replay import Event, Replay

_NEVER = float("inf")


class Kind(Enum):
    """A row's work in a step."""

    PREFILL = "prefill"
    DECODE = "decode"
    IDLE = "sits out"
    PREEMPTED = "preempted"


class Transfer(Enum):
    """What becomes of a row's blocks beside a step: copied out behind it, or brought in before it."""

    NONE = ""
    EXPORT = "export"
    PULL = "pull"


class Cell(msgspec.Struct, frozen=True):
    """A row in a step."""

    row: int
    request_id: str
    kind: Kind
    num_tokens: int
    transfer: Transfer = Transfer.NONE


class TimelineStep(msgspec.Struct):
    """A step of ``executor``, from ``begin_s`` to ``answered_s`` by the scheduler's clock.

    ``number`` counts the steps of all executors.
    """

    number: int
    epoch: int
    step: int
    sent_s: float
    num_running: int
    num_waiting: int
    num_tokens: int
    cells: tuple[Cell, ...]
    executor: int = 0
    begin_s: float = _NEVER
    answered_s: float = _NEVER
    device_s: float = 0.0
    move_s: float = 0.0


class HandOff(msgspec.Struct, frozen=True):
    """A request that goes on elsewhere: ``left`` brought a token and exported its blocks, ``joined`` pulled them."""

    request_id: str
    left: TimelineStep
    left_row: int
    joined: TimelineStep
    joined_row: int

    @property
    def gap_s(self) -> float:
        """From the token of ``left`` to that of ``joined``, by the scheduler's clock; infinite if one is missing."""
        return self.joined.answered_s - self.left.answered_s


def hand_offs_in(steps: Sequence[TimelineStep]) -> list[HandOff]:
    """Return the hand-offs of which both steps are among these, in the order in which requests go on."""
    leaving: dict[str, tuple[TimelineStep, int]] = {}
    found = []
    for step in steps:
        for cell in step.cells:
            if cell.transfer is Transfer.EXPORT:
                leaving[cell.request_id] = (step, cell.row)
            elif cell.transfer is Transfer.PULL and cell.request_id in leaving:
                found.append(HandOff(cell.request_id, *leaving.pop(cell.request_id), step, cell.row))
    return found


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
        self._under_way: dict[tuple[int, int], TimelineStep] = {}
        """By executor and number of the step."""
        self._owners: dict[int, dict[int, Request]] = {}
        """By executor: the requests of its rows after its newest step."""
        self._handed_off: dict[int, dict[int, Request]] = {}
        """By executor: the requests that last left a row with their blocks."""
        self._last_answer_s: dict[int, float] = {}
        self.num_steps = 0
        """Of the whole recording, so far."""
        self.steps: list[TimelineStep] = []

    def record(self, event: Event, replay: Replay) -> None:
        """Process one event."""
        match event.record:
            case Turn() if event.output is not None:
                self._on_step(event.output, event, replay)
            case Answered() if not event.record.mismatch:
                self._on_answer(event.record, event.cell)
            case EpochBegan():
                for place in [place for place in self._under_way if place[0] == event.cell]:
                    del self._under_way[place]
                self._owners.pop(event.cell, None)

    def _on_step(self, output: SchedulerOutput, event: Event, replay: Replay) -> None:
        view = SchedulerView(replay.cores[event.cell])
        is_wanted = self._wanted.first <= self.num_steps < self._wanted.end
        if self.num_steps < self._wanted.first:
            # It shows which requests lose a row in the first wanted step of this executor.
            self._owners[event.cell] = view.owners()
        if is_wanted:
            step = TimelineStep(
                number=self.num_steps,
                epoch=output.epoch,
                step=output.step,
                sent_s=event.now,
                num_running=view.num_running,
                num_waiting=view.num_waiting + len(replay.moving),
                num_tokens=output.total_num_scheduled_tokens,
                cells=self._cells(output, event.cell, view),
                executor=event.cell,
            )
            self.steps.append(step)
            self._under_way[event.cell, output.step] = step
        self.num_steps += 1

    def _cells(self, output: SchedulerOutput, executor: int, view: SchedulerView) -> tuple[Cell, ...]:
        rows, counts, _ = view.rows_of_newest_step()
        tokens_of = dict(zip(rows.tolist(), counts.tolist(), strict=True))
        before = self._owners.get(executor, {})
        owners = self._owners[executor] = view.owners()
        handed_off = self._handed_off.setdefault(executor, {})
        cells = {
            row: Cell(row, request.new.request_id, Kind.PREEMPTED, 0)
            for row, request in before.items()
            if request.status is RequestStatus.PREEMPTED
            and owners.get(row) is not request
            and handed_off.get(row) is not request
        }
        pulling = _pulling_rows(output)
        has_exports = isinstance(output, TransferringOutput) and output.exports != b""
        for row, request in owners.items():
            num_tokens = tokens_of.get(row, 0)
            num_computed = view.figures_of(request).num_computed_tokens
            kind, transfer = Kind.IDLE, Transfer.NONE
            if num_tokens:
                kind = Kind.PREFILL if num_computed - num_tokens < request.num_admitted_tokens else Kind.DECODE
                handed_off.pop(row, None)
            if row in pulling:
                transfer = Transfer.PULL
                kind = Kind.DECODE if num_tokens == 1 else kind  # all but its last token came with the blocks
            elif num_tokens and has_exports and request.is_leaving and num_computed >= request.num_admitted_tokens:
                transfer, handed_off[row] = Transfer.EXPORT, request
            cells[row] = Cell(row, request.new.request_id, kind, num_tokens, transfer)
        return tuple(cells[row] for row in sorted(cells))

    def _on_answer(self, record: Answered, executor: int) -> None:
        step = self._under_way.pop((executor, record.output.step), None)
        if step is not None:
            step.begin_s = max(step.sent_s, self._last_answer_s.get(executor, 0.0))
            step.answered_s = record.now
            step.device_s = record.output.device_time_us / 1e6
            step.move_s = record.output.move_time_us / 1e6
        self._last_answer_s[executor] = record.now


def _pulling_rows(output: SchedulerOutput) -> set[int]:
    """The new rows that begin on blocks from a host pool."""
    if not isinstance(output, TransferringOutput):
        return set()
    blocks = {block for pull in output.pulls for block in decode_columns(pull.blocks, 3)[2].tolist()}
    return {
        new.row for new in output.scheduled_new_reqs if not blocks.isdisjoint(decode_column(new.block_ids).tolist())
    }
