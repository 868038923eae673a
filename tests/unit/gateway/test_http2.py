"""The server's HTTP/2 against another's client (h2), and against clients that break the protocol."""

import struct
from collections.abc import Callable

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    PingAckReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)
from h2.settings import SettingCodes
from hpack import Encoder

from headway_gateway.grpc_server.frames import PREFACE, BreachError, ErrorCode, Kind
from headway_gateway.grpc_server.header_blocks import Headers, pack_headers
from headway_gateway.grpc_server.http2 import Http2

REQUEST = [(":method", "POST"), (":scheme", "http"), (":path", "/a/B"), (":authority", "x"), ("te", "trailers")]
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
HEAD = pack_headers(((b":status", b"200"), (b"a", b"b")))
TRAILERS = pack_headers(((b"grpc-status", b"0"),))


class Told:
    """What a connection tells of its streams; data is acknowledged at once."""

    def __init__(self, most_streams: int = 100) -> None:
        self.http2 = Http2(self, most_streams=most_streams)
        self.headers: dict[int, Headers] = {}
        self.data: dict[int, bytes] = {}
        self.ended: list[int] = []
        self.cancelled: list[int] = []
        self.acknowledges = True

    def open_stream(self, stream_id: int, headers: Headers) -> None:
        self.headers[stream_id] = headers
        self.data[stream_id] = b""

    def take_data(self, stream_id: int, data: bytes, num_bytes: int) -> None:
        self.data[stream_id] += data
        if self.acknowledges:
            self.http2.acknowledge(stream_id, num_bytes)

    def end_stream(self, stream_id: int) -> None:
        self.ended.append(stream_id)

    def cancel_stream(self, stream_id: int) -> None:
        self.cancelled.append(stream_id)


class Pair:
    """A server and h2's client of it, without a wire."""

    def __init__(self, most_streams: int = 100) -> None:
        self.told = Told(most_streams)
        self.server = self.told.http2
        self.client = H2Connection(H2Configuration(header_encoding="utf-8", validate_outbound_headers=False))
        self.client.initiate_connection()
        self.events: list[Event] = []
        self.exchange()

    def exchange(self, step: int = 1 << 30) -> list[Event]:
        """Carry everything, in pieces of ``step`` bytes; return what is new to the client."""
        before = len(self.events)
        while True:
            up, down = self.client.data_to_send(), self.server.take()
            if not up and not down:
                return self.events[before:]
            for place in range(0, len(up), step):
                self.server.receive(up[place : place + step])
            if down:
                self.events += self.client.receive_data(down)

    def open(self, *, is_end: bool = False) -> int:
        stream_id = self.client.get_next_available_stream_id()
        self.client.send_headers(stream_id, REQUEST, end_stream=is_end)
        return stream_id


def of(events: list[Event], kind: type[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, kind)]


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_call(step: int) -> None:
    pair = Pair()
    stream = pair.open()
    pair.client.send_data(stream, b"question", end_stream=True)
    pair.exchange(step)
    assert pair.told.headers[stream] == [(name.encode(), value.encode()) for name, value in REQUEST]
    assert pair.told.data[stream] == b"question"
    assert pair.told.ended == [stream]
    pair.server.send_headers(stream, HEAD, is_end=False)
    assert pair.server.send_data(stream, b"answer") == 6
    pair.server.send_headers(stream, TRAILERS, is_end=True)
    response, data, trailers, end = pair.exchange()
    assert isinstance(response, ResponseReceived)
    assert dict(response.headers) == {":status": "200", "a": "b"}
    assert isinstance(data, DataReceived)
    assert data.data == b"answer"
    assert isinstance(trailers, TrailersReceived)
    assert dict(trailers.headers) == {"grpc-status": "0"}
    assert isinstance(end, StreamEnded)
    assert pair.told.cancelled == []


def test_many_streams_with_headers_that_the_client_remembers() -> None:
    pair = Pair()
    streams = [pair.open(is_end=True) for _ in range(50)]
    pair.exchange()
    assert pair.told.ended == streams
    assert all(headers == pair.told.headers[1] for headers in pair.told.headers.values())


