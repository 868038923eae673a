"""Frames: what is refused, and that nothing but ``FramingError`` ever comes out of the reader."""

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway_proto import ingress, step
from headway_proto.framing import HEADER_BYTES, FrameReader, FramingError

READERS = [
    step.executor_frame_reader(),
    step.scheduler_frame_reader(),
    ingress.gateway_frame_reader(),
    ingress.scheduler_frame_reader(),
]


def heartbeat_frame() -> bytes:
    writer = step.scheduler_frame_writer()
    writer.begin_epoch(7)
    return writer.encode(step.SchedulerHeartbeat(123))


def with_checksum(fields: bytes, payload: bytes) -> bytes:
    return fields + struct.pack("<I", zlib.crc32(payload, zlib.crc32(fields))) + payload


def test_round_trip_counts_sequences_and_begins_again_with_an_epoch() -> None:
    writer, reader = step.scheduler_frame_writer(), step.executor_frame_reader()
    writer.begin_epoch(3)
    numbers = [(f.epoch, f.sequence) for f in (reader.decode(writer.encode(step.SchedulerHeartbeat(1))) for _ in "ab")]
    writer.begin_epoch(4)
    frame = reader.decode(writer.encode(step.NewEpoch(4, 5, 6)))
    assert numbers == [(3, 0), (3, 1)]
    assert (frame.epoch, frame.sequence, frame.body) == (4, 0, step.NewEpoch(4, 5, 6))


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"", "frame of 0 bytes"),
        (b"HW" + bytes(10), "frame of 12 bytes"),
        (b"XX" + heartbeat_frame()[2:], "starts with b'XX'"),
        (b"HW\x09" + heartbeat_frame()[3:], "protocol version 9"),
        (heartbeat_frame() + b"!", "announces"),
        (heartbeat_frame()[:-1] + b"\x00", "checksum"),
        (with_checksum(struct.pack("<2sBBIQI", b"HW", 1, 200, 0, 0, 1), b"\x90"), "kind 200"),
        (with_checksum(struct.pack("<2sBBIQI", b"HW", 1, 3, 0, 0, 1), b"\xc1"), "body of message kind 3"),
        (with_checksum(struct.pack("<2sBBIQI", b"HW", 1, 3, 0, 0, 2), b"\x91\xa0"), "body of message kind 3"),
    ],
)
def test_malformed_frames_are_refused_with_the_reason(frame: bytes, message: str) -> None:
    with pytest.raises(FramingError, match=message):
        step.executor_frame_reader().decode(frame)


def test_a_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(FramingError, match="allowed: 24 to 30"):
        FrameReader({}, max_bytes=30).decode(heartbeat_frame() + bytes(30))


@given(st.binary(max_size=200), st.sampled_from(READERS))
def test_random_bytes_never_crash_a_reader(data: bytes, reader: FrameReader) -> None:
    with pytest.raises(FramingError):
        reader.decode(data)


@given(st.binary(max_size=300), st.integers(0, 60), st.sampled_from(READERS))
def test_random_bodies_behind_a_valid_header_never_crash_a_reader(body: bytes, kind: int, reader: FrameReader) -> None:
    frame = with_checksum(struct.pack("<2sBBIQI", b"HW", 1, kind, 0, 0, len(body)), body)
    try:
        decoded = reader.decode(frame)
    except FramingError:
        return
    assert decoded.kind == kind


@given(st.integers(0), st.integers(0, 7))
def test_every_flipped_bit_is_noticed(position: int, bit: int) -> None:
    damaged = bytearray(heartbeat_frame())
    damaged[position % len(damaged)] ^= 1 << bit
    with pytest.raises(FramingError):
        step.executor_frame_reader().decode(bytes(damaged))


def test_header_is_24_bytes() -> None:
    assert HEADER_BYTES == 24
