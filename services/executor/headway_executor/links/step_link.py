"""The executor's side of the step protocol, without sockets and clocks.

Owns: hello, epochs, resynchronising, signs of life. Must not know: sockets, the wall clock (times are seconds of any
monotonic clock), rows, backends.

The scheduler's side mirrors these rules:

* **Sequence.** Each side numbers its frames within an epoch from 0. The scheduler's frame 0 is ``NewEpoch``; the
executor acknowledges it with a heartbeat (next step 0). Before the first epoch the executor sends epoch 0; after an
epoch it keeps that epoch and its numbering.
* **HELLO** (from the start). ``ExecutorHello`` every ``hello_interval`` until an epoch is opened. A hello and a
``NewEpoch`` may cross; a scheduler opens another epoch only if hellos go on.
* **NewEpoch** is accepted, in any state, if it has this executor's incarnation, is frame 0 of its epoch, and is new: a
later epoch of the known scheduler, or the first epoch of an unknown one. Epochs are 1 or more and rise within one
scheduler incarnation; a new one starts from a random number, so that late frames of the old one do not fit.
* **RUNNING.** A frame with a lower sequence number than expected is a duplicate and dropped. A higher number, an
undecodable frame, or an unexpected step loses the epoch.
* **LOST.** ``ResyncRequest`` at once and every ``resync_interval``. Nothing more of this epoch is executed or reported.
* **Back to HELLO**, from RUNNING or LOST, on a heartbeat of another scheduler, on a frame of a later epoch, or after
``silence_timeout`` without an intact frame. Frames of earlier epochs are ignored.
* **Leaving.** A process that must end sends one ``ResyncRequest`` (``is_leaving``).
* **Life.** While RUNNING, ``ExecutorHeartbeat`` every ``heartbeat_interval``; otherwise the repeated message.
"""

import enum
from collections import deque
from typing import NamedTuple, TypeAlias

import msgspec

from headway_executor.backend import StepResult
from headway_proto.adapters import AdapterChange, AdapterChanged
from headway_proto.columns import EMPTY_COLUMN, Int32Array, encode_column, encode_columns
from headway_proto.framing import VERSION_INTERVAL_S, Frame, FramingError, OtherVersionError
from headway_proto.step import (
    BackendInfo,
    ExecutorHeartbeat,
    ExecutorHello,
    ExecutorOutput,
    NewEpoch,
    PooledOutput,
    ResyncRequest,
    SchedulerHeartbeat,
    SchedulerOutput,
    executor_frame_reader,
    executor_frame_writer,
)
from headway_proto.wording import one_line

_MAX_REASON_CHARACTERS = 300

# Of what an answer holds as MessagePack. The rest may be the numbers of 65,536 stale rows.
_MOST_BYTES_OF_THE_REST = 1 << 19
_MOST_BYTES_OF_A_TOKEN = 16
_MOST_BYTES_OF_AN_ENTRY = 32
_MOST_BYTES_OF_AN_ALTERNATIVE = 14
_MOST_BYTES_OF_A_CHARACTER = 4


class LinkTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals in seconds."""

    hello_interval: float = 0.1
    resync_interval: float = 0.25
    heartbeat_interval: float = 0.25
    silence_timeout: float = 5.0


class EpochBegan(NamedTuple):
    """Forget every row; the next step is 0."""

    epoch: int
    scheduler_incarnation: int


class EpochLost(NamedTuple):
    """The epoch is over; ``reason`` is one line."""

    epoch: int
    reason: str


class OtherVersion(NamedTuple):
    """The scheduler speaks another version of the protocol; ``reason`` says which. Hellos go on: there may be another one."""

    reason: str


class StepReady(NamedTuple):
    """The next step to execute."""

    output: SchedulerOutput


class MustEnd(NamedTuple):
    """This process cannot go on; ``reason`` is one line. ``is_in_another_state``: than the others of its group."""

    reason: str
    is_in_another_state: bool = False


class ProposalsAccepted(NamedTuple):
    """Of the last step, as rank 0 has accepted them: int32, ``[3, s]``, see ``StepResult.accepted_tokens``."""

    accepted_tokens: Int32Array


class AdapterAsked(NamedTuple):
    """The scheduler wants an adapter loaded or unloaded."""

    change: AdapterChange


LinkEvent: TypeAlias = EpochBegan | EpochLost | OtherVersion | StepReady | MustEnd | ProposalsAccepted | AdapterAsked


class LinkOutcome(NamedTuple):
    """Frames to send, then events to handle, in order."""

    frames: list[bytes]
    events: list[LinkEvent]


def most_bytes_of(result: StepResult) -> int:
    """The most bytes that the answer with this result takes as a frame."""
    prompts = [entry.values for entry in result.prompt_logprobs]
    num_entries = len(result.logprobs) + len(prompts) + len(result.vectors) + len(result.errors)
    return (
        _MOST_BYTES_OF_THE_REST
        + _MOST_BYTES_OF_A_TOKEN * len(result.sampled_token_ids)
        + _MOST_BYTES_OF_AN_ENTRY * num_entries
        + sum(_MOST_BYTES_OF_AN_ALTERNATIVE * len(entry.top_token_ids) for entry in result.logprobs)
        + sum(len(values.logprobs) + len(values.top_token_ids) + len(values.top_logprobs) for values in prompts)
        + sum(len(entry.values) for entry in result.vectors)
        + sum(_MOST_BYTES_OF_A_CHARACTER * len(entry.message) for entry in result.errors)
    )


class _State(enum.Enum):
    HELLO = enum.auto()
    RUNNING = enum.auto()
    LOST = enum.auto()


class StepLink:
    """One life of an executor: ``incarnation`` is random."""

    def __init__(
        self, *, incarnation: int, info: BackendInfo, timing: LinkTiming | None = None, number: int = -1
    ) -> None:
        self._incarnation = incarnation
        self._info = info
        self._number = number
        self._timing = timing or LinkTiming()
        self._reader = executor_frame_reader()
        self._writer = executor_frame_writer()
        self._state = _State.HELLO
        self._epoch = 0
        self._scheduler_incarnation: int | None = None
        self._former_schedulers: set[int] = set()
        self._expected_sequence = 0
        self._next_step = 0
        self._lost_because = ""
        self._asked_limit = 0
        self._failed_step = -1
        self._is_in_another_state = False
        self._next_message_at = float("-inf")
        self._last_heard = float("-inf")
        self._tell_version_at = float("-inf")
        self._askers: deque[int | None] = deque()
        """The scheduler behind each change of an adapter that is not answered, in order."""
        self.num_damaged_frames = 0

    @property
    def epoch(self) -> int:
        """The last epoch; 0 before the first."""
        return self._epoch

    @property
    def running(self) -> bool:
        """Whether steps of this epoch are accepted and reported."""
        return self._state is _State.RUNNING

    @property
    def next_deadline(self) -> float:
        """The time when ``tick`` is due."""
        if self._state is _State.HELLO:
            return self._next_message_at
        return min(self._next_message_at, self._last_heard + self._timing.silence_timeout)

    def receive(self, data: bytes | memoryview, now: float) -> LinkOutcome:
        """Handle one message; never raise."""
        outcome = LinkOutcome([], [])
        try:
            frame = self._reader.decode(data)
        except FramingError as error:
            self.num_damaged_frames += 1
            if isinstance(error, OtherVersionError) and now >= self._tell_version_at:
                self._tell_version_at = now + VERSION_INTERVAL_S
                outcome.events.append(OtherVersion(str(error)))
            self._lose(f"damaged frame: {error}", now, outcome)
            return outcome
        self._last_heard = now
        if isinstance(frame.body, NewEpoch) and self._is_news(frame, frame.body):
            self._enter(frame.body, now, outcome)
        elif self._scheduler_moved_on(frame):
            self._say_hello_again("the scheduler has moved on to another epoch", outcome)
        elif self._state is _State.RUNNING and frame.epoch == self._epoch:
            self._take(frame, now, outcome)
        self._send_due(now, outcome)
        return outcome

    def tick(self, now: float) -> LinkOutcome:
        """Send what is due, and end an epoch after silence."""
        outcome = LinkOutcome([], [])
        silent_for = now - self._last_heard
        if self._state is not _State.HELLO and silent_for >= self._timing.silence_timeout:
            self._say_hello_again(f"no sign of the scheduler for {silent_for:.1f} s", outcome)
        self._send_due(now, outcome)
        return outcome

    def result(
        self,
        *,
        epoch: int,
        step: int,
        result: StepResult,
        state_digest: int | None,
        stale_rows: Int32Array = EMPTY_COLUMN,
    ) -> list[bytes]:
        """Return the frames that report a step; none if its epoch is over.

        ``state_digest`` was computed right after the step was applied.
        """
        if self._state is not _State.RUNNING or epoch != self._epoch:
            return []
        output = ExecutorOutput(
            epoch=epoch,
            step=step,
            sampled_token_ids=encode_column(result.sampled_token_ids),
            logprobs=result.logprobs,
            errors=result.errors,
            device_time_us=result.device_time_us,
            state_digest=state_digest,
            move_time_us=result.move_time_us,
            prompt_logprobs=result.prompt_logprobs,
            accepted_tokens=b"" if result.accepted_tokens is None else encode_columns(result.accepted_tokens),
            stale_rows=encode_column(stale_rows),
        )
        if result.vectors:
            fields = {name: getattr(output, name) for name in ExecutorOutput.__struct_fields__}
            output = PooledOutput(**fields, vectors=result.vectors)
        return [self._writer.encode(output)]

    def answer_adapter(self, change: AdapterChange, answer: AdapterChanged) -> list[bytes]:
        """Return the frames that answer a change, in the order of asking; another scheduler has numbers of its own.

        Later hellos announce the adapters as they are now.
        """
        if not answer.error:
            others = [adapter for adapter in self._info.adapters if adapter.name != change.name]
            loaded = () if answer.adapter is None else (answer.adapter,)
            self._info = msgspec.structs.replace(self._info, adapters=(*others, *loaded))
        is_expected = self._askers.popleft() == self._scheduler_incarnation
        return [self._writer.encode(answer)] if is_expected and self._state is _State.RUNNING else []

    def lose_epoch(
        self, epoch: int, reason: str, now: float, *, failed_step: int = -1, max_num_batched_tokens: int = 0
    ) -> LinkOutcome:
        """Give up ``epoch``, unless it is over, because a step was impossible or failed.

        ``failed_step`` is -1 for an impossible one: then the state here is another than the steps say.
        ``max_num_batched_tokens`` limits later steps, unless it is 0.
        """
        outcome = LinkOutcome([], [])
        if epoch == self._epoch:
            self._is_in_another_state |= self.running and failed_step < 0
            self._lose(reason, now, outcome, failed_step=failed_step, max_num_batched_tokens=max_num_batched_tokens)
        return outcome

    def leave(self, reason: str, *, is_in_another_state: bool = False) -> list[bytes]:
        """The last frames before the process ends."""
        body = ResyncRequest(
            self._incarnation,
            one_line(reason, _MAX_REASON_CHARACTERS),
            is_leaving=True,
            is_in_another_state=is_in_another_state,
        )
        return [self._writer.encode(body)]

    def _is_news(self, frame: Frame, body: NewEpoch) -> bool:
        if body.executor_incarnation != self._incarnation:
            return False
        if frame.sequence != 0 or frame.epoch != body.epoch or body.epoch < 1:
            return False
        if body.scheduler_incarnation == self._scheduler_incarnation:
            return body.epoch > self._epoch
        return body.scheduler_incarnation not in self._former_schedulers

    def _enter(self, body: NewEpoch, now: float, outcome: LinkOutcome) -> None:
        if self._scheduler_incarnation not in {None, body.scheduler_incarnation}:
            self._former_schedulers.add(self._scheduler_incarnation)
        self._state, self._is_in_another_state = _State.RUNNING, False
        self._epoch = body.epoch
        self._scheduler_incarnation = body.scheduler_incarnation
        self._expected_sequence = 1
        self._next_step = 0
        self._writer.begin_epoch(body.epoch)
        self._next_message_at = now
        outcome.events.append(EpochBegan(body.epoch, body.scheduler_incarnation))

    def _scheduler_moved_on(self, frame: Frame) -> bool:
        if self._state is _State.HELLO:
            return False
        if isinstance(frame.body, SchedulerHeartbeat):
            sender = frame.body.scheduler_incarnation
            if sender != self._scheduler_incarnation:
                return sender not in self._former_schedulers
        return frame.epoch > self._epoch and not isinstance(frame.body, NewEpoch)

    def _take(self, frame: Frame, now: float, outcome: LinkOutcome) -> None:
        if frame.sequence < self._expected_sequence:
            return
        if frame.sequence > self._expected_sequence:
            self._lose(f"frame {frame.sequence} arrived where {self._expected_sequence} was expected", now, outcome)
            return
        self._expected_sequence += 1
        body = frame.body
        if isinstance(body, SchedulerHeartbeat):
            return
        if isinstance(body, AdapterChange):
            self._askers.append(self._scheduler_incarnation)
            outcome.events.append(AdapterAsked(body))
            return
        if isinstance(body, SchedulerOutput) and (body.epoch, body.step) == (self._epoch, self._next_step):
            self._next_step += 1
            outcome.events.append(StepReady(body))
            return
        if isinstance(body, SchedulerOutput):
            what = f"step {body.step} of epoch {body.epoch} arrived"
        else:
            what = f"{type(body).__name__} arrived"
        self._lose(f"{what} where step {self._next_step} of epoch {self._epoch} was expected", now, outcome)

    def _lose(
        self,
        reason: str,
        now: float,
        outcome: LinkOutcome,
        *,
        failed_step: int = -1,
        max_num_batched_tokens: int = 0,
    ) -> None:
        if self._state is not _State.RUNNING:
            return
        self._asked_limit = max_num_batched_tokens
        self._failed_step = failed_step
        self._lost_because = one_line(reason, _MAX_REASON_CHARACTERS)
        self._state = _State.LOST
        self._next_message_at = now
        outcome.events.append(EpochLost(self._epoch, self._lost_because))
        self._send_due(now, outcome)

    def _say_hello_again(self, reason: str, outcome: LinkOutcome) -> None:
        if self._state is _State.RUNNING:
            outcome.events.append(EpochLost(self._epoch, reason))
        self._state = _State.HELLO
        self._next_message_at = float("-inf")

    def _resync_request(self) -> ResyncRequest:
        return ResyncRequest(
            self._incarnation,
            self._lost_because,
            self._asked_limit,
            self._failed_step,
            is_in_another_state=self._is_in_another_state,
        )

    def _send_due(self, now: float, outcome: LinkOutcome) -> None:
        if now < self._next_message_at:
            return
        body: msgspec.Struct
        if self._state is _State.HELLO:
            body, interval = ExecutorHello(self._incarnation, self._info, self._number), self._timing.hello_interval
        elif self._state is _State.LOST:
            body, interval = self._resync_request(), self._timing.resync_interval
        else:
            body, interval = ExecutorHeartbeat(self._incarnation, self._next_step), self._timing.heartbeat_interval
        self._next_message_at = now + interval
        outcome.frames.append(self._writer.encode(body))