def test_headers_and_trailers_larger_than_a_frame() -> None:
    pair = Pair()
    stream = pair.client.get_next_available_stream_id()
    pair.client.send_headers(stream, [*REQUEST, ("long", "x" * 40_000)])
    pair.client.send_headers(stream, [("trailer", "of a request")], end_stream=True)
    pair.exchange()
    assert dict(pair.told.headers[stream])[b"long"] == b"x" * 40_000
    assert pair.told.ended == [stream]
    pair.server.send_headers(stream, HEAD, is_end=False)
    pair.server.send_headers(stream, pack_headers(((b"long", b"y" * 40_000),)), is_end=True)
    trailers = of(pair.exchange(), TrailersReceived)
    assert dict(trailers[0].headers) == {"long": "y" * 40_000}


def test_the_clients_windows_bound_what_is_sent() -> None:
    pair = Pair()
    pair.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1000})
    one, two = pair.open(is_end=True), pair.open(is_end=True)
    pair.exchange()
    for stream in (one, two):
        pair.server.send_headers(stream, HEAD, is_end=False)
        assert pair.server.send_data(stream, b"x" * 1500) == 1000
        assert pair.server.send_data(stream, b"x") == 0
    pair.client.increment_flow_control_window(300, one)
    pair.exchange()
    assert pair.server.send_data(one, b"x" * 500) == 300
    pair.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 200_000})
    pair.exchange()
    left_of_the_connection = 65_535 - 2300
    assert pair.server.send_data(two, b"x" * 100_000) == left_of_the_connection
    assert pair.server.send_data(one, b"x") == 0
    pair.client.increment_flow_control_window(10)
    pair.exchange()
    assert pair.server.send_data(one, b"x" * 100) == 10
    pair.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 10})  # below what was sent
    pair.client.increment_flow_control_window(1000)
    pair.exchange()
    assert pair.server.send_data(two, b"x") == 0


def test_large_requests_pass_and_what_is_not_acknowledged_does_not() -> None:
    pair = Pair()
    stream = pair.open()
    pair.exchange()
    sent = 0
    while sent < 3_000_000:
        size = min(pair.client.local_flow_control_window(stream), 16_384)
        assert size > 0
        pair.client.send_data(stream, bytes(size))
        sent += size
        pair.exchange()
    assert len(pair.told.data[stream]) == sent
    assert of(pair.events, WindowUpdated)
    pair.told.acknowledges = False
    while pair.client.local_flow_control_window(stream):
        pair.client.send_data(stream, bytes(min(pair.client.local_flow_control_window(stream), 16_384)))
    before = len(pair.told.data[stream])
    pair.exchange()
    assert len(pair.told.data[stream]) - before <= 1 << 20
    assert pair.client.local_flow_control_window(stream) == 0
    pair.server.acknowledge(stream, len(pair.told.data[stream]) - before)
    pair.exchange()
    assert pair.client.local_flow_control_window(stream) > 0


def test_padding_counts_and_is_no_data() -> None:
    pair = Pair()
    stream = pair.open()
    pair.client.send_data(stream, b"padded", pad_length=200, end_stream=True)
    pair.exchange()
    assert pair.told.data[stream] == b"padded"


def test_the_client_gives_up() -> None:
    pair = Pair()
    stream = pair.open()
    pair.exchange()
    pair.client.reset_stream(stream)
    pair.exchange()
    assert pair.told.cancelled == [stream]
    pair.server.send_headers(stream, HEAD, is_end=False)
    assert pair.server.send_data(stream, b"late") == 4, "as if it were sent: nobody waits for it"
    assert pair.server.take() == b""


def test_an_answer_before_the_request_is_complete() -> None:
    pair = Pair()
    stream = pair.open()
    pair.exchange()
    pair.server.send_headers(stream, HEAD + TRAILERS, is_end=True)
    pair.client.send_data(stream, b"on its way")
    events = pair.exchange()
    assert of(events, ResponseReceived)
    assert [event.error_code for event in of(events, StreamReset)] == [ErrorCodes.NO_ERROR]
    assert pair.told.data[stream] == b""
    assert pair.told.cancelled == pair.told.ended == []


