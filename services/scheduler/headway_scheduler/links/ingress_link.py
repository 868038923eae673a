"""The scheduler's side of the ingress protocol, without sockets or clock.

Owns: gateway links: incarnations, frame order, flow control, unsent tokens. Must not know: scheduling, transport. The
core knows a link as an *owner*, a number used once. When a gateway opens a new link, the old owner's requests end, and
the gateway submits again those it wants.
"""

from collections.abc import Callable

import msgspec
import numpy as np

from headway_proto.columns import FLOAT32, Int32Array, encode_columns
from headway_proto.framing import VERSION_NOTICE, Frame, FramingError, OtherVersionError
from headway_proto.ingress import (
    HEARTBEAT_INTERVAL_S,
    MAX_UNACKNOWLEDGED_FRAMES,
    Abort,
    Admitted,
    Finished,
    GatewayHeartbeat,
    GatewayHello,
    ModelInfo,
    PromptLogprobs,
    SchedulerHello,
    SchedulerLoad,
    SchedulerStatus,
    Submit,
    TokenLogprobs,
    Tokens,
    TokensAndVectors,
    Vector,
    scheduler_frame_reader,
    scheduler_frame_writer,
)
from headway_proto.operations import AdminCall

SILENCE_TIMEOUT_S = 10.0
REOPEN_INTERVAL_S = 0.5
MAX_HELD_TOKENS = 1 << 22
"""A link with more unacknowledged tokens is dropped."""

MAX_LINKS = 1024
_TOKENS_WORTH_OF_A_PART = 32
"""The memory overhead of a part, in tokens."""


class GatewayMessage(msgspec.Struct, frozen=True):
    """A message of an open link."""

    owner: int
    body: Submit | Abort | AdminCall


class GatewayGone(msgspec.Struct, frozen=True):
    """A link ended, and with it its requests."""

    owner: int
    reason: str


IngressEvent = GatewayMessage | GatewayGone


class Announcement(msgspec.Struct, frozen=True):
    """The state in hello and heartbeat."""

    model: ModelInfo | None
    state: str
    num_steps: int
    num_unfinished: int
    load: SchedulerLoad = SchedulerLoad()


