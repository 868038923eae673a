"""The scheduler's side of the step protocol with one executor, as a state machine without sockets or clock.

Owns: which executor is in use, its epochs, and the order of frames. Must not know: decisions, what carries frames, or
the other executors.

An executor that says hello gets a new epoch, unless another sent a frame within ``TAKEOVER_SILENCE_S``. A peer is one
connection: a reconnected executor is a new peer. A damaged frame, a gap or an impossible answer starts a new epoch, and
answers of the old one are ignored. The other side: ``headway_executor.links.step_link``.
"""

import msgspec

from headway_proto.adapters import AdapterChange, AdapterChanged
from headway_proto.framing import VERSION_NOTICE, Frame, FramingError, OtherVersionError
from headway_proto.step import (
    BackendInfo,
    ExecutorHeartbeat,
    ExecutorHello,
    ExecutorOutput,
    NewEpoch,
    ResyncRequest,
    SchedulerHeartbeat,
    SchedulerOutput,
    info_problem,
    scheduler_frame_reader,
    scheduler_frame_writer,
)

HEARTBEAT_INTERVAL_S = 0.25
SILENT_AFTER_S = 0.8
TAKEOVER_SILENCE_S = 1.0
SILENCE_TIMEOUT_S = 10.0
REOPEN_INTERVAL_S = 0.5
MAX_EPOCH = (1 << 32) - 1
FIRST_EPOCHS = 1 << 30


class StepFailed(msgspec.Struct, frozen=True):
    """``max_num_batched_tokens`` limits later steps; 0 if the size was not the reason."""

    step: int
    max_num_batched_tokens: int


class EpochOpened(msgspec.Struct, frozen=True):
    """The executor has no state and waits for step 0."""

    epoch: int
    info: BackendInfo
    reason: str
    failure: StepFailed | None = None


class InAnotherState(msgspec.Struct, frozen=True):
    """What the executor wrote in the epoch that ends now may be anything; why it ends follows."""


class StepAnswered(msgspec.Struct, frozen=True):
    """An answer of the current epoch."""

    output: ExecutorOutput


class AdapterAnswered(msgspec.Struct, frozen=True):
    """Of the current epoch."""

    answer: AdapterChanged


class ExecutorLost(msgspec.Struct, frozen=True):
    """No executor until ``EpochOpened``."""

    reason: str


class ExecutorRefused(msgspec.Struct, frozen=True):
    """Reported once per incarnation."""

    reason: str


StepEvent = EpochOpened | InAnotherState | StepAnswered | AdapterAnswered | ExecutorLost | ExecutorRefused


class EpochNumbers:
    """Numbers the epochs of all cells.

    An executor enters only an epoch with a higher number than its last, and it may come from another cell.
    """

    def __init__(self, incarnation: int) -> None:
        # Epochs of two scheduler lives must not be mistaken for one another.
        self.newest_epoch = incarnation % FIRST_EPOCHS
        self._first_epoch = self.newest_epoch + 1

    def has_given(self, epoch: int) -> bool:
        """Whether an epoch is of this scheduler life."""
        return self._first_epoch <= epoch <= self.newest_epoch

    def next(self) -> int:
        """A number above all others."""
        self.newest_epoch = self.newest_epoch % MAX_EPOCH + 1
        return self.newest_epoch