def test_streams_beyond_the_limit_are_refused() -> None:
    told = Told(most_streams=2)
    encoder = Encoder()
    told.http2.receive(PREFACE + SETTINGS)
    for stream in (1, 3, 5):
        told.http2.receive(frame(Kind.HEADERS, 4, stream, encoder.encode(REQUEST)))
    assert list(told.headers) == [1, 3]
    assert told.http2.take().endswith(frame(Kind.RST_STREAM, 0, 5, struct.pack(">I", ErrorCode.REFUSED_STREAM)))
    told.http2.receive(frame(Kind.RST_STREAM, 0, 1, bytes(4)) + frame(Kind.HEADERS, 4, 7, encoder.encode(REQUEST)))
    assert list(told.headers) == [1, 3, 7]


def test_going_away() -> None:
    pair = Pair()
    stream = pair.open(is_end=True)
    pair.exchange()
    pair.server.go_away()
    late = pair.open(is_end=True)
    pair.server.receive(pair.client.data_to_send())
    pair.server.send_headers(stream, HEAD + TRAILERS, is_end=True)
    goaway, reset, answer = frames(pair.server.take())
    assert goaway == (Kind.GOAWAY, 0, 0, b"\x7f\xff\xff\xff" + bytes(4))
    assert reset == (Kind.RST_STREAM, 0, late, struct.pack(">I", ErrorCode.REFUSED_STREAM))
    assert answer[:3] == (Kind.HEADERS, 5, stream), "what was open is answered"
    assert late not in pair.told.headers


def test_pings() -> None:
    pair = Pair()
    pair.client.ping(b"12345678")
    assert of(pair.exchange(), PingAckReceived)[0].ping_data == b"12345678"
    pair.server.ping()
    pair.exchange()


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def frames(data: bytes) -> list[tuple[int, int, int, bytes]]:
    found = []
    while data:
        length = int.from_bytes(data[:3])
        found.append((data[3], data[4], int.from_bytes(data[5:9]), data[9 : 9 + length]))
        data = data[9 + length :]
    return found


def headers(stream: int, flags: int = 4) -> bytes:
    return frame(Kind.HEADERS, flags, stream, Encoder().encode(REQUEST))


