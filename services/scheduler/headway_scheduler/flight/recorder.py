"""Records every call of the core.

Owns: unwritten records. Must not know: sockets, files, decisions. During a step it only keeps references. ``flush``,
before the process sleeps, encodes them; the log's thread compresses and writes.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import msgspec

from headway_proto.columns import encode_column
from headway_proto.ingress import Rejected, Submit
from headway_proto.step import BackendInfo, ExecutorOutput, PooledOutput
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.events import FinishedEvent
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.state.request import Request
from headway_scheduler.core.state.stored_blocks import StoredBlocks
from headway_scheduler.flight.checkpoint import FleetState
from headway_scheduler.flight.pieces import LogPieces
from headway_scheduler.flight.records import (
    LOG_VERSION,
    Aborted,
    Adopted,
    Answered,
    Arrived,
    CacheDropped,
    Distrusted,
    End,
    EpochBegan,
    ExecutorGone,
    Header,
    InCell,
    LeaseReturned,
    LetLeave,
    Paused,
    Pinned,
    RanAlone,
    Record,
    Refused,
    Released,
    ReleasedAll,
    ReleasedWaiting,
    StartedSlowly,
    Turn,
    Unpinned,
    decision_in_frame,
)

FLUSH_RECORDS = 64
FLUSH_INTERVAL_S = 0.05
"""``flush`` writes after so many records or seconds. A killed process loses about as much."""

_TRY_AGAIN_S = 10.0
"""How often a log that could not be written is begun again."""


class Log(Protocol):
    """Takes batches of records until ``failure`` says why not, and again after ``begin_again``."""

    life: int
    segment: int
    failure: str

    @property
    def is_segment_full(self) -> bool:
        """Whether the next segment is due."""

    def append(self, batch: bytes) -> None:
        """Take an encoded batch without waiting."""

    def begin_again(self) -> bool:
        """After a failure, begin another life where that is possible."""

    def close(self) -> None:
        """Write the rest."""


PLACEMENT = -1
"""The number that stands for placement, which is above the cells."""

Checkpointer = Callable[[FleetState], None]
"""Begins a segment with this state."""


class HasState(Protocol):
    """Cells and placement, as a checkpoint needs them."""

    @property
    def state(self) -> FleetState:
        """All cores, and the requests that no core has."""


_Sent: TypeAlias = tuple[float, Sequence[tuple[bytes, bytes]], int]
"""Time, frames and number of shed requests of a turn."""
_Taken: TypeAlias = tuple[float, ExecutorOutput, tuple[FinishedEvent, ...]]
"""Time, answer and ended requests."""


class NullRecorder:
    """Takes every call of the core, in order, and records nothing. Times in seconds, monotonic."""

    pieces: LogPieces | None = None
    """The log's files, for copies."""

    def of_cell(self, number: int) -> "NullRecorder":
        """The recorder for one cell, or for ``PLACEMENT``, into the same log."""
        del number
        return self

    def released(self, origin: Origin) -> None:
        """The core was asked to release a request."""

    def released_waiting(self) -> None:
        """The core released what waits."""

    def released_all(self) -> None:
        """The core released every request."""

    def adopted(self, request: Request) -> None:
        """The core takes over a request."""

    def let_leave(self, origin: Origin, *, must_leave: bool) -> None:
        """The core was asked to let a request leave."""

    def lease_returned(self, stored: StoredBlocks) -> None:
        """The core was told that nobody needs these blocks any more."""

    def distrusted(self, epoch: int) -> None:
        """The core was told that an executor was found in another state in this epoch."""

    def epoch_began(
        self, now: float, epoch: int, capacity: ExecutorCapacity, info: BackendInfo, reason: str, *, same_model: bool
    ) -> None:
        """The core is new, or began an epoch."""

    def arrived(self, now: float, new: NewRequestEvent) -> None:
        """The core took a request."""

    def refused(self, now: float, submit: Submit, rejected: Rejected) -> None:
        """The core did not change."""

    def aborted(self, now: float, origin: Origin, why: str, error: str = "") -> None:
        """With an ``error``: the guilty request was ended."""

    def sent(self, now: float, frames: Sequence[tuple[bytes, bytes]], num_shed: int) -> None:
        """Steps were sent as (peer, frame)."""

    def sent_nothing(self, now: float, num_shed: int, *, is_idle: bool) -> None:
        """The core had no step. ``is_idle``: and no request."""

    def answered(self, now: float, output: ExecutorOutput, finished: tuple[FinishedEvent, ...]) -> None:
        """An answer ended these requests."""

    def mismatched(self, now: float, output: ExecutorOutput, why: str) -> None:
        """The core refused an answer."""

    def ran_alone(self, origin: Origin | None, num_tokens: int) -> None:
        """Only this request may run; None: all may."""

    def started_slowly(self, origins: tuple[Origin, ...]) -> None:
        """These start a few at a time."""

    def paused(self, *, is_paused: bool) -> None:
        """Admission was paused or resumed."""

    def cache_dropped(self) -> None:
        """Unused cached blocks were dropped."""

    def pinned(self, name: str, tenant: str, token_ids: bytes) -> None:
        """``token_ids`` is an int32 column."""

    def unpinned(self, name: str) -> None:
        """The pin was removed."""

    def executor_gone(self, now: float, reason: str) -> None:
        """No executor until the next epoch."""

    def flush(self, now: float, fleet: HasState | None, *, is_final: bool = False) -> None:
        """Encode records that are many or old. A segment that is full ends; without ``fleet``, it does not end now."""

    def take_failure(self) -> str:
        """Return once why recording ended; else ""."""
        return ""

    def take_missing(self) -> str:
        """Return once what is not recorded where recording went on; else ""."""
        return ""

    def close(self, now: float, fleet: HasState | None) -> None:
        """Write the rest."""


