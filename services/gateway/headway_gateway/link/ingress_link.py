"""The gateway's side of the ingress protocol as a plain object: frames and time in, frames and news out.

Owns: the link's epochs, the order of frames, what is sent again. Must not know: sockets, clocks, tasks, text.

A gap, a damaged frame or silence opens a new link, which gets the live sequences again.
"""

import enum
from collections.abc import Iterable, Iterator

import msgspec

from headway_gateway.link.link_counters import LinkCounters
from headway_gateway.link.live_sequence import LiveSequence
from headway_gateway.link.live_sequences import LiveSequences
from headway_proto.columns import encode_column
from headway_proto.framing import Frame, FramingError, OtherVersionError
from headway_proto.ingress import (
    ACKNOWLEDGE_EVERY_FRAMES,
    HEARTBEAT_INTERVAL_S,
    REJECT_ALREADY_EXISTS,
    REJECT_OVERLOADED,
    REJECT_UNAVAILABLE,
    Abort,
    GatewayHeartbeat,
    GatewayHello,
    ModelInfo,
    Rejected,
    SchedulerHello,
    SchedulerLoad,
    SchedulerStatus,
    Tokens,
    gateway_frame_reader,
    gateway_frame_writer,
)
from headway_proto.operations import AdminCall, AdminReply

MAX_HANDLE = (1 << 31) - 1
_PASSING_REJECTIONS = frozenset({REJECT_OVERLOADED, REJECT_UNAVAILABLE, REJECT_ALREADY_EXISTS})
_LEAST_RETRY_S = 0.1
_MOST_RETRY_S = 1.0


class LinkPhase(enum.Enum):
    """The link's state."""

    HAILING = "hailing"
    OPEN = "open"


