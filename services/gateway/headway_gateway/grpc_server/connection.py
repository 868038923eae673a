"""One client's connection: HTTP/2 over a transport, with bounds.

Owns: answers that wait for the client, keepalive, when a connection ends. Must not know: what a stream carries.

What streams send within one turn of the event loop leaves in one write. While the client does not read, nothing is read from
it either, so that it cannot make answers pile up.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

from headway_gateway.grpc_server.frames import BreachError
from headway_gateway.grpc_server.header_blocks import Headers
from headway_gateway.grpc_server.http2 import Http2

MOST_WAITING_BYTES = 64 * 1024
"""Of one stream; who sends more waits."""

_MOST_UNSENT_BYTES = 256 * 1024
_KEEPALIVE_S = 5.0
_KEEPALIVE_TIMEOUT_S = 2.0
_ALLOWANCE_S = 1.0


class Bounds(NamedTuple):
    """``most_streams`` are open at a time; a client may leave what it gets unread for ``most_unread_s`` seconds, and take
    about ``most_request_s`` for the first message of a call.
    """

    most_streams: int
    most_unread_s: float
    most_request_s: float


class Receiver(Protocol):
    """Takes what a client sends on one stream."""

    def receive(self, data: bytes, num_bytes: int) -> None:
        """Take data; ``num_bytes`` are to be acknowledged to the stream, then or later."""

    def end(self) -> None:
        """The client sends nothing more."""

    def cancel(self) -> None:
        """The client, or the connection, is gone."""

    def end_unless_begun(self) -> None:
        """The first message should be there by now."""


class Stream:
    """The answer's half of a stream. What the client's windows do not allow yet waits here."""

    __slots__ = ("_connection", "_is_open", "_room", "_trailers", "_waiting", "id", "opened_at", "receiver")

    def __init__(self, connection: "Connection", stream_id: int, opened_at: float) -> None:
        self.id = stream_id
        self.opened_at = opened_at
        self.receiver: Receiver | None = None
        self._connection = connection
        self._is_open = True
        self._waiting = bytearray()
        self._trailers: bytes | None = None
        self._room: asyncio.Future[None] | None = None

    @property
    def peer(self) -> str:
        """Name the connection."""
        return self._connection.peer

    @property
    def has_room(self) -> bool:
        """Whether more may be sent now."""
        return not self._is_open or (len(self._waiting) <= MOST_WAITING_BYTES and not self._connection.is_stuck)

    async def until_room(self) -> None:
        """Return when more may be sent, or when the stream is over."""
        while not self.has_room:
            self._room = asyncio.get_running_loop().create_future()
            self._connection.remember_waiting(self)
            try:
                await self._room
            finally:
                self._room = None

    def acknowledge(self, num_bytes: int) -> None:
        """Let the client send so much more."""
        if self._is_open:
            self._connection.acknowledge(self.id, num_bytes)

    def send_head(self, block: bytes) -> None:
        """Send the head of the answer."""
        if self._is_open:
            self._connection.send_headers(self.id, block, is_end=False)

    def send(self, data: bytes) -> None:
        """Send bytes, or keep them until they may be sent."""
        if not self._is_open:
            return
        num_sent = 0 if self._waiting else self._connection.send_data(self.id, data)
        if num_sent < len(data):
            self._waiting += data[num_sent:]
            self._connection.remember_waiting(self)

    def finish(self, trailers: bytes) -> None:
        """End the answer behind everything that was sent."""
        if not self._is_open:
            return
        if self._waiting:
            self._trailers = trailers
            return
        self._connection.send_headers(self.id, trailers, is_end=True)
        self._connection.forget(self)

    def send_waiting(self) -> bool:
        """Send what has become possible; return whether something still waits for more."""
        if self._waiting:
            del self._waiting[: self._connection.send_data(self.id, self._waiting)]
        if not self._waiting and self._trailers is not None:
            self.finish(self._trailers)
        self._tell_room()
        return bool(self._waiting) or not self.has_room

    def close(self) -> None:
        """Send nothing more."""
        self._is_open = False
        self._waiting.clear()
        self._tell_room()

    def _tell_room(self) -> None:
        if self._room is not None and not self._room.done() and self.has_room:
            self._room.set_result(None)


class Connection(asyncio.Protocol):
    """See the module."""

    def __init__(
        self, opened: Callable[[Stream, Headers], Receiver | None], bounds: Bounds, register: "set[Connection]"
    ) -> None:
        """``opened`` is told of each new stream, and may end it; ``register`` holds the connections that are open."""
        self._opened = opened
        self._bounds = bounds
        self._register = register
        self._http2 = Http2(self, most_streams=bounds.most_streams)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._streams: dict[int, Stream] = {}
        self._waiting: dict[int, Stream] = {}
        self._will_flush = False
        self._num_unsent = 0
        self._heard_at = 0.0
        self._allowed_at = 0.0
        self._has_pinged = False
        self._keepalive: asyncio.TimerHandle | None = None
        self._patience: asyncio.TimerHandle | None = None
        self.is_stuck = False
        """Whether the client leaves so much unread that nothing more is sent."""
        self.peer = ""

    @property
    def is_sending(self) -> bool:
        """Whether something waits for the client to read."""
        has_output = self._waiting or self._http2.has_output
        return self._transport is not None and bool(has_output or self._transport.get_write_buffer_size())

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # noqa: D102  # asyncio's own gives no less
        self._transport = transport
        self.peer = _name_of(transport.get_extra_info("peername"))
        self._register.add(self)
        transport.set_write_buffer_limits(high=_MOST_UNSENT_BYTES)
        self._flush()
        self._heard_at = self._loop.time()
        self._keep_alive()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002, D102 (asyncio describes it)
        self._register.discard(self)
        self._transport = None
        for timer in (self._keepalive, self._patience):
            if timer is not None:
                timer.cancel()
        for stream in list(self._streams.values()):
            self._cancel(stream)

    def data_received(self, data: bytes) -> None:  # noqa: D102 (asyncio describes it)
        self._heard_at = self._loop.time()
        self._has_pinged = False
        if self._heard_at - self._allowed_at >= _ALLOWANCE_S:
            self._allowed_at = self._heard_at
            self._http2.renew_allowance()
        try:
            self._http2.receive(data)
        except BreachError:
            self.close()
            return
        if self._waiting:
            self._send_waiting()
        self._flush_soon()

    def pause_writing(self) -> None:  # noqa: D102 (asyncio describes it)
        self.is_stuck = True
        self._patience = self._loop.call_later(self._bounds.most_unread_s, self.abort)
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:  # noqa: D102 (asyncio describes it)
        self.is_stuck = False
        self._heard_at = self._loop.time()
        if self._patience is not None:
            self._patience.cancel()
        if self._transport is not None:
            self._transport.resume_reading()
        self._send_waiting()

    def go_away(self) -> None:
        """Ask the client to open no more streams here."""
        self._http2.go_away()
        self._flush()

    def close(self) -> None:
        """Close the connection behind what was sent."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def acknowledge(self, stream_id: int, num_bytes: int) -> None:
        """Let the client send so much more on a stream."""
        self._http2.acknowledge(stream_id, num_bytes)
        self._flush_soon()

    def send_headers(self, stream_id: int, block: bytes, *, is_end: bool) -> None:
        """Send the head of an answer, or the trailers that end it."""
        self._http2.send_headers(stream_id, block, is_end=is_end)
        self._flush_soon()

    def send_data(self, stream_id: int, data: bytes | bytearray) -> int:
        """Send as much as the client takes now; return how much that is."""
        if self.is_stuck:
            return 0
        num_sent = self._http2.send_data(stream_id, data)
        self._num_unsent += num_sent
        if self._num_unsent > _MOST_UNSENT_BYTES:
            self._flush()  # a handler may send for long without giving the loop a turn
        else:
            self._flush_soon()
        return num_sent

    def remember_waiting(self, stream: Stream) -> None:
        """Let the stream send when more is possible."""
        self._waiting[stream.id] = stream

    def forget(self, stream: Stream) -> None:
        """The stream is over."""
        self._streams.pop(stream.id, None)
        self._waiting.pop(stream.id, None)
        stream.close()

    def open_stream(self, stream_id: int, headers: Headers) -> None:
        """See ``Streams``."""
        stream = self._streams[stream_id] = Stream(self, stream_id, self._heard_at)
        stream.receiver = self._opened(stream, headers)

    def take_data(self, stream_id: int, data: bytes, num_bytes: int) -> None:
        """See ``Streams``."""
        receiver = self._streams[stream_id].receiver
        assert receiver is not None, "a stream without one has ended"
        receiver.receive(data, num_bytes)

    def end_stream(self, stream_id: int) -> None:
        """See ``Streams``."""
        receiver = self._streams[stream_id].receiver
        assert receiver is not None, "a stream without one has ended"
        receiver.end()

    def cancel_stream(self, stream_id: int) -> None:
        """See ``Streams``."""
        self._cancel(self._streams[stream_id])

    def _cancel(self, stream: Stream) -> None:
        self.forget(stream)
        if stream.receiver is not None:
            stream.receiver.cancel()

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for stream in waiting.values():
            if stream.send_waiting():
                self.remember_waiting(stream)

    def _flush_soon(self) -> None:
        if not self._will_flush and self._http2.has_output:
            self._will_flush = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._will_flush = False
        self._num_unsent = 0
        data = self._http2.take()
        if data and self._transport is not None:
            self._transport.write(data)

    def _keep_alive(self) -> None:
        now = self._loop.time()
        self._end_slow_requests(now - self._bounds.most_request_s)
        wait_s = self._heard_at + _KEEPALIVE_S - now
        if self._has_pinged:
            self.abort()
            return
        if self.is_stuck:
            wait_s = _KEEPALIVE_S  # what it sends is not read
        elif wait_s <= 0:
            self._has_pinged, wait_s = True, _KEEPALIVE_TIMEOUT_S
            self._http2.ping()
            self._flush()
        self._keepalive = self._loop.call_later(wait_s, self._keep_alive)

    def _end_slow_requests(self, opened_before: float) -> None:
        for stream in list(self._streams.values()):
            if stream.opened_at > opened_before:
                return  # the others came later
            if stream.receiver is not None:
                stream.receiver.end_unless_begun()


def _name_of(address: object) -> str:
    """Name a peer as gRPC does."""
    if not isinstance(address, tuple):
        return "unknown"
    host, port = address[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