class _LatestCell:
    """The cell of the newest record in a log."""

    def __init__(self) -> None:
        self.cell = 0


class FlightRecorder(NullRecorder):
    """Keeps each call until ``flush`` encodes it."""

    def __init__(
        self,
        log: Log,
        limits: SchedulerLimits,
        headway_version: str,
        checkpointer: Checkpointer | None = None,
        pieces: LogPieces | None = None,
    ) -> None:
        self._log = log
        self._limits = limits
        self._headway_version = headway_version
        self._checkpointer = checkpointer
        self.pieces = pieces
        self._encoder = msgspec.msgpack.Encoder()
        self._pending: list[Record | _Sent | _Taken] = []
        self._cell = 0
        self._latest = _LatestCell()
        self._num_added = 0
        self._flush_at = 0.0
        self._idle_since = -1
        """The number of records after an idle turn; -1 if the last turn was not idle."""
        self._is_failure_reported = False
        self._failed_at = 0.0
        self._try_at = 0.0
        self._missing = ""
        self._is_missing_reported = True
        self._begin_segment()

    def of_cell(self, number: int) -> NullRecorder:
        if number == self._cell:
            return self
        other = copy.copy(self)
        other.begin_cell(number)
        return other

    def begin_cell(self, number: int) -> None:
        """Record one cell from now on."""
        self._cell, self._num_added, self._idle_since = number, 0, -1

    def released(self, origin: Origin) -> None:
        self._add(Released(origin))

    def released_waiting(self) -> None:
        self._add(ReleasedWaiting())

    def released_all(self) -> None:
        self._add(ReleasedAll())

    def adopted(self, request: Request) -> None:
        has_blocks = request.stored is not None
        self._add(
            Adopted(
                request.new.origin,
                request.arrival,
                request.rank,
                int(request.lane),
                request.is_leaving,
                has_blocks,
                spares=True,
            )
        )

    def let_leave(self, origin: Origin, *, must_leave: bool) -> None:
        self._add(LetLeave(origin, must_leave))

    def lease_returned(self, stored: StoredBlocks) -> None:
        self._add(LeaseReturned(stored.pool, encode_column(stored.host_blocks), stored.epoch, stored.step))

    def distrusted(self, epoch: int) -> None:
        self._add(Distrusted(epoch))

    def epoch_began(
        self, now: float, epoch: int, capacity: ExecutorCapacity, info: BackendInfo, reason: str, *, same_model: bool
    ) -> None:
        self._add(EpochBegan(now, epoch, capacity, same_model, info.model_name, reason))

    def arrived(self, now: float, new: NewRequestEvent) -> None:
        self._add(
            Arrived(
                now=now,
                origin=new.origin,
                request_id=new.request_id,
                index=new.index,
                token_ids=new.token_ids.tobytes(),
                num_prompt_tokens=new.num_prompt_tokens,
                max_tokens=new.max_tokens,
                sampling=new.sampling,
                stop_token_ids=tuple(sorted(new.stop_token_ids)),
                priority=new.priority,
                tenant=new.tenant,
                ttft_slo_ms=new.ttft_slo_ms,
                itl_slo_ms=new.itl_slo_ms,
                has_run=new.has_run,
                num_prompt_logprobs=new.num_prompt_logprobs,
                adapter=new.adapter,
                pooling=new.pooling,
            )
        )

    def refused(self, now: float, submit: Submit, rejected: Rejected) -> None:
        num_tokens = len(submit.token_ids) // 4
        message = f"{rejected.field}: {rejected.message}" if rejected.field else rejected.message
        self._add(Refused(now, submit.request_id, submit.index, submit.tenant, num_tokens, rejected.reason, message))

    def aborted(self, now: float, origin: Origin, why: str, error: str = "") -> None:
        self._add(Aborted(now, origin, why, error))

    def sent(self, now: float, frames: Sequence[tuple[bytes, bytes]], num_shed: int) -> None:
        self._add((now, frames, num_shed))

    def sent_nothing(self, now: float, num_shed: int, *, is_idle: bool) -> None:
        # Of turns without a request, the first may still tidy up. Those that follow change nothing and are left out.
        if is_idle and not num_shed and self._num_added == self._idle_since:
            return
        self._add((now, (), num_shed))
        self._idle_since = self._num_added if is_idle else -1

    def answered(self, now: float, output: ExecutorOutput, finished: tuple[FinishedEvent, ...]) -> None:
        self._add((now, output, finished))

    def mismatched(self, now: float, output: ExecutorOutput, why: str) -> None:
        self._add(Answered(now, output, mismatch=why))

    def ran_alone(self, origin: Origin | None, num_tokens: int) -> None:
        self._add(RanAlone(origin, num_tokens))

    def started_slowly(self, origins: tuple[Origin, ...]) -> None:
        self._add(StartedSlowly(origins))

    def paused(self, *, is_paused: bool) -> None:
        self._add(Paused(is_paused))

    def cache_dropped(self) -> None:
        self._add(CacheDropped())

    def pinned(self, name: str, tenant: str, token_ids: bytes) -> None:
        self._add(Pinned(name, tenant, token_ids))

    def unpinned(self, name: str) -> None:
        self._add(Unpinned(name))

    def executor_gone(self, now: float, reason: str) -> None:
        self._add(ExecutorGone(now, reason))

    # ------------------------------------------------------------------------------------------------- writing it down

    def flush(self, now: float, fleet: HasState | None, *, is_final: bool = False) -> None:
        pending = self._pending
        if not pending or (len(pending) < FLUSH_RECORDS and now < self._flush_at and not is_final):
            return
        self._flush_at = now + FLUSH_INTERVAL_S
        if self._log.failure:
            pending.clear()
            if not is_final:
                self._go_on(now, fleet)
            return
        records = [_encodable(entry) if type(entry) is tuple else entry for entry in pending]
        self._log.append(self._encoder.encode(records))
        pending.clear()
        if fleet is None or self._checkpointer is None or not self._log.is_segment_full:
            return
        state = fleet.state
        if state.cores:
            self._checkpointer(state)
            self._begin_segment()

    def take_failure(self) -> str:
        if self._is_failure_reported or not self._log.failure:
            return ""
        self._is_failure_reported = True
        return self._log.failure

    def take_missing(self) -> str:
        if self._is_missing_reported:
            return ""
        self._is_missing_reported = True
        return self._missing

    def _go_on(self, now: float, fleet: HasState | None) -> None:
        """Begin a recording at the present state, since what was not recorded cannot be replayed."""
        if not self._is_failure_reported or fleet is None or self._checkpointer is None:
            return
        if not self._failed_at:
            self._failed_at, self._try_at = now, now + _TRY_AGAIN_S
        if now < self._try_at:
            return
        self._try_at = now + _TRY_AGAIN_S
        reason, before, state = self._log.failure, self._log.life, fleet.state
        if not state.cores or not self._log.begin_again():
            return
        gap_s = now - self._failed_at
        self._missing = f"the {gap_s:.1f} s before it are not recorded ({reason}); life {before} ends before them"
        self._failed_at, self._is_failure_reported, self._is_missing_reported = 0.0, False, False
        self._checkpointer(state)
        self._begin_segment()

    def close(self, now: float, fleet: HasState | None) -> None:
        self.flush(now, fleet, is_final=True)
        self._log.close()

    def _add(self, record: Record | _Sent | _Taken) -> None:
        if self._latest.cell != self._cell:
            self._latest.cell = self._cell
            self._pending.append(InCell(self._cell))
        self._pending.append(record)
        self._num_added += 1

    def _begin_segment(self) -> None:
        records: list[Record] = [
            Header(LOG_VERSION, self._headway_version, self._log.life, self._log.segment, self._limits, self._missing)
        ]
        if self._latest.cell:
            records.append(InCell(self._latest.cell))
        self._log.append(self._encoder.encode(records))


def _encodable(entry: _Sent | _Taken) -> Record:
    now, what, rest = entry
    if not isinstance(what, ExecutorOutput):
        assert isinstance(rest, int)
        return Turn(now, tuple([decision_in_frame(frame) for _, frame in what]), rest)
    assert isinstance(rest, tuple)
    output = what
    # Decisions depend neither on vectors nor on log probabilities.
    if isinstance(what, PooledOutput):
        output = ExecutorOutput(**{name: getattr(what, name) for name in ExecutorOutput.__struct_fields__})
    if output.logprobs or output.prompt_logprobs:
        output = msgspec.structs.replace(output, logprobs=(), prompt_logprobs=())
    return Answered(now, output, tuple([End(end.origin, end.reason.value, end.num_output_tokens) for end in rest]))
