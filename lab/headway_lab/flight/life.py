"""A request's life, read from the replayed cores. Must not know: how it is described."""

from collections.abc import Iterator

import msgspec

from headway_proto.columns import decode_columns
from headway_proto.step import SchedulerOutput
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.events import FinishedEvent
from headway_scheduler.core.state.request import Request
from headway_scheduler.core.view import SchedulerView
from headway_scheduler.flight.recorder import PLACEMENT
from headway_scheduler.flight.records import (
    Aborted,
    Adopted,
    Answered,
    Arrived,
    EpochBegan,
    ExecutorGone,
    Refused,
    Released,
    ReleasedAll,
    ReleasedWaiting,
    Turn,
)
from headway_scheduler.flight.replay import Event, Replay
from headway_scheduler.operators.wait_sentences import sentence_for

NO_EXECUTOR = "no executor was connected"
ABOVE = "no executor could start it soon"
ITS_EXECUTOR = "its executor was not connected"
MOVED = "its executor gave it up, for another to go on with it"
STALE = "the blocks that it brought from a host pool were not right"
PIPE_FULL = "the steps under way had to return before another was decided"
_NAMES = 3
_NEVER = float("inf")


class Wait(msgspec.Struct):
    """A time without a row for one reason."""

    reason: str
    text: str
    start_s: float
    num_ahead: int
    end_s: float = _NEVER


class FlightStep(msgspec.Struct):
    """A step during a life. ``num_own_tokens`` were the request's.

    ``prompts`` are other requests with more than one token in it. ``device_s`` is the forward pass and sampling.
    """

    epoch: int
    step: int
    sent_s: float
    num_tokens: int
    num_own_tokens: int
    prompts: tuple[tuple[str, int], ...]
    answered_s: float = _NEVER
    device_s: float = 0.0


class Choice(msgspec.Struct):
    """The request was given to an executor."""

    at_s: float
    executor: int


class Admission(msgspec.Struct):
    """The request got a row."""

    at_s: float
    step: int
    num_tokens: int
    num_held_tokens: int
    executor: int = 0


class Setback(msgspec.Struct):
    """The request lost its row."""

    at_s: float
    why: str
    num_computed_tokens: int
    num_swapped_tokens: int
    num_handed_tokens: int = 0
    """Whose blocks it took along to another executor."""


class Life(msgspec.Struct, kw_only=True):
    """One sequence's record."""

    request_id: str
    index: int
    tenant: str
    priority: int
    num_prompt_tokens: int
    max_tokens: int
    arrival_s: float
    num_running: int = 0
    """At its arrival, as the next two."""
    num_waiting: int = 0
    ahead: tuple[str, ...] | None = ()
    """None: it waited for several executors, and the recording does not hold the order of that queue."""
    choices: list[Choice] = msgspec.field(default_factory=list)
    """Only where there were several executors."""
    waits: list[Wait] = msgspec.field(default_factory=list)
    admissions: list[Admission] = msgspec.field(default_factory=list)
    setbacks: list[Setback] = msgspec.field(default_factory=list)
    steps: list[FlightStep] = msgspec.field(default_factory=list)
    token_times_s: list[float] = msgspec.field(default_factory=list)
    end: str = ""
    end_s: float = _NEVER
    num_output_tokens: int = 0

    @property
    def own_steps(self) -> list[FlightStep]:
        """The steps that it was part of."""
        return [step for step in self.steps if step.num_own_tokens]