class GatewayLink:
    """An open link and its unsent messages."""

    def __init__(self, peer: bytes, owner: int, hello: GatewayHello, epoch: int, now: float) -> None:
        self.peer = peer
        self.owner = owner
        self.incarnation = hello.incarnation
        self.number = hello.link
        self.epoch = epoch
        self.opened_at = self.heard_at = now
        self.next_sequence = 0
        self._acknowledged = 0
        self._writer = scheduler_frame_writer()
        self._writer.begin_epoch(epoch)
        self._admitted: list[Admitted] = []
        self._columns: list[tuple[Int32Array, Int32Array, Int32Array]] = []
        self._logprobs: list[TokenLogprobs] = []
        self._finished: list[Finished] = []
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._vectors: list[Vector] = []
        self._num_held = 0

    def encode(self, body: msgspec.Struct) -> bytes:
        """Make the next frame."""
        return self._writer.encode(body)

    def acknowledge(self, num_frames: int) -> None:
        """The gateway has ``num_frames`` frames."""
        self._acknowledged = max(self._acknowledged, min(num_frames, self._writer.next_sequence))

    def hold_tokens(self, handles: Int32Array, indices: Int32Array, token_ids: Int32Array) -> None:
        """Add these tokens, shape ``[n]``, to the next ``Tokens``."""
        if len(handles):
            self._columns.append((handles, indices, token_ids))
            self._num_held += len(handles) + _TOKENS_WORTH_OF_A_PART

    def hold(
        self,
        admitted: tuple[Admitted, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        finished: tuple[Finished, ...] = (),
        prompt_logprobs: tuple[PromptLogprobs, ...] = (),
    ) -> None:
        """Add to the next ``Tokens``."""
        self._num_held += (len(logprobs) + len(finished) + len(admitted)) * _TOKENS_WORTH_OF_A_PART
        self._admitted += admitted
        self._logprobs += logprobs
        self._finished += finished
        for prompt in prompt_logprobs:
            self._prompt_logprobs.append(prompt)
            self._num_held += (
                prompt.values.num_positions * (1 + prompt.values.num_alternatives) + _TOKENS_WORTH_OF_A_PART
            )

    def hold_vector(self, vector: Vector) -> None:
        """Add it to the next ``Tokens``; the end of its sequence is held too before the next flush."""
        self._vectors.append(vector)
        self._num_held += len(vector.values) // FLOAT32.itemsize + _TOKENS_WORTH_OF_A_PART

    @property
    def is_overfull(self) -> bool:
        """Whether too many tokens are unacknowledged."""
        return self._num_held > MAX_HELD_TOKENS

    def flush(self) -> bytes | None:
        """Encode everything held, if there is credit."""
        if not (self._columns or self._admitted or self._finished or self._prompt_logprobs):
            return None
        if self._writer.next_sequence - self._acknowledged >= MAX_UNACKNOWLEDGED_FRAMES:
            return None
        columns = self._columns
        parts = columns[0] if len(columns) == 1 else [np.concatenate(part) for part in zip(*columns, strict=True)]
        message = Tokens(
            admitted=tuple(self._admitted),
            columns=encode_columns(parts),
            logprobs=tuple(self._logprobs),
            finished=tuple(self._finished),
            prompt_logprobs=tuple(self._prompt_logprobs),
        )
        if self._vectors:
            fields = {name: getattr(message, name) for name in Tokens.__struct_fields__}
            message = TokensAndVectors(**fields, vectors=tuple(self._vectors))
            self._vectors = []
        self._columns, self._admitted, self._logprobs, self._finished = [], [], [], []
        self._prompt_logprobs = []
        self._num_held = 0
        return self._writer.encode(message)


class IngressLinks:
    """Takes frames and the time (seconds, monotonic); fills ``outgoing`` with (peer, frame)."""

    def __init__(self, incarnation: int, submit_credits: int) -> None:
        self.incarnation = incarnation
        self.outgoing: list[tuple[bytes, bytes]] = []
        self.num_damaged_frames = 0
        self.other_version = ""
        """Why a peer that speaks another version was refused last; the owner empties it."""
        self._submit_credits = submit_credits
        self._reader = scheduler_frame_reader()
        self._links: dict[int, GatewayLink] = {}
        self._owner_of_peer: dict[bytes, int] = {}
        self._last_owner = 0
        self._first_epoch = incarnation % (1 << 30) + 1
        self._last_heartbeat = float("-inf")

    def __len__(self) -> int:
        return len(self._links)

    @property
    def next_deadline(self) -> float:
        """When to call ``tick``."""
        return self._last_heartbeat + HEARTBEAT_INTERVAL_S

    def get(self, owner: int) -> GatewayLink | None:
        """Find an open link."""
        return self._links.get(owner)

    def links(self) -> list[GatewayLink]:
        """Open links, oldest first."""
        return list(self._links.values())

    def receive(
        self, peer: bytes, data: bytes, now: float, announcement: Callable[[], Announcement]
    ) -> list[IngressEvent]:
        """Handle a frame; only hellos call ``announcement``."""
        link = self._links.get(self._owner_of_peer.get(peer, 0))
        try:
            frame = self._reader.decode(data)
        except FramingError as error:
            self.num_damaged_frames += 1
            if link is None and isinstance(error, OtherVersionError):
                self.other_version = str(error)
                self.outgoing.append((peer, VERSION_NOTICE))
            return self._drop(link, f"damaged frame: {error}") if link else []
        body = frame.body
        if isinstance(body, GatewayHello):
            return self._on_hello(peer, link, body, now, announcement)
        if link is None or frame.epoch != link.epoch:
            return []
        return self._on_numbered(link, frame, now)

    def tick(self, now: float, announcement: Callable[[], Announcement]) -> list[IngressEvent]:
        """Send due heartbeats; detect silence."""
        if now - self._last_heartbeat < HEARTBEAT_INTERVAL_S:
            return []
        self._last_heartbeat = now
        events: list[IngressEvent] = []
        for link in self.links():
            if now - link.heard_at > SILENCE_TIMEOUT_S:
                events += self._drop(link, f"silent for {now - link.heard_at:.1f} s")
            elif link.is_overfull:
                events += self._drop(link, f"{MAX_HELD_TOKENS} tokens unread")
        self.announce(announcement())
        return events

    def announce(self, announcement: Announcement) -> None:
        """Send the state to every gateway."""
        status = SchedulerStatus(
            announcement.model,
            announcement.state,
            announcement.num_steps,
            announcement.num_unfinished,
            announcement.load,
        )
        for link in self.links():
            self.send(link.owner, status)

    def unreachable(self, peer: bytes) -> list[IngressEvent]:
        """Handle a failed send."""
        link = self._links.get(self._owner_of_peer.get(peer, 0))
        return self._drop(link, "unreachable") if link else []

    def send(self, owner: int, body: msgspec.Struct) -> None:
        """Send a message, if the link is open."""
        link = self._links.get(owner)
        if link is not None:
            self.outgoing.append((link.peer, link.encode(body)))

    def flush(self) -> None:
        """Send all held messages."""
        for link in self._links.values():
            frame = link.flush()
            if frame is not None:
                self.outgoing.append((link.peer, frame))

    def _on_hello(
        self,
        peer: bytes,
        link: GatewayLink | None,
        hello: GatewayHello,
        now: float,
        announcement: Callable[[], Announcement],
    ) -> list[IngressEvent]:
        events: list[IngressEvent] = []
        if link is None:
            # A reconnected gateway is another peer.
            link = next((open_ for open_ in self.links() if open_.incarnation == hello.incarnation), None)
        if link is None and len(self._links) >= MAX_LINKS:
            return []
        if link is not None:
            same_life = hello.incarnation == link.incarnation
            if same_life and hello.link < link.number:
                return []
            is_repeated = same_life and hello.link == link.number and peer == link.peer
            if is_repeated and now - link.opened_at < REOPEN_INTERVAL_S:
                return []  # sent before our answer arrived
            events += self._drop(link, "the gateway opened another link")
        self._last_owner += 1
        owner = self._last_owner
        epoch = (self._first_epoch + owner) % (1 << 32)
        self._links[owner] = GatewayLink(peer, owner, hello, epoch, now)
        self._owner_of_peer[peer] = owner
        news = announcement()
        self.send(
            owner,
            SchedulerHello(
                incarnation=self.incarnation,
                gateway_incarnation=hello.incarnation,
                link=hello.link,
                submit_credits=self._submit_credits,
                model=news.model,
                state=news.state,
            ),
        )
        return events

    def _on_numbered(self, link: GatewayLink, frame: Frame, now: float) -> list[IngressEvent]:
        link.heard_at = now
        if frame.sequence < link.next_sequence:
            return []  # a duplicate
        if frame.sequence > link.next_sequence:
            return self._drop(link, f"frame {frame.sequence} arrived, {link.next_sequence} was expected")
        link.next_sequence += 1
        body = frame.body
        if isinstance(body, GatewayHeartbeat):
            link.acknowledge(body.received)
            return []
        assert isinstance(body, Submit | Abort | AdminCall)
        return [GatewayMessage(link.owner, body)]

    def _drop(self, link: GatewayLink, reason: str) -> list[IngressEvent]:
        del self._links[link.owner]
        del self._owner_of_peer[link.peer]
        return [GatewayGone(link.owner, reason)]