class ExecutorLink:
    """Takes frames and the time (seconds, monotonic); fills ``outgoing`` with (peer, frame). ``number``: of its cell."""

    def __init__(
        self,
        incarnation: int,
        number: int = 0,
        outgoing: list[tuple[bytes, bytes]] | None = None,
        epochs: EpochNumbers | None = None,
    ) -> None:
        self.incarnation = incarnation
        self.number = number
        self.outgoing: list[tuple[bytes, bytes]] = [] if outgoing is None else outgoing
        self.num_damaged_frames = 0
        self.other_version = ""
        """Why a peer that speaks another version was refused last; the owner empties it."""
        self._epochs = epochs or EpochNumbers(incarnation)
        self.epoch = self._epochs.newest_epoch
        self._reader = scheduler_frame_reader()
        self._writer = scheduler_frame_writer()
        self._peer: bytes | None = None
        self._executor = 0
        self._info: BackendInfo | None = None
        self._announced_limit = 0
        self.served_another_life = False
        """Whether the executor comes from an earlier life of the scheduler."""
        self._refused: int | None = None
        self._next_sequence = 0
        self._heard_at = float("-inf")
        self._opened_at = float("-inf")
        self._last_heartbeat = float("-inf")

    @property
    def is_open(self) -> bool:
        """Whether steps can be sent."""
        return self._peer is not None

    @property
    def peer(self) -> bytes | None:
        """The connection in use."""
        return self._peer

    @property
    def executor(self) -> int:
        """The incarnation of the present or last executor; 0 before the first."""
        return self._executor

    @property
    def host_pool(self) -> str:
        """The host pool of the newest executor; "" if there is none."""
        return "" if self._info is None else self._info.host_pool

    def may_be_taken_over(self, now: float) -> bool:
        """Whether another executor that says hello gets this link."""
        return not self.is_open or now - self._heard_at >= TAKEOVER_SILENCE_S

    def executor_state(self, now: float) -> str:
        """One of "absent", "ready", or "silent" after three missing heartbeats."""
        if not self.is_open:
            return "absent"
        return "silent" if now - self._heard_at > SILENT_AFTER_S else "ready"

    @property
    def next_deadline(self) -> float:
        """When to call ``tick``."""
        return self._last_heartbeat + HEARTBEAT_INTERVAL_S

    def send_step(self, output: SchedulerOutput) -> None:
        """Send one step."""
        assert self._peer is not None
        self.outgoing.append((self._peer, self._writer.encode(output)))

    def send_change(self, change: AdapterChange) -> None:
        """Ask for an adapter, behind the steps so far."""
        assert self._peer is not None
        self.outgoing.append((self._peer, self._writer.encode(change)))

    def receive(self, peer: bytes, data: bytes, now: float) -> list[StepEvent]:
        """Handle one frame."""
        try:
            frame = self._reader.decode(data)
        except FramingError as error:
            self.num_damaged_frames += 1
            if peer != self._peer and isinstance(error, OtherVersionError):
                self.other_version = str(error)
                self.outgoing.append((peer, VERSION_NOTICE))
            return self.reopen(f"damaged frame: {error}", now) if peer == self._peer else []
        body = frame.body
        if isinstance(body, ExecutorHello):
            return self._on_hello(peer, frame, body, now)
        if self._peer is None:
            # An executor of an earlier scheduler life, or one that was given up: our name, or our epoch, makes it say
            # hello.
            self.announce_to(peer)
        if peer != self._peer:
            return []
        self._heard_at = now
        if isinstance(body, ResyncRequest):
            return self._on_resync(frame, body, now)
        return self._on_numbered(frame, now)

    def announce_to(self, peer: bytes) -> None:
        """Send a heartbeat, at which an executor that is not ours says hello."""
        self.outgoing.append((peer, self._writer.encode(SchedulerHeartbeat(self.incarnation))))

    def tick(self, now: float) -> list[StepEvent]:
        """Send a due heartbeat; detect silence."""
        if self._peer is None:
            self._last_heartbeat = now
            return []
        if now - self._heard_at > SILENCE_TIMEOUT_S:
            return self._lose(f"silent for {now - self._heard_at:.1f} s")
        if now - self._last_heartbeat >= HEARTBEAT_INTERVAL_S:
            self._last_heartbeat = now
            self.announce_to(self._peer)
        return []

    def unreachable(self, peer: bytes) -> list[StepEvent]:
        """Handle a failed send."""
        return self._lose("unreachable") if peer == self._peer else []

    def reopen(self, reason: str, now: float) -> list[StepEvent]:
        """Open a new epoch."""
        assert self._peer is not None
        assert self._info is not None
        return self._open(self._peer, self._executor, self._info, reason, now)

    def _on_hello(self, peer: bytes, frame: Frame, hello: ExecutorHello, now: float) -> list[StepEvent]:
        problem = info_problem(hello.info)
        if problem is not None:
            is_news = self._refused != hello.incarnation
            self._refused = hello.incarnation
            return [ExecutorRefused(problem)] if is_news else []
        info = hello.info
        if self._info is not None and hello.incarnation == self._executor:
            # Its limit holds for every connection.
            info = msgspec.structs.replace(info, max_num_batched_tokens=self._info.max_num_batched_tokens)
            if peer == self._peer:
                self._heard_at = now
                if now - self._opened_at < REOPEN_INTERVAL_S:
                    return []  # sent before our answer arrived
                return self._open(peer, hello.incarnation, info, "the executor said hello again", now)
        if not self.may_be_taken_over(now):
            return []  # it will say hello again, should the present executor be gone
        is_taken_over = self._peer is not None and hello.incarnation != self._executor
        events = self._lose("another executor took over") if is_taken_over else []
        self._announced_limit = hello.info.max_num_batched_tokens
        self.served_another_life = frame.epoch > 0 and not self._epochs.has_given(frame.epoch)
        return [*events, *self._open(peer, hello.incarnation, info, "an executor joined", now)]

    def lift_limit(self, now: float) -> list[StepEvent]:
        """Allow the first size again: the too large request has ended."""
        assert self._info is not None
        self._info = msgspec.structs.replace(self._info, max_num_batched_tokens=self._announced_limit)
        return self.reopen("steps may be large again", now)

    def _on_resync(self, frame: Frame, request: ResyncRequest, now: float) -> list[StepEvent]:
        if request.incarnation != self._executor:
            return []
        if frame.epoch not in {self.epoch, 0}:
            self._lower_limit(request.max_num_batched_tokens)  # late, but still true for the next epoch
            return []
        found: list[StepEvent] = []
        if request.is_in_another_state and frame.epoch == self.epoch:
            found.append(InAnotherState())
        if request.is_leaving:
            return [*found, *self._lose(f"it left: {request.reason}")]
        self._lower_limit(request.max_num_batched_tokens)
        assert self._peer is not None
        assert self._info is not None
        failure = None
        if request.failed_step >= 0 and frame.epoch == self.epoch:
            failure = StepFailed(request.failed_step, request.max_num_batched_tokens)
        reason = f"the executor asked for it: {request.reason}"
        return [*found, *self._open(self._peer, self._executor, self._info, reason, now, failure)]

    def _lower_limit(self, max_num_batched_tokens: int) -> None:
        assert self._info is not None
        if max_num_batched_tokens > 0:
            self._info = msgspec.structs.replace(self._info, max_num_batched_tokens=max_num_batched_tokens)

    def _on_numbered(self, frame: Frame, now: float) -> list[StepEvent]:
        if frame.epoch != self.epoch:
            return []
        if frame.sequence != self._next_sequence:
            if frame.sequence < self._next_sequence:
                return []  # a duplicate
            return self.reopen(f"frame {frame.sequence} arrived, {self._next_sequence} was expected", now)
        self._next_sequence += 1
        body = frame.body
        if isinstance(body, ExecutorOutput):
            return [StepAnswered(body)]
        if isinstance(body, AdapterChanged):
            return [AdapterAnswered(body)]
        assert isinstance(body, ExecutorHeartbeat)
        return []

    def _open(
        self,
        peer: bytes,
        executor: int,
        info: BackendInfo,
        reason: str,
        now: float,
        failure: StepFailed | None = None,
    ) -> list[StepEvent]:
        self._peer, self._executor, self._info = peer, executor, info
        self._leave_epoch()
        self._next_sequence = 0
        self._heard_at = self._opened_at = now
        self.outgoing.append((peer, self._writer.encode(NewEpoch(self.epoch, executor, self.incarnation))))
        return [EpochOpened(self.epoch, info, reason, failure)]

    def _lose(self, reason: str) -> list[StepEvent]:
        self._peer = None
        # It may only be cut off and still be in this epoch. A frame of a later epoch makes it say hello.
        self._leave_epoch()
        return [ExecutorLost(reason)]

    def _leave_epoch(self) -> None:
        self.epoch = self._epochs.next()
        self._writer.begin_epoch(self.epoch)