class _Followed:
    def __init__(self, life: Life, request: Request, cell: int) -> None:
        self.life = life
        self.request = request
        self.cell = cell
        """The one whose core has it, or ``PLACEMENT``."""
        self.num_computed_tokens = 0
        self.num_preemptions = request.num_preemptions
        self.num_ways_made = request.num_ways_made
        self.had_row = False
        self.open_steps: list[FlightStep] = []

    def waits_for(self, reason: str, text: str, num_ahead: int, now: float) -> None:
        waits = self.life.waits
        if waits and waits[-1].end_s == _NEVER:
            if waits[-1].reason == reason:
                return
            waits[-1].end_s = now
        waits.append(Wait(reason, text, now, num_ahead))

    def record_step(self, step: FlightStep) -> None:
        self.life.steps.append(step)
        self.open_steps.append(step)

    def stops_waiting(self, now: float) -> None:
        waits = self.life.waits
        if waits and waits[-1].end_s == _NEVER:
            waits[-1].end_s = now

    def loses_row(self, now: float, why: str, num_handed_tokens: int = 0) -> None:
        """It begins again, if it had one."""
        self.open_steps.clear()
        if self.had_row:
            self.had_row = False
            self.life.setbacks.append(Setback(now, why, self.num_computed_tokens, 0, num_handed_tokens))
        self.num_computed_tokens = 0

    def leaves(self, now: float) -> None:
        """It waits above the cores. The steps of others that it saw there are no longer of interest."""
        stored = self.request.stored
        self.loses_row(now, MOVED, 0 if stored is None else stored.num_tokens)
        self.num_preemptions, self.num_ways_made = self.request.num_preemptions, self.request.num_ways_made
        self.life.steps = [step for step in self.life.steps if step.answered_s != _NEVER or step.num_own_tokens]
        self.cell = PLACEMENT