BREACHES = {
    "no preface": (b"GET / HTTP/1.1\r\n\r\n", ErrorCode.PROTOCOL_ERROR),
    "no settings": (PREFACE + headers(1), ErrorCode.PROTOCOL_ERROR),
    "a large frame": (frame(Kind.DATA, 0, 1, bytes(16_385))[:9], ErrorCode.FRAME_SIZE_ERROR),
    "data on the connection": (frame(Kind.DATA, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
    "data before headers": (frame(Kind.DATA, 0, 1, b"x"), ErrorCode.PROTOCOL_ERROR),
    "a stream of the server's": (headers(2), ErrorCode.PROTOCOL_ERROR),
    "headers on the connection": (headers(0), ErrorCode.PROTOCOL_ERROR),
    "headers that cannot be read": (frame(Kind.HEADERS, 4, 1, b"\xff" * 20), ErrorCode.COMPRESSION_ERROR),
    "headers that unpack to much": (
        frame(Kind.HEADERS, 4, 1, b"\x40\x01a\x7f\x81\x1f" + b"x" * 4096 + b"\xbe" * 1000),
        ErrorCode.COMPRESSION_ERROR,
    ),
    "no continuation": (headers(1, 0) + headers(1), ErrorCode.PROTOCOL_ERROR),
    "a continuation of nothing": (frame(Kind.CONTINUATION, 4, 1, b""), ErrorCode.PROTOCOL_ERROR),
    "continuations without end": (
        headers(1, 0) + frame(Kind.CONTINUATION, 0, 1, b"") * 64, ErrorCode.ENHANCE_YOUR_CALM
    ),
    "large continuations": (
        headers(1, 0) + frame(Kind.CONTINUATION, 0, 1, bytes(16_384)) * 4, ErrorCode.ENHANCE_YOUR_CALM
    ),
    "padding alone": (frame(Kind.HEADERS, 0xC, 1, b"\x05abc"), ErrorCode.PROTOCOL_ERROR),
    "no room for padding": (headers(1) + frame(Kind.DATA, 8, 1, b""), ErrorCode.PROTOCOL_ERROR),
    "half a priority": (frame(Kind.HEADERS, 0x24, 1, b"abc"), ErrorCode.FRAME_SIZE_ERROR),
    "a short priority": (frame(Kind.PRIORITY, 0, 1, b"abc"), ErrorCode.FRAME_SIZE_ERROR),
    "a priority of nothing": (frame(Kind.PRIORITY, 0, 0, bytes(5)), ErrorCode.PROTOCOL_ERROR),
    "a short reset": (headers(1) + frame(Kind.RST_STREAM, 0, 1, b"abc"), ErrorCode.FRAME_SIZE_ERROR),
    "a reset before headers": (frame(Kind.RST_STREAM, 0, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "settings of a stream": (frame(Kind.SETTINGS, 0, 1, b""), ErrorCode.PROTOCOL_ERROR),
    "half a setting": (frame(Kind.SETTINGS, 0, 0, b"abc"), ErrorCode.FRAME_SIZE_ERROR),
    "an acknowledgement with settings": (frame(Kind.SETTINGS, 1, 0, bytes(6)), ErrorCode.FRAME_SIZE_ERROR),
    "a large window": (frame(Kind.SETTINGS, 0, 0, b"\0\4\x80\0\0\0"), ErrorCode.FLOW_CONTROL_ERROR),
    "a small frame size": (frame(Kind.SETTINGS, 0, 0, b"\0\5\0\0\0\1"), ErrorCode.PROTOCOL_ERROR),
    "a push setting": (frame(Kind.SETTINGS, 0, 0, b"\0\2\0\0\0\2"), ErrorCode.PROTOCOL_ERROR),
    "a push": (frame(Kind.PUSH_PROMISE, 4, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "a short ping": (frame(Kind.PING, 0, 0, b"abc"), ErrorCode.FRAME_SIZE_ERROR),
    "a ping of a stream": (frame(Kind.PING, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    "a goaway of a stream": (frame(Kind.GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    "a short window update": (frame(Kind.WINDOW_UPDATE, 0, 0, b"abc"), ErrorCode.FRAME_SIZE_ERROR),
    "a window update of 0": (frame(Kind.WINDOW_UPDATE, 0, 0, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "a window that overflows": (frame(Kind.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), ErrorCode.FLOW_CONTROL_ERROR),
    "a window update before headers": (frame(Kind.WINDOW_UPDATE, 0, 1, b"\0\0\0\1"), ErrorCode.PROTOCOL_ERROR),
    "a stream's window that overflows by settings": (
        headers(1) + frame(Kind.WINDOW_UPDATE, 0, 1, b"\x7f\xff\0\0") + frame(Kind.SETTINGS, 0, 0, b"\0\4\x7f\xff\xff\xff"),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BREACHES)
def test_a_breach_ends_the_connection_with_its_reason(name: str) -> None:
    data, code = BREACHES[name]
    told = Told()
    if not name.startswith("no pre") and not name.startswith("no set"):
        told.http2.receive(PREFACE + SETTINGS)
    told.http2.take()
    with pytest.raises(BreachError) as breach:
        told.http2.receive(data)
    assert breach.value.code is code
    *_, (kind, _, _, payload) = frames(told.http2.take())
    assert kind == Kind.GOAWAY
    assert struct.unpack_from(">I", payload, 4)[0] == code


def streams_breach(data: bytes) -> tuple[Told, bytes]:
    """What is answered to data behind an open and a complete request, streams 1 and 3."""
    told = Told()
    told.http2.receive(PREFACE + SETTINGS + headers(1) + headers(3, 5))
    told.http2.take()
    told.http2.receive(data)
    return told, told.http2.take()


@pytest.mark.parametrize(
    ("data", "stream", "code"),
    [
        (frame(Kind.DATA, 0, 3, b"more"), 3, ErrorCode.STREAM_CLOSED),
        (headers(3, 5), 3, ErrorCode.STREAM_CLOSED),
        (headers(1, 4), 1, ErrorCode.PROTOCOL_ERROR),
        (frame(Kind.WINDOW_UPDATE, 0, 1, bytes(4)), 1, ErrorCode.PROTOCOL_ERROR),
        (frame(Kind.WINDOW_UPDATE, 0, 3, b"\x7f\xff\xff\xff"), 3, ErrorCode.FLOW_CONTROL_ERROR),
    ],
)
def test_a_breach_of_one_stream_ends_that_stream(data: bytes, stream: int, code: ErrorCode) -> None:
    told, answer = streams_breach(data)
    assert told.cancelled == [stream]
    assert frame(Kind.RST_STREAM, 0, stream, struct.pack(">I", code)) in answer
    told.http2.receive(frame(Kind.PING, 0, 0, bytes(8)))
    assert told.http2.take() == frame(Kind.PING, 1, 0, bytes(8))


def test_a_stream_may_not_send_more_than_its_window() -> None:
    told, _ = streams_breach(b"")
    told.acknowledges = False
    for _ in range((1 << 20) // 16_384):
        told.http2.receive(frame(Kind.DATA, 0, 1, bytes(16_384)))
    assert told.cancelled == []
    told.http2.receive(frame(Kind.DATA, 0, 1, b"x"))
    assert told.cancelled == [1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: frame(Kind.PRIORITY, 0, 9, bytes(5)),
        lambda: frame(0x42, 0xFF, 1, b"of an extension"),
        lambda: frame(Kind.SETTINGS, 0, 0, b"\x42\x42\0\0\0\1"),
        lambda: frame(Kind.SETTINGS, 1, 0, b""),
        lambda: frame(Kind.GOAWAY, 0, 0, bytes(8)),
        lambda: frame(Kind.RST_STREAM, 0, 1, bytes(4)) + frame(Kind.WINDOW_UPDATE, 0, 1, b"\0\0\0\1"),
        lambda: frame(Kind.RST_STREAM, 0, 1, bytes(4)) + frame(Kind.DATA, 1, 1, b"late"),
        lambda: frame(Kind.RST_STREAM, 0, 1, bytes(4)) * 2 + headers(1, 5),
    ],
)
def test_what_is_read_over(make: Callable[[], bytes]) -> None:
    told, answer = streams_breach(make())
    assert all(kind == Kind.SETTINGS for kind, _, _, _ in frames(answer))
    told.http2.receive(headers(5, 5))
    assert told.ended == [3, 5]


FLOODS: dict[str, Callable[[int], bytes]] = {
    "streams that are opened and reset": lambda stream: headers(stream) + frame(Kind.RST_STREAM, 0, stream, bytes(4)),
    "streams that the server is made to reset": lambda stream: (
        headers(stream) + frame(Kind.WINDOW_UPDATE, 0, stream, bytes(4))
    ),
    "streams that are refused": headers,
    "settings": lambda _: SETTINGS,
    "many settings at once": lambda _: frame(Kind.SETTINGS, 0, 0, b"\0\4\0\0\0\1" * 2730),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_ends_the_connection(name: str) -> None:
    told = Told(most_streams=100)
    told.http2.receive(PREFACE + SETTINGS)
    told.http2.take()
    flood = b"".join(FLOODS[name](stream) for stream in range(1, 2 * 1300, 2))
    with pytest.raises(BreachError, match="too many resets or settings") as breach:
        told.http2.receive(flood)
    assert breach.value.code is ErrorCode.ENHANCE_YOUR_CALM
    *_, (kind, _, _, payload) = frames(told.http2.take())
    assert kind == Kind.GOAWAY
    assert struct.unpack_from(">I", payload, 4)[0] == ErrorCode.ENHANCE_YOUR_CALM


def test_what_honest_clients_do_in_a_second_is_no_flood() -> None:
    told = Told(most_streams=100)
    told.http2.receive(PREFACE + SETTINGS)
    stream = 1
    for _ in range(10):
        told.http2.renew_allowance()
        told.http2.receive(frame(Kind.SETTINGS, 0, 0, b"\0\4\0\1\0\0") * 5)
        for _ in range(1000):
            told.http2.receive(headers(stream) + frame(Kind.RST_STREAM, 0, stream, bytes(4)))
            stream += 2
    for _ in range(10_000):
        told.http2.receive(frame(Kind.PING, 0, 0, bytes(8)) + frame(Kind.WINDOW_UPDATE, 0, 0, b"\0\0\0\1"))
        told.http2.receive(frame(Kind.PRIORITY, 0, 1, bytes(5)) + frame(Kind.RST_STREAM, 0, 1, bytes(4)))
    assert len(told.cancelled) == 10_000
