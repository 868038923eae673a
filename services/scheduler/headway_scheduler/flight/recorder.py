"""The flight recorder: told of every call of the core, it writes them down when there is time.

Owns: what is remembered until it is written, and when that is. Must not know: sockets, files, or what is decided.

On the way of a step there is an append of references and nothing else. ``flush`` encodes what has gathered; the process
calls it when it is about to sleep. Compressing and writing are the log's, on its thread.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import msgspec

from headway_proto.ingress import Rejected, Submit
from headway_proto.step import BackendInfo, ExecutorOutput
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.events import FinishedEvent
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.flight.pieces import LogPieces
from headway_scheduler.flight.records import (
    LOG_VERSION,
    Aborted,
    Answered,
    Arrived,
    CacheDropped,
    End,
    EpochBegan,
    ExecutorGone,
    Header,
    Paused,
    Pinned,
    RanAlone,
    Record,
    Refused,
    StartedSlowly,
    Turn,
    Unpinned,
    decision_in_frame,
)

FLUSH_RECORDS = 64
"""So many records are written at once,"""
FLUSH_INTERVAL_S = 0.05
"""or those of so many seconds; a killed process loses no more, but for what came just before it went to sleep."""


class Log(Protocol):
    """Where batches of records go. ``failure`` says why they go nowhere any more."""

    life: int
    segment: int
    failure: str

    @property
    def is_segment_full(self) -> bool:
        """Whether the next segment is due."""

    def append(self, batch: bytes) -> None:
        """Take an encoded batch; never waits."""

    def close(self) -> None:
        """Write what is left."""


Checkpointer = Callable[[Scheduler], None]
"""Lets the log begin a segment with the state of this core."""


_Sent: TypeAlias = tuple[float, Sequence[tuple[bytes, bytes]], int]
"""A turn that is not encoded yet: when, the frames of its steps, and how many were shed."""
_Taken: TypeAlias = tuple[float, ExecutorOutput, tuple[FinishedEvent, ...]]
"""An answer, likewise: when, what it was, and who ended with it."""


class FlightRecorder:
    """Told in the order of the calls. Times in seconds, monotonic."""

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
        """The log's files, for those who want a copy; None where it has none."""
        self._encoder = msgspec.msgpack.Encoder()
        self._pending: list[Record | _Sent | _Taken] = []
        self._num_flushed = 0
        self._flush_at = 0.0
        self._idle_since = -1
        """How many records there were after a turn without a request; -1 if the last was no such turn."""
        self._is_failure_told = False
        self._begin_segment()

    # ------------------------------------------------------------------------------------------- what the core is told

    def epoch_began(
        self, now: float, epoch: int, capacity: ExecutorCapacity, info: BackendInfo, reason: str, *, same_model: bool
    ) -> None:
        """The core was made, or began an epoch."""
        self._note(EpochBegan(now, epoch, capacity, same_model, info.model_name, reason))

    def arrived(self, now: float, new: NewRequestEvent) -> None:
        """The core took a request."""
        self._note(
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
            )
        )

    def refused(self, now: float, submit: Submit, rejected: Rejected) -> None:
        """A request was not taken."""
        num_tokens = len(submit.token_ids) // 4
        reason, message = (
            rejected.reason,
            f"{rejected.field}: {rejected.message}" if rejected.field else rejected.message,
        )
        self._note(Refused(now, submit.request_id, submit.index, submit.tenant, num_tokens, reason, message))

    def aborted(self, now: float, origin: Origin, why: str, error: str = "") -> None:
        """The core was told to end a request; with an ``error``, one that is to blame."""
        self._note(Aborted(now, origin, why, error))

    def sent(self, now: float, frames: Sequence[tuple[bytes, bytes]], num_shed: int) -> None:
        """The core was asked for steps until it had no more: these, as (peer, frame)."""
        self._pending.append((now, frames, num_shed))

    def sent_nothing(self, now: float, num_shed: int, *, is_idle: bool) -> None:
        """The core was asked for a step and had none. ``is_idle``: it has no request at all.

        Of turns without a request the first may still tidy up; those that follow it change nothing and are left out.
        """
        num_noted = self._num_flushed + len(self._pending)
        if is_idle and not num_shed and num_noted == self._idle_since:
            return
        self._pending.append((now, (), num_shed))
        self._idle_since = num_noted + 1 if is_idle else -1

    def answered(self, now: float, output: ExecutorOutput, finished: tuple[FinishedEvent, ...]) -> None:
        """The core took an answer in, with which these requests ended."""
        self._pending.append((now, output, finished))

    def mismatched(self, now: float, output: ExecutorOutput, why: str) -> None:
        """The core refused an answer."""
        self._note(Answered(now, output, mismatch=why))

    def ran_alone(self, origin: Origin | None, num_tokens: int) -> None:
        """The core was told who may run."""
        self._note(RanAlone(origin, num_tokens))

    def started_slowly(self, origins: tuple[Origin, ...]) -> None:
        """The core was told that these come back a few at a time."""
        self._note(StartedSlowly(origins))

    def paused(self, *, is_paused: bool) -> None:
        """Admission was paused or resumed."""
        self._note(Paused(is_paused))

    def cache_dropped(self) -> None:
        """Cached blocks that nobody held were let go of."""
        self._note(CacheDropped())

    def pinned(self, name: str, tenant: str, token_ids: bytes) -> None:
        """A prefix was pinned."""
        self._note(Pinned(name, tenant, token_ids))

    def unpinned(self, name: str) -> None:
        """A prefix was unpinned."""
        self._note(Unpinned(name))

    def executor_gone(self, now: float, reason: str) -> None:
        """There is no executor."""
        self._note(ExecutorGone(now, reason))

    # ------------------------------------------------------------------------------------------------- writing it down

    def flush(self, now: float, core: Scheduler | None, *, is_final: bool = False) -> None:
        """Hand over what has gathered, if it is much or has waited long enough."""
        pending = self._pending
        if not pending or (len(pending) < FLUSH_RECORDS and now < self._flush_at and not is_final):
            return
        self._flush_at = now + FLUSH_INTERVAL_S
        self._num_flushed += len(pending)
        if self._log.failure:
            pending.clear()
            return
        records = [_encodable(entry) if type(entry) is tuple else entry for entry in pending]
        self._log.append(self._encoder.encode(records))
        pending.clear()
        if core is not None and self._checkpointer is not None and self._log.is_segment_full:
            self._checkpointer(core)
            self._begin_segment()

    def take_failure(self) -> str:
        """Why recording has ended, once; empty if it goes on."""
        if self._is_failure_told or not self._log.failure:
            return ""
        self._is_failure_told = True
        return self._log.failure

    def close(self, now: float, core: Scheduler | None) -> None:
        """Write what is left."""
        self.flush(now, core, is_final=True)
        self._log.close()

    def _note(self, record: Record) -> None:
        self._pending.append(record)

    def _begin_segment(self) -> None:
        header = Header(LOG_VERSION, self._headway_version, self._log.life, self._log.segment, self._limits)
        self._log.append(self._encoder.encode([header]))


def _encodable(entry: _Sent | _Taken) -> Record:
    now, what, rest = entry
    if not isinstance(what, ExecutorOutput):
        assert isinstance(rest, int)
        return Turn(now, tuple([decision_in_frame(frame) for _, frame in what]), rest)
    assert isinstance(rest, tuple)
    output = what
    if what.logprobs or what.prompt_logprobs:
        output = msgspec.structs.replace(what, logprobs=(), prompt_logprobs=())  # nothing follows from them
    return Answered(now, output, tuple([End(end.origin, end.reason.value, end.num_output_tokens) for end in rest]))