class IngressLink:
    """Speaks ingress for one gateway life. Times are monotonic seconds.

    After each call the owner empties ``take_frames``, ``take_news`` and ``take_admin_replies``. ``frames_version``
    grows when unsent frames are useless, ``silence_version`` when the connection should be replaced.
    """

    def __init__(
        self,
        *,
        incarnation: int,
        now: float,
        silence_timeout_s: float = 1.0,
        hello_interval_s: float = HEARTBEAT_INTERVAL_S,
    ) -> None:
        self._incarnation = incarnation
        self._silence_timeout_s = silence_timeout_s
        self._hello_interval_s = hello_interval_s
        self._reader = gateway_frame_reader()
        self._writer = gateway_frame_writer()
        self._frames: list[bytes] = []
        self._admin_replies: list[AdminReply] = []
        self._aborted_handles: list[int] = []
        self._resubmit_at: dict[int, float] = {}
        self._admin_calls: dict[int, AdminCall] = {}
        self._handles = self._count_handles()
        self._last_call_id = 0
        self._link_number = 0
        self._epochs_of_this_number: set[int] = set()
        self._epoch = 0
        self._next_sequence = 0
        self._acknowledged = 0
        self._heard_at = now
        self._heartbeat_at = now
        self._hello_at = now
        self.phase = LinkPhase.HAILING
        self.other_version = ""
        """Which version of the protocol the scheduler speaks, if not ours, until a link is open."""
        self.model: ModelInfo | None = None
        self.scheduler_state = ""
        self.submit_credits = 0
        self.num_steps = 0
        self.num_unfinished = 0
        self.load = SchedulerLoad()
        self.status_version = 0
        self.frames_version = 0
        self.silence_version = 0
        self.counters = LinkCounters()
        self._live = LiveSequences(self.counters)

    @property
    def live_sequences(self) -> Iterable[LiveSequence]:
        """Every sequence without an end."""
        return self._live

    def next_handle(self) -> int:
        """Return a new sequence's handle."""
        return next(self._handles)

    def submit(self, sequence: LiveSequence) -> None:
        """Generate it, as soon as a link is open."""
        self._live.add(sequence)
        if self.phase is LinkPhase.OPEN:
            self._send(sequence.to_submit())

    def abort(self, sequences: Iterable[LiveSequence]) -> None:
        """Give up sequences."""
        for sequence in sequences:
            if not self._live.remove(sequence):
                continue
            self._resubmit_at.pop(sequence.handle, None)
            if self.phase is LinkPhase.OPEN:
                self._aborted_handles.append(sequence.handle)

    def call_admin(self, call: AdminCall) -> int:
        """Send an operator's call until it is answered; return the number that it gets."""
        self._last_call_id += 1
        call = msgspec.structs.replace(call, call_id=self._last_call_id)
        self._admin_calls[call.call_id] = call
        if self.phase is LinkPhase.OPEN:
            self._send(call)
        return call.call_id

    def forget_admin_call(self, call_id: int) -> None:
        """Ignore the answer to this call."""
        self._admin_calls.pop(call_id, None)

    def receive(self, data: bytes, now: float) -> None:
        """Process one message."""
        try:
            frame = self._reader.decode(data)
        except FramingError as error:
            self.counters.damaged_frames += 1
            if isinstance(error, OtherVersionError):
                self.other_version = str(error)
            if self.phase is LinkPhase.OPEN:
                self._hail_again(now)
            return
        if isinstance(frame.body, SchedulerHello) and self._opens_link(frame, frame.body):
            self._open(frame.epoch, frame.body, now)
        elif self.phase is not LinkPhase.OPEN or frame.epoch != self._epoch:
            self.counters.stale_frames += 1
        elif frame.sequence < self._next_sequence:
            self.counters.duplicate_frames += 1
        elif frame.sequence > self._next_sequence:
            self.counters.sequence_gaps += 1
            self._hail_again(now)
        else:
            self._next_sequence += 1
            self._heard_at = now
            self._take_in(frame.body, now)

    def tick(self, now: float) -> None:
        """Let time pass, after receiving."""
        if self.phase is LinkPhase.HAILING:
            if now >= self._hello_at:
                self._say_hello(now)
            return
        if now - self._heard_at > self._silence_timeout_s:
            self.counters.silences += 1
            self.silence_version += 1
            self._hail_again(now)
            return
        if now - self._heartbeat_at >= HEARTBEAT_INTERVAL_S:
            self._acknowledge(now)
        self._resubmit_due(now)

    def take_frames(self) -> list[bytes]:
        """Return the messages to send."""
        if self._aborted_handles:
            handles, self._aborted_handles = self._aborted_handles, []
            self._send(Abort(handles=encode_column(handles)))
        frames, self._frames = self._frames, []
        return frames

    def take_news(self) -> list[LiveSequence]:
        """Return each sequence with news once."""
        return self._live.take_news()

    def take_admin_replies(self) -> list[AdminReply]:
        """Return new answers to operators' calls."""
        replies, self._admin_replies = self._admin_replies, []
        return replies

    def _count_handles(self) -> Iterator[int]:
        # Handles are int32. After 2^31 of them counting restarts; messages about the first are long gone.
        while True:
            for handle in range(1, MAX_HANDLE + 1):
                if self._live.get(handle) is None:
                    yield handle

    def _send(self, body: msgspec.Struct) -> None:
        self._frames.append(self._writer.encode(body))

    def _discard_frames(self) -> None:
        self._frames.clear()
        self.frames_version += 1

    def _say_hello(self, now: float) -> None:
        self._writer.begin_epoch(0)
        self._discard_frames()
        self._send(GatewayHello(incarnation=self._incarnation, link=self._link_number))
        self._hello_at = now + self._hello_interval_s

    def _hail_again(self, now: float) -> None:
        self.phase = LinkPhase.HAILING
        self._link_number += 1
        self._epochs_of_this_number.clear()
        self._aborted_handles.clear()
        self._resubmit_at.clear()
        self.status_version += 1
        self._say_hello(now)

    def _opens_link(self, frame: Frame, hello: SchedulerHello) -> bool:
        return (
            hello.gateway_incarnation == self._incarnation
            and hello.link == self._link_number
            and frame.sequence == 0
            and frame.epoch != 0
            and frame.epoch not in self._epochs_of_this_number
        )

    def _open(self, epoch: int, hello: SchedulerHello, now: float) -> None:
        self.phase, self.other_version = LinkPhase.OPEN, ""
        self._epoch = epoch
        self._epochs_of_this_number.add(epoch)
        self._writer.begin_epoch(epoch)
        self._discard_frames()
        self._aborted_handles.clear()
        self._resubmit_at.clear()
        self._next_sequence = 1
        self._heard_at = now
        self.submit_credits = hello.submit_credits
        self._take_status(hello.model, hello.state)
        self.counters.links_opened += 1
        for sequence in self._live:
            self._send(sequence.to_submit())
        for call in self._admin_calls.values():
            self._send(call)
        self._acknowledge(now)

    def _acknowledge(self, now: float) -> None:
        self._send(GatewayHeartbeat(received=self._next_sequence))
        self._acknowledged = self._next_sequence
        self._heartbeat_at = now

    def _resubmit_due(self, now: float) -> None:
        for handle in [handle for handle, due in self._resubmit_at.items() if due <= now]:
            del self._resubmit_at[handle]
            sequence = self._live.get(handle)
            if sequence is not None:
                self._send(sequence.to_submit())

    def _take_in(self, body: msgspec.Struct, now: float) -> None:
        if isinstance(body, Tokens):
            if not self._live.take_in(body):
                self.counters.token_gaps += 1
                self._hail_again(now)
                return
        elif isinstance(body, SchedulerStatus):
            self.num_steps = body.num_steps
            self.num_unfinished = body.num_unfinished
            self.load = body.load
            self._take_status(body.model, body.state)
        elif isinstance(body, Rejected):
            self._take_in_rejection(body, now)
        elif isinstance(body, AdminReply) and self._admin_calls.pop(body.call_id, None) is not None:
            self._admin_replies.append(body)
        if self._next_sequence - self._acknowledged >= ACKNOWLEDGE_EVERY_FRAMES:
            self._acknowledge(now)

    def _take_in_rejection(self, rejected: Rejected, now: float) -> None:
        sequence = self._live.get(rejected.handle)
        if sequence is None:
            return
        if sequence.has_run and rejected.reason in _PASSING_REJECTIONS:
            # It was accepted before the link broke, so it must end properly: submit it again soon.
            retry_s = min(max(_LEAST_RETRY_S, rejected.retry_after_ms / 1000), _MOST_RETRY_S)
            self._resubmit_at[rejected.handle] = now + retry_s
            return
        self._live.end(sequence, rejected)

    def _take_status(self, model: ModelInfo | None, state: str) -> None:
        if model != self.model or state != self.scheduler_state or self._next_sequence == 1:
            self.status_version += 1
        self.model = model
        self.scheduler_state = state
