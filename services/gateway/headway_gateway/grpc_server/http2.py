"""The server's side of one HTTP/2 connection (RFC 9113) as a plain object: bytes in, calls of ``Streams`` and bytes out.

Owns: what a frame does, windows, which stream is open. Must not know: sockets, time, what streams carry.

It does what gRPC needs of HTTP/2: no pushes, and priorities are read over. What a client sends on a stream that is over
is dropped, since it may have been on its way. A breach of the protocol raises ``BreachError``; ``take`` has then the frame
that tells the client.

What makes the server work for nothing (streams that are opened and reset, provoked resets, settings) spends an allowance. Pings,
window updates and priorities spend none: each costs as little as any frame, and gRPC's clients send a ping for each round trip.
"""

import enum
import struct
from collections.abc import Callable
from typing import Protocol

from hpack.exceptions import HPACKError

from headway_gateway.grpc_server.frames import FRAME_SIZE, BreachError, ErrorCode, FrameReader, Kind, pack_frame
from headway_gateway.grpc_server.header_blocks import HeaderBlocks, Headers

LARGEST_WINDOW = (1 << 31) - 1
MOST_HEADER_BYTES = 64 * 1024
"""Of the headers of one request, packed or not."""

_STREAM_WINDOW = 1 << 20
_CONNECTION_WINDOW = 4 << 20
_FIRST_WINDOW = 65_535
_LARGEST_FRAME_SIZE = (1 << 24) - 1
_MOST_CONTINUATIONS = 64
_ALLOWANCE = 1000
_COST_OF_SETTING = 10
"""In streams that end early: a setting goes through all streams."""

_UINT = struct.Struct(">I")
_SETTING = struct.Struct(">HI")

_END_STREAM = _ACK = 0x1
_END_HEADERS = 0x4
_PADDED = 0x8
_PRIORITY = 0x20


class Setting(enum.IntEnum):
    """Settings that count here."""

    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class Streams(Protocol):
    """What a connection tells of its streams."""

    def open_stream(self, stream_id: int, headers: Headers) -> None:
        """A request begins."""

    def take_data(self, stream_id: int, data: bytes, num_bytes: int) -> None:
        """Data came; ``num_bytes`` are to be acknowledged, now or later."""

    def end_stream(self, stream_id: int) -> None:
        """The request is complete."""

    def cancel_stream(self, stream_id: int) -> None:
        """The client gave up the stream, or broke its rules."""


class _Windows:
    """How much either side may still send: of a stream, or of the whole connection (RFC 9113, 5.2)."""

    __slots__ = ("_may_receive", "_num_acknowledged", "_size", "may_send")

    def __init__(self, *, may_send: int, may_receive: int) -> None:
        self.may_send = may_send
        self._size = self._may_receive = may_receive
        self._num_acknowledged = 0

    def receive(self, num_bytes: int) -> bool:
        """Return whether the client was allowed to send so much."""
        self._may_receive -= num_bytes
        return self._may_receive >= 0

    def acknowledge(self, num_bytes: int) -> int:
        """Return how much more the client should be told that it may send: 0 until it is much."""
        self._num_acknowledged += num_bytes
        if self._num_acknowledged * 2 < self._size:
            return 0
        more, self._num_acknowledged = self._num_acknowledged, 0
        self._may_receive += more
        return more

    def widen(self, more: int) -> bool:
        """Send so much more; return whether a window may be so large."""
        self.may_send += more
        return self.may_send <= LARGEST_WINDOW


class _Stream:
    __slots__ = ("has_ended", "windows")

    def __init__(self, may_send: int) -> None:
        self.windows = _Windows(may_send=may_send, may_receive=_STREAM_WINDOW)
        self.has_ended = False


