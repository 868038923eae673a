"""Bytes of clients at the gRPC port: frames are taken, or the connection ends with a reason."""

import contextlib
import struct

from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st

from fuzz.limits import bounded, examples
from headway_gateway.grpc_server.frames import PREFACE, BreachError, Kind
from headway_gateway.grpc_server.header_blocks import Headers, pack_headers
from headway_gateway.grpc_server.http2 import Http2
from headway_gateway.grpc_server.wire import MessageReader, read_head
from headway_gateway.statuses import CallRefusedError

MOST_MESSAGE_BYTES = 1 << 16
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
HEADERS = [(":method", "POST"), (":path", "/a/B"), ("content-type", "application/grpc"), ("grpc-timeout", "1S")]


class Reader:
    """Reads what comes as the server does, and answers every request at once or never."""

    def __init__(self, *, answers: bool) -> None:
        self.http2 = Http2(self, most_streams=4)
        self._answers = answers
        self.readers: dict[int, MessageReader] = {}

    def open_stream(self, stream_id: int, headers: Headers) -> None:
        head = read_head(headers)
        self.readers[stream_id] = MessageReader(head.encoding, MOST_MESSAGE_BYTES)
        if self._answers:
            self.http2.send_headers(stream_id, pack_headers(((b":status", b"200"),)), is_end=False)
            self.http2.send_data(stream_id, b"answer")
            self.http2.send_headers(stream_id, pack_headers(((b"grpc-status", b"0"),)), is_end=True)

    def take_data(self, stream_id: int, data: bytes, num_bytes: int) -> None:
        self.http2.acknowledge(stream_id, num_bytes)
        try:
            self.readers[stream_id].read(data)
        except CallRefusedError:
            self.http2.send_headers(stream_id, b"", is_end=True)

    def end_stream(self, stream_id: int) -> None:
        assert stream_id in self.readers

    def cancel_stream(self, stream_id: int) -> None:
        assert stream_id in self.readers


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


payloads = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [bytes(4), bytes(5), bytes(6), bytes(8), b"\x7f\xff\xff\xff", b"\0\4\0\0\0\0", b"\0\4\x7f\xff\xff\xff"]
    ),
    st.just(Encoder().encode(HEADERS)),
    st.builds(lambda data: struct.pack(">BI", 0, len(data)) + data, st.binary(max_size=20)),
)
frames = st.builds(
    frame,
    st.one_of(st.sampled_from(list(Kind)), st.integers(0, 255)),
    st.one_of(st.sampled_from([0, 1, 4, 5, 8, 0x20, 0x24, 0x2D]), st.integers(0, 255)),
    st.sampled_from([0, 1, 1, 1, 2, 3, 5, 0x7FFFFFFF]),
    payloads,
)


def receive(reader: Reader, data: bytes, step: int) -> None:
    with bounded():
        reason = b""
        try:
            for place in range(0, len(data), step):
                reader.http2.receive(data[place : place + step])
        except BreachError as breach:
            reason = str(breach).encode()
        assert reader.http2.take().endswith(reason), "the client is told"
    assert len(reader.http2._frames._held) <= 9 + 16_384


@examples(300)
@given(st.lists(frames, max_size=12), st.booleans(), st.sampled_from([1, 7, 1 << 20]))
def test_frames(drawn: list[bytes], answers: bool, step: int) -> None:
    receive(Reader(answers=answers), PREFACE + SETTINGS + b"".join(drawn), step)


@examples(100)
@given(st.binary(max_size=200), st.booleans())
def test_bytes(drawn: bytes, has_preface: bool) -> None:
    receive(Reader(answers=True), (PREFACE + SETTINGS if has_preface else b"") + drawn, 1 << 20)


@examples(100)
@given(st.lists(st.tuples(st.binary(max_size=12), st.binary(max_size=12)), max_size=6))
def test_heads(drawn: Headers) -> None:
    with bounded():
        head = read_head([(name.encode(), value.encode()) for name, value in HEADERS] + drawn)
        assert head.problem is None or head.problem.message


@examples(200)
@given(
    st.sampled_from(["identity", "gzip", "deflate", "unknown"]),
    st.lists(st.one_of(st.binary(max_size=30), st.just(b"\1\0\0\0\4"), st.just(b"\0\0\0\0\2xy")), max_size=6),
)
def test_messages(encoding: str, drawn: list[bytes]) -> None:
    reader = MessageReader(encoding, MOST_MESSAGE_BYTES)
    with bounded(), contextlib.suppress(CallRefusedError):
        for data in drawn:
            assert all(len(message) <= MOST_MESSAGE_BYTES for message in reader.read(data))