class Follower:
    """Follows all sequences of one request id."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._followed: dict[Origin, _Followed] = {}
        self._lost: set[int] = set()
        """The cells whose executor is gone."""
        self._under_way: dict[tuple[int, int], FlightStep] = {}
        """By cell and number of the step."""
        self.lives: list[Life] = []
        """By arrival; an id that was used again has several."""

    def record(self, event: Event, replay: Replay) -> None:
        """Process one event."""
        record = event.record
        match record:
            case Arrived() if record.request_id == self._request_id:
                self._on_arrival(record, event.cell, replay)
            case Refused() if record.request_id == self._request_id:
                self.lives.append(_refused(record))
            case ExecutorGone():
                self._on_executor_gone(record, event.cell, replay)
            case EpochBegan():
                self._lost.discard(event.cell)
                self._lose_executor(event.cell, record.now, f"the executor had to begin anew: {record.reason}")
            case Turn():
                self._on_turn(event, replay.cores[event.cell])
            case Answered() if not record.mismatch:
                self._under_way.pop((event.cell, record.output.step), None)
                self._on_answer(record, event)
            case Adopted() if record.origin in self._followed:
                self._on_adopted(self._followed[record.origin], event, SchedulerView(replay.cores[event.cell]))
            case Released() | ReleasedWaiting() | ReleasedAll():
                self._on_released(event, replay)
        why = record.why if isinstance(record, Aborted) else ""
        for end in (*event.events.finished, *event.shed):
            self._on_end(end, event.now, why)

    def _on_arrival(self, record: Arrived, cell: int, replay: Replay) -> None:
        views = [SchedulerView(core) for core in replay.cores.values()]
        num_above = len(replay.moving)
        life = Life(
            request_id=record.request_id,
            index=record.index,
            tenant=record.tenant,
            priority=record.priority,
            num_prompt_tokens=record.num_prompt_tokens,
            max_tokens=record.max_tokens,
            arrival_s=record.now,
            num_running=sum(view.num_running for view in views),
            num_waiting=sum(view.num_waiting for view in views) + num_above - 1,
        )
        self.lives.append(life)
        if cell == PLACEMENT:
            followed = _Followed(life, replay.moving[record.origin], cell)
            life.ahead = None
            self._waits_above(followed, record.now, replay)
        else:
            view = SchedulerView(replay.cores[cell])
            request = view.find(record.origin)
            assert request is not None
            followed = _Followed(life, request, cell)
            life.ahead = tuple([other.new.request_id for other in view.ahead_of(request)])
            self._waits_in_core(followed, view, record.now)
        self._followed[record.origin] = followed

    def _waits_in_core(self, followed: _Followed, view: SchedulerView, now: float) -> None:
        """It has just come into this core."""
        for (cell, _), step in self._under_way.items():
            if cell == followed.cell:
                followed.record_step(msgspec.structs.replace(step))
        num_ahead = len(view.ahead_of(followed.request))
        if followed.cell in self._lost:
            followed.waits_for(NO_EXECUTOR, NO_EXECUTOR, num_ahead, now)
        elif view.num_in_flight >= view.limits.steps_in_flight(view.capacity.num_lanes):
            followed.waits_for(PIPE_FULL, f"{view.num_in_flight} steps are under way", num_ahead, now)

    def _waits_above(self, followed: _Followed, now: float, replay: Replay) -> None:
        if self._lost.issuperset(replay.cores):
            followed.waits_for(NO_EXECUTOR, NO_EXECUTOR, 0, now)
            return
        num_free = sum(SchedulerView(core).num_free_blocks for core in replay.cores.values())
        text = f"{counted(len(replay.moving) - 1, 'other')} waited for any executor, {num_free} KV blocks were free"
        followed.waits_for(ABOVE, text, 0, now)

    def _on_adopted(self, followed: _Followed, event: Event, view: SchedulerView) -> None:
        """An executor's core has the request now."""
        followed.cell = event.cell
        followed.life.choices.append(Choice(event.now, event.cell))
        followed.stops_waiting(event.now)
        self._waits_in_core(followed, view, event.now)

    def _on_released(self, event: Event, replay: Replay) -> None:
        """A core gave up requests; a running one loses its row, perhaps before it can leave."""
        for origin, followed in self._followed.items():
            if followed.cell != event.cell:
                continue
            if origin in replay.moving:
                followed.leaves(event.now)
                self._waits_above(followed, event.now, replay)
            elif followed.had_row and followed.request.row < 0:
                followed.loses_row(event.now, MOVED)
                followed.num_preemptions = followed.request.num_preemptions

    def _on_executor_gone(self, record: ExecutorGone, cell: int, replay: Replay) -> None:
        self._lost.add(cell)
        self._lose_executor(cell, record.now, f"the executor was lost: {record.reason}")
        is_last = self._lost.issuperset(replay.cores)
        for followed in self._followed.values():
            if followed.cell == cell or (is_last and followed.cell == PLACEMENT):
                followed.waits_for(NO_EXECUTOR if is_last else ITS_EXECUTOR, record.reason, 0, record.now)

    def _lose_executor(self, cell: int, now: float, why: str) -> None:
        """Running requests begin again."""
        for place in [place for place in self._under_way if place[0] == cell]:
            del self._under_way[place]
        for followed in self._followed.values():
            if followed.cell == cell:
                followed.loses_row(now, why)

    def _on_turn(self, event: Event, core: Scheduler) -> None:
        output, view = event.output, SchedulerView(core)
        if output is not None:
            prompts = tuple([(name, count) for _, name, count in prompts_in(output, view)])
            num_tokens = output.total_num_scheduled_tokens
            self._under_way[event.cell, output.step] = FlightStep(
                output.epoch, output.step, event.now, num_tokens, 0, prompts
            )
        for followed in self._followed.values():
            if followed.cell != event.cell:
                continue
            self._look_for_setback(followed, event, view)
            if output is not None:
                self._on_step(followed, output, event.now, view)
            elif followed.request.row < 0 and not event.shed:
                self._on_waiting(followed, event.now, view, core)

    def _look_for_setback(self, followed: _Followed, event: Event, view: SchedulerView) -> None:
        request = followed.request
        if request.num_preemptions == followed.num_preemptions:
            return
        why = _why_preempted(followed, event.output, view)
        followed.life.setbacks.append(Setback(event.now, why, followed.num_computed_tokens, request.num_swapped_tokens))
        followed.num_preemptions, followed.num_ways_made = request.num_preemptions, request.num_ways_made
        followed.had_row = False
        followed.num_computed_tokens = 0

    def _on_step(self, followed: _Followed, output: SchedulerOutput, now: float, view: SchedulerView) -> None:
        request, num_own_tokens = followed.request, 0
        if request.row >= 0:
            if not followed.had_row:
                followed.had_row = True
                followed.stops_waiting(now)
                start = next(new.num_computed_tokens for new in output.scheduled_new_reqs if new.row == request.row)
                followed.num_computed_tokens = start
                followed.life.admissions.append(
                    Admission(now, output.step, request.num_admitted_tokens, start, followed.cell)
                )
            computed = view.figures_of(request).num_computed_tokens
            num_own_tokens, followed.num_computed_tokens = computed - followed.num_computed_tokens, computed
        step = self._under_way[followed.cell, output.step]
        prompts = tuple(entry for entry in step.prompts if not num_own_tokens or entry[0] != request.new.request_id)
        followed.record_step(msgspec.structs.replace(step, num_own_tokens=num_own_tokens, prompts=prompts))

    def _on_waiting(self, followed: _Followed, now: float, view: SchedulerView, core: Scheduler) -> None:
        request = followed.request
        ahead = view.ahead_of(request)
        first = ahead[0] if ahead else request
        reason = core.admission.reason_for(first)
        followed.waits_for(reason.value, sentence_for(core, first), len(ahead), now)

    def _on_answer(self, record: Answered, event: Event) -> None:
        columns = event.events
        for origin, followed in self._followed.items():
            if followed.cell != event.cell:
                continue
            if followed.open_steps and followed.open_steps[0].step == record.output.step:
                step = followed.open_steps.pop(0)
                step.answered_s = event.now
                step.device_s = record.output.device_time_us / 1e6
            if record.output.stale_rows and followed.request.num_preemptions != followed.num_preemptions:
                followed.loses_row(event.now, STALE)
                followed.num_preemptions = followed.request.num_preemptions
            if ((columns.owners == origin.owner) & (columns.handles == origin.handle)).any():
                followed.life.token_times_s.append(event.now)

    def _on_end(self, end: FinishedEvent, now: float, why: str) -> None:
        followed = self._followed.pop(end.origin, None)
        if followed is None:
            return
        followed.stops_waiting(now)
        life = followed.life
        details = [detail for detail in (why, end.error) if detail]
        life.end = end.reason.value + (f" ({'; '.join(details)})" if details else "")
        life.end_s = now
        life.num_output_tokens = end.num_output_tokens