class Http2:
    """See the module."""

    def __init__(self, streams: Streams, *, most_streams: int) -> None:
        """``most_streams`` may be open at a time; others are refused."""
        self._to = streams
        self._most_streams = most_streams
        self._header_blocks = HeaderBlocks(MOST_HEADER_BYTES)
        self._streams: dict[int, _Stream] = {}
        self._last_id = 0
        self._frames = FrameReader()
        self._out: list[bytes] = []
        self._block: tuple[int, int, list[bytes]] | None = None
        self._has_settings = False
        self._is_going_away = False
        self._windows = _Windows(may_send=_FIRST_WINDOW, may_receive=_CONNECTION_WINDOW)
        self._first_may_send = _FIRST_WINDOW
        self.renew_allowance()
        self._takers: tuple[Callable[[int, int, bytes], None], ...] = (
            self._take_data,
            self._take_headers,
            self._take_priority,
            self._take_reset,
            self._take_settings,
            self._take_push,
            self._take_ping,
            self._take_goaway,
            self._take_window,
            self._take_continuation,
        )
        settings = (
            (Setting.MAX_CONCURRENT_STREAMS, most_streams),
            (Setting.INITIAL_WINDOW_SIZE, _STREAM_WINDOW),
            (Setting.MAX_HEADER_LIST_SIZE, MOST_HEADER_BYTES),
        )
        self._send(Kind.SETTINGS, 0, 0, b"".join(_SETTING.pack(*setting) for setting in settings))
        self._send(Kind.WINDOW_UPDATE, 0, 0, _UINT.pack(_CONNECTION_WINDOW - _FIRST_WINDOW))

    # What the connection sends.

    @property
    def has_output(self) -> bool:
        """Whether anything is to be sent."""
        return bool(self._out)

    def take(self) -> bytes:
        """Return what is to be sent."""
        out, self._out = self._out, []
        return b"".join(out)

    def send_headers(self, stream_id: int, block: bytes, *, is_end: bool) -> None:
        """Send a block of headers; with ``is_end`` the answer is complete."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        flags = _END_STREAM if is_end else 0
        first, rest = block[:FRAME_SIZE], block[FRAME_SIZE:]
        self._send(Kind.HEADERS, flags | (0 if rest else _END_HEADERS), stream_id, first)
        while rest:
            first, rest = rest[:FRAME_SIZE], rest[FRAME_SIZE:]
            self._send(Kind.CONTINUATION, 0 if rest else _END_HEADERS, stream_id, first)
        if not is_end:
            return
        del self._streams[stream_id]
        if not stream.has_ended:  # it need not send what nobody reads
            self._send(Kind.RST_STREAM, 0, stream_id, _UINT.pack(ErrorCode.NO_ERROR))

    def send_data(self, stream_id: int, data: bytes | bytearray) -> int:
        """Send as much as the client's windows allow; return how much that is."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return len(data)
        num_sent = min(len(data), stream.windows.may_send, self._windows.may_send)
        if num_sent <= 0:
            return 0
        stream.windows.may_send -= num_sent
        self._windows.may_send -= num_sent
        for start in range(0, num_sent, FRAME_SIZE):
            self._send(Kind.DATA, 0, stream_id, bytes(data[start : min(num_sent, start + FRAME_SIZE)]))
        return num_sent

    def acknowledge(self, stream_id: int, num_bytes: int) -> None:
        """Let the client send so much more."""
        self._acknowledge(0, self._windows, num_bytes)
        stream = self._streams.get(stream_id)
        if stream is not None and not stream.has_ended:
            self._acknowledge(stream_id, stream.windows, num_bytes)

    def _acknowledge(self, stream_id: int, windows: _Windows, num_bytes: int) -> None:
        more = windows.acknowledge(num_bytes)
        if more:
            self._send(Kind.WINDOW_UPDATE, 0, stream_id, _UINT.pack(more))

    def ping(self) -> None:
        """Ask for a sign of life; any frame is one."""
        self._send(Kind.PING, 0, 0, bytes(8))

    def go_away(self) -> None:
        """Ask the client to open no more streams; those that it opens are refused."""
        self._is_going_away = True
        self._send(Kind.GOAWAY, 0, 0, _UINT.pack(LARGEST_WINDOW) + _UINT.pack(ErrorCode.NO_ERROR))

    def _send(self, kind: Kind, flags: int, stream_id: int, payload: bytes) -> None:
        self._out.append(pack_frame(kind, flags, stream_id, payload))

    # What the connection receives.

    def receive(self, data: bytes) -> None:
        """Take bytes.

        Raises:
            BreachError: nothing more may be received.
        """
        try:
            for kind, flags, stream_id, payload in self._frames.read(data):
                self._take(kind, flags, stream_id, payload)
        except BreachError as breach:
            payload = _UINT.pack(self._last_id) + _UINT.pack(breach.code) + str(breach).encode("ascii")
            self._send(Kind.GOAWAY, 0, 0, payload)
            raise

    def renew_allowance(self) -> None:
        """Let the client end streams early and send settings again: so much as no honest client does in a second."""
        self._allowance = self._most_streams + _ALLOWANCE

    def _spend(self, cost: int) -> None:
        self._allowance -= cost
        if self._allowance < 0:
            raise BreachError(ErrorCode.ENHANCE_YOUR_CALM, "too many resets or settings")

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is not None and (kind != Kind.CONTINUATION or stream_id != self._block[0]):
            raise BreachError(ErrorCode.PROTOCOL_ERROR, "a block of headers is not complete")
        if not self._has_settings:
            if kind != Kind.SETTINGS or flags & _ACK:
                raise BreachError(ErrorCode.PROTOCOL_ERROR, "settings must come first")
            self._has_settings = True
        if kind < len(self._takers):  # others are of extensions
            self._takers[kind](flags, stream_id, payload)

    def _take_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        if not self._windows.receive(size):
            raise BreachError(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window is exceeded")
        data = _without_padding(payload) if flags & _PADDED else payload
        stream = self._open_stream(stream_id)
        if stream is None or stream.has_ended:
            self.acknowledge(stream_id, size)
            if stream is not None:
                self._break_off(stream_id, ErrorCode.STREAM_CLOSED)
            return
        if not stream.windows.receive(size):
            self.acknowledge(stream_id, size)
            self._break_off(stream_id, ErrorCode.FLOW_CONTROL_ERROR)
            return
        self._to.take_data(stream_id, data, size)
        if flags & _END_STREAM:
            self._end(stream_id)

    def _take_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id % 2 == 0:
            raise BreachError(ErrorCode.PROTOCOL_ERROR, "a client's streams have odd numbers")
        if flags & _PADDED:
            payload = _without_padding(payload)
        if flags & _PRIORITY:
            if len(payload) < 5:
                raise BreachError(ErrorCode.FRAME_SIZE_ERROR, "a priority has 5 bytes")
            payload = payload[5:]
        if flags & _END_HEADERS:
            self._take_block(stream_id, flags, payload)
        else:
            self._block = (stream_id, flags, [payload])

    def _take_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is None:
            raise BreachError(ErrorCode.PROTOCOL_ERROR, "a continuation continues nothing")
        _, first_flags, parts = self._block
        parts.append(payload)
        if len(parts) > _MOST_CONTINUATIONS or sum(map(len, parts)) > MOST_HEADER_BYTES:
            raise BreachError(ErrorCode.ENHANCE_YOUR_CALM, "a block of headers is too large")
        if flags & _END_HEADERS:
            self._block = None
            self._take_block(stream_id, first_flags, b"".join(parts))

    def _take_block(self, stream_id: int, flags: int, block: bytes) -> None:
        try:
            headers: Headers = self._header_blocks.read(block)
        except HPACKError as error:
            raise BreachError(ErrorCode.COMPRESSION_ERROR, "a block of headers cannot be read") from error
        if stream_id > self._last_id:
            self._last_id = stream_id
            if self._is_going_away or len(self._streams) >= self._most_streams:
                self._send(Kind.RST_STREAM, 0, stream_id, _UINT.pack(ErrorCode.REFUSED_STREAM))
                self._spend(1)
                return
            self._streams[stream_id] = _Stream(self._first_may_send)
            self._to.open_stream(stream_id, headers)
        elif (stream := self._streams.get(stream_id)) is None:
            return
        elif stream.has_ended or not flags & _END_STREAM:
            code = ErrorCode.STREAM_CLOSED if stream.has_ended else ErrorCode.PROTOCOL_ERROR
            self._break_off(stream_id, code)
            return
        if flags & _END_STREAM:
            self._end(stream_id)

    def _take_priority(self, flags: int, stream_id: int, payload: bytes) -> None:  # noqa: ARG002
        if stream_id == 0:
            raise BreachError(ErrorCode.PROTOCOL_ERROR, "a priority is a stream's")
        if len(payload) != 5:
            raise BreachError(ErrorCode.FRAME_SIZE_ERROR, "a priority has 5 bytes")

    def _take_reset(self, flags: int, stream_id: int, payload: bytes) -> None:  # noqa: ARG002
        if len(payload) != _UINT.size:
            raise BreachError(ErrorCode.FRAME_SIZE_ERROR, "a reset has 4 bytes")
        if self._open_stream(stream_id) is not None:
            del self._streams[stream_id]
            self._to.cancel_stream(stream_id)
            self._spend(1)

    def _take_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise BreachError(ErrorCode.PROTOCOL_ERROR, "settings are the connection's")
        if len(payload) % _SETTING.size or (flags & _ACK and payload):
            raise BreachError(ErrorCode.FRAME_SIZE_ERROR, "a setting has 6 bytes")
        if flags & _ACK:
            return
        self._spend(_COST_OF_SETTING * (1 + len(payload) // _SETTING.size))
        for setting, value in _SETTING.iter_unpack(payload):
            self._set(setting, value)
        self._send(Kind.SETTINGS, _ACK, 0, b"")

    def _set(self, setting: int, value: int) -> None:
        if setting == Setting.INITIAL_WINDOW_SIZE:
            if value > LARGEST_WINDOW:
                raise BreachError(ErrorCode.FLOW_CONTROL_ERROR, "a window is too large")
            more, self._first_may_send = value - self._first_may_send, value
            for stream in self._streams.values():
                if not stream.windows.widen(more):
                    raise BreachError(ErrorCode.FLOW_CONTROL_ERROR, "a window is too large")
        elif setting == Setting.MAX_FRAME_SIZE:
            if not FRAME_SIZE <= value <= _LARGEST_FRAME_SIZE:
                raise BreachError(ErrorCode.PROTOCOL_ERROR, "a frame size is not allowed")
        elif setting == Setting.ENABLE_PUSH and value > 1:
            raise BreachError(ErrorCode.PROTOCOL_ERROR, "a setting is not allowed")

    def _take_push(self, flags: int, stream_id: int, payload: bytes) -> None:  # noqa: ARG002
        raise BreachError(ErrorCode.PROTOCOL_ERROR, "a client does not push")

    def _take_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise BreachError(ErrorCode.PROTOCOL_ERROR, "a ping is the connection's")
        if len(payload) != 8:
            raise BreachError(ErrorCode.FRAME_SIZE_ERROR, "a ping has 8 bytes")
        if not flags & _ACK:
            self._send(Kind.PING, _ACK, 0, payload)

    def _take_goaway(self, flags: int, stream_id: int, payload: bytes) -> None:  # noqa: ARG002
        if stream_id:
            raise BreachError(ErrorCode.PROTOCOL_ERROR, "a goaway is the connection's")
        # The client will close the connection when its streams are over.

    def _take_window(self, flags: int, stream_id: int, payload: bytes) -> None:  # noqa: ARG002
        if len(payload) != _UINT.size:
            raise BreachError(ErrorCode.FRAME_SIZE_ERROR, "a window update has 4 bytes")
        more = _UINT.unpack(payload)[0] & LARGEST_WINDOW
        if stream_id == 0:
            if not self._windows.widen(more) or not more:
                raise BreachError(*_bad_window(more))
            return
        stream = self._open_stream(stream_id)
        if stream is None:
            return
        if not stream.windows.widen(more) or not more:
            self._break_off(stream_id, _bad_window(more)[0])

    def _open_stream(self, stream_id: int) -> _Stream | None:
        """Return the stream, or None if it is over."""
        if stream_id == 0 or stream_id > self._last_id:
            raise BreachError(ErrorCode.PROTOCOL_ERROR, "a stream has not begun")
        return self._streams.get(stream_id)

    def _end(self, stream_id: int) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None:  # an answer that came first has ended it
            stream.has_ended = True
            self._to.end_stream(stream_id)

    def _break_off(self, stream_id: int, code: ErrorCode) -> None:
        del self._streams[stream_id]
        self._send(Kind.RST_STREAM, 0, stream_id, _UINT.pack(code))
        self._to.cancel_stream(stream_id)
        self._spend(1)


def _bad_window(more: int) -> tuple[ErrorCode, str]:
    if more:
        return ErrorCode.FLOW_CONTROL_ERROR, "a window is too large"
    return ErrorCode.PROTOCOL_ERROR, "a window update is 0"


def _without_padding(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise BreachError(ErrorCode.PROTOCOL_ERROR, "there is more padding than payload")
    return payload[1 : len(payload) - payload[0]]
