"""Replays a flight log in new cores and compares the decisions.

Owns: the call for each record. Must not know: files, readers.
A reader gets each event after the core handled it, and may then read the cores.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from headway_proto.columns import decode_column
from headway_proto.step import SchedulerOutput
from headway_proto.wording import shown
from headway_scheduler.core.admission.intake import arrived
from headway_scheduler.core.scheduler import Scheduler, StateMismatch
from headway_scheduler.core.state.arrival import NewRequestEvent
from headway_scheduler.core.state.events import FinishedEvent, StepEvents
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.core.state.request import FinishReason, Request
from headway_scheduler.core.state.stored_blocks import StoredBlocks
from headway_scheduler.flight.checkpoint import FleetState
from headway_scheduler.flight.recorder import PLACEMENT
from headway_scheduler.flight.records import (
    Aborted,
    Adopted,
    Answered,
    Arrived,
    CacheDropped,
    Decision,
    Distrusted,
    EpochBegan,
    InCell,
    LeaseReturned,
    LetLeave,
    Paused,
    Pinned,
    RanAlone,
    Record,
    Released,
    ReleasedAll,
    ReleasedWaiting,
    StartedSlowly,
    Turn,
    Unpinned,
    decision_of,
)
from headway_scheduler.placement.placement import end_of_moving

_NOTHING = StepEvents()


class Event(NamedTuple):
    """A turn has an event per step, with ``output``, and one for its end, with ``shed``.

    ``events``: the result of an answer, an abort or an epoch. ``cell``: the executor's number, or ``PLACEMENT``.
    """

    record: Record
    now: float
    output: SchedulerOutput | None = None
    events: StepEvents = _NOTHING
    shed: tuple[FinishedEvent, ...] = ()
    cell: int = 0


class Divergence(Exception):  # noqa: N818 - named for what was found
    """The core decides otherwise than recorded; one line."""


class Replay:
    """The cores of all cells, which get the recorded calls."""

    def __init__(self, limits: SchedulerLimits, state: FleetState | None = None, now: float = 0.0) -> None:
        """``state``: from a checkpoint, unless the records begin with the creation of the cores."""
        self.cell = 0
        """The cell of the newest record."""
        self.cores = {} if state is None else state.cores
        """By the number of their cell."""
        self.moving = {} if state is None else state.moving
        """The requests that no core has."""
        self.limits = limits
        self.now = now
        """The time of the newest record, in seconds."""
        self.num_records = 0
        self.num_steps = 0
        self.num_arrivals = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(SchedulerOutput)

    @property
    def core(self) -> Scheduler | None:
        """The core of the newest record's cell."""
        return self.cores.get(self.cell)

    def run(self, records: Iterable[Record]) -> Iterator[Event]:
        """Repeat all calls.

        Raises:
            Divergence: the core decides otherwise.
        """
        for record in records:
            self.num_records += 1
            self.now = getattr(record, "now", self.now)
            if isinstance(record, Turn):
                yield from self._take_turn(record)
            else:
                yield self._repeat(record)

    def _repeat(self, record: Record) -> Event:
        match record:
            case Answered():
                return self._event(record, events=self._answer(record))
            case EpochBegan():
                return self._event(record, events=self._begin_epoch(record))
            case Arrived():
                self.num_arrivals += 1
                self._arrive(record)
            case Aborted() if self.cell == PLACEMENT:
                return self._event(record, events=self._end_moving(record))
            case Aborted():
                core = self._core
                end = core.fail(record.origin, record.error) if record.error else core.abort(record.origin)
                return self._event(record, events=StepEvents(finished=() if end is None else (end,)))
            case RanAlone():
                self._core.run_alone(record.origin, record.num_tokens)
            case StartedSlowly():
                self._core.start_slowly(record.origins)
            case InCell() | Released() | ReleasedWaiting() | ReleasedAll() | Adopted() | LetLeave() | LeaseReturned():
                self._move(record)
            case _:
                self._obey(record)
        return self._event(record)

    def _event(
        self,
        record: Record,
        output: SchedulerOutput | None = None,
        events: StepEvents = _NOTHING,
        shed: tuple[FinishedEvent, ...] = (),
    ) -> Event:
        core = self.core
        if core is not None:
            core.moving.take_ended_leases()  # the owners of the pools have records of their own
        return Event(record, self.now, output, events, shed, self.cell)

    def _arrive(self, record: Arrived) -> None:
        if self.cell == PLACEMENT:
            self.moving[record.origin] = arrived(_new_request(record), self.limits, 0, 0, record.now)
        else:
            self._core.add_request(_new_request(record), record.now)

    def _move(
        self, record: InCell | Released | ReleasedWaiting | ReleasedAll | Adopted | LetLeave | LeaseReturned
    ) -> None:
        """Turn to another cell, or take requests out of a core or into it."""
        match record:
            case InCell():
                self.cell = record.number
            case Released():
                request = self._core.moving.release(record.origin)
                self._keep([] if request is None else [request])
            case ReleasedWaiting():
                self._keep(self._core.moving.release_waiting())
            case ReleasedAll():
                self._keep(self._core.release_all())
            case Adopted():
                request = self.moving.pop(record.origin, None)
                if request is None:
                    raise Divergence(f"record {self.num_records}: no core has released the request that one takes over")
                request.arrival, request.rank, request.lane = record.arrival, record.rank, record.lane
                request.is_leaving = record.is_leaving
                if not record.has_blocks:
                    request.forget_stored()
                self._core.moving.adopt(request, spares=record.spares)
            case LetLeave():
                self._core.moving.let_leave(record.origin, must_leave=record.must_leave)
            case LeaseReturned():
                blocks = decode_column(record.host_blocks).astype(np.intp)
                self._core.moving.return_lease(StoredBlocks(record.pool, (), record.epoch, record.step, blocks, 0))

    def _end_moving(self, record: Aborted) -> StepEvents:
        request = self.moving.pop(record.origin, None)
        if request is None:
            return _NOTHING
        reason = FinishReason.ERROR if record.error else FinishReason.ABORT
        return StepEvents(finished=(end_of_moving(request, reason, record.error),))

    def _keep(self, requests: list[Request]) -> None:
        self.moving.update((request.new.origin, request) for request in requests)

    def _obey(self, record: Record) -> None:
        match record:
            case Paused():
                self._core.paused = record.is_paused
            case Pinned():
                self._core.pinned_prefixes.pin(record.name, record.tenant, decode_column(record.token_ids))
            case Unpinned():
                self._core.pinned_prefixes.unpin(record.name)
            case CacheDropped():
                self._core.drop_cached()
            case Distrusted():
                self._core.moving.distrust(record.epoch)

    @property
    def _core(self) -> Scheduler:
        core = self.core
        if core is None:
            raise Divergence(f"record {self.num_records}: the log calls a core before it has made one")
        return core

    def _begin_epoch(self, record: EpochBegan) -> StepEvents:
        core = self.core
        if core is None:
            self.cores[self.cell] = Scheduler(self.limits, record.capacity, record.epoch)
            return _NOTHING
        return core.begin_epoch(record.capacity, record.epoch, same_model=record.same_model)

    def _take_turn(self, turn: Turn) -> Iterator[Event]:
        core, decisions = self._core, iter(turn.decisions)
        while (output := core.schedule(turn.now)) is not None:
            self._compare(output, next(decisions, None))
            self.num_steps += 1
            yield self._event(turn, output=output)
        missing = next(decisions, None)
        if missing is not None:
            raise Divergence(f"{self._where(core.next_step)}: it sends nothing, where {_text_of(missing)} was sent")
        shed = core.take_shed()
        if len(shed) != turn.num_shed:
            raise Divergence(
                f"{self._where(core.next_step)}: {len(shed)} requests are shed, where {turn.num_shed} were"
            )
        yield self._event(turn, shed=shed)

    def _compare(self, output: SchedulerOutput, recorded: Decision | None) -> None:
        message = self._encoder.encode(output)
        decided = decision_of(message)
        if decided == recorded:
            return
        where = self._where(output.step)
        if recorded is None:
            raise Divergence(f"{where}: it sends {_text_of(decided)}, where nothing was sent")
        if recorded.message and decided.message:
            before = self._decoder.decode(recorded.message)
            fields = [
                f"{name} is {shown(getattr(output, name), 80)}, was {shown(getattr(before, name), 80)}"
                for name in SchedulerOutput.__struct_fields__
                if getattr(output, name) != getattr(before, name)
            ]
            raise Divergence(f"{where}: {'; '.join(fields)}")
        raise Divergence(f"{where}: it sends {_text_of(decided)}, where {_text_of(recorded)} was sent")

    def _where(self, step: int) -> str:
        return f"record {self.num_records}, {self.now:.3f} s, epoch {self._core.epoch}, step {step}"

    def _answer(self, record: Answered) -> StepEvents:
        try:
            events = self._core.update(record.output, record.now)
        except (StateMismatch, ValueError) as error:
            if not record.mismatch:
                raise Divergence(f"{self._where(record.output.step)}: the answer is refused: {error}") from None
            return _NOTHING
        if record.mismatch:
            raise Divergence(f"{self._where(record.output.step)}: an answer is taken that was refused")
        ends = [(end.origin, end.reason.value, end.num_output_tokens) for end in events.finished]
        recorded = [(end.origin, end.reason, end.num_output_tokens) for end in record.ends]
        if ends != recorded:
            where = self._where(record.output.step)
            raise Divergence(f"{where}: the requests that end are {shown(ends, 120)}, and were {shown(recorded, 120)}")
        return events


def _text_of(decision: Decision) -> str:
    return f"a step of {decision.num_bytes} bytes with checksum {decision.checksum:#010x}"


def _new_request(record: Arrived) -> NewRequestEvent:
    return NewRequestEvent(
        origin=record.origin,
        request_id=record.request_id,
        index=record.index,
        token_ids=decode_column(record.token_ids),
        num_prompt_tokens=record.num_prompt_tokens,
        max_tokens=record.max_tokens,
        sampling=record.sampling,
        stop_token_ids=frozenset(record.stop_token_ids),
        priority=record.priority,
        tenant=record.tenant,
        ttft_slo_ms=record.ttft_slo_ms,
        itl_slo_ms=record.itl_slo_ms,
        has_run=record.has_run,
        num_prompt_logprobs=record.num_prompt_logprobs,
        adapter=record.adapter,
        pooling=record.pooling,
    )