def prompts_in(output: SchedulerOutput, view: SchedulerView) -> Iterator[tuple[int, str, int]]:
    """Yield row, request id and tokens of rows with more than one."""
    if output.num_scheduled_tokens:
        rows, counts = decode_columns(output.num_scheduled_tokens, 2).tolist()
        for row, count in zip(rows, counts, strict=True):
            if count > 1:
                yield row, view.request_in(row).new.request_id, count


def counted(number: int, noun: str) -> str:
    """Return a number and its noun."""
    return f"{number} {noun}{'s' * (number != 1)}"


def few_names(names: tuple[str, ...] | list[str]) -> str:
    """Return the first names."""
    shown = ", ".join(names[:_NAMES])
    more = len(names) - _NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def _why_preempted(followed: _Followed, output: SchedulerOutput | None, view: SchedulerView) -> str:
    request = followed.request
    if view.alone is not None and view.alone is not request:
        return f"{view.alone.new.request_id} had to run alone, because executors were lost while it ran"
    started = [view.request_in(new.row) for new in output.scheduled_new_reqs] if output is not None else []
    if request.num_ways_made > followed.num_ways_made:
        names = [other.new.request_id for other in started if other.new.priority < request.new.priority]
        return f"it made way for {few_names(names) or 'a request'} of a higher class"
    rows = decode_columns(output.new_blocks, 2)[0].tolist() if output is not None and output.new_blocks else []
    starting = {other.row for other in started}
    names = [view.request_in(row).new.request_id for row in dict.fromkeys(rows) if row not in starting]
    if not names and followed.num_computed_tokens % view.capacity.block_size == 0:
        return "it needed a KV block, none was free, and those that hold them are served before it"
    needing = few_names(names) or "a request that is served before it"
    return f"no KV block was free, {needing} needed one, and it was the one to give up the least"


def _refused(record: Refused) -> Life:
    return Life(
        request_id=record.request_id,
        index=record.index,
        tenant=record.tenant,
        priority=0,
        num_prompt_tokens=record.num_tokens,
        max_tokens=0,
        arrival_s=record.now,
        end=f"refused ({record.reason}): {record.message}",
        end_s=record.now,
    )
