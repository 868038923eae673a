"""Messages between client processes and their parent. A frame is a length of four bytes, then msgpack."""

import struct
from typing import BinaryIO, TypeAlias

import msgspec

from headway_lab.bench.options import BenchOptions
from headway_lab.bench.share import ShareResult

_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size


class Job(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The parent sends a share."""

    options: BenchOptions
    context_length: int
    index: int


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The parent sends the begin, in monotonic seconds of the machine."""

    at_s: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The client process has its share."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The client process cannot work."""

    message: str


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The client process reports its ended requests."""

    num_ended: int


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All requests ended."""

    result: ShareResult


ToClient: TypeAlias = Job | Begin
FromClient: TypeAlias = Ready | Refused | Progress | Done

_to_client: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)
_from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)


def frame(message: ToClient | FromClient) -> bytes:
    """Return a message as bytes."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def body_bytes(length: bytes) -> int:
    """Return the length that follows."""
    return int(_LENGTH.unpack(length)[0])


def from_client(body: bytes) -> FromClient:
    """Decode a frame's body.

    Raises:
        msgspec.DecodeError: it is no message.
    """
    return _from_client.decode(body)


def read_to_client(stream: BinaryIO) -> ToClient:
    """Wait for the next message.

    Raises:
        EOFError: the sender has ended.
    """
    length = stream.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        raise EOFError
    return _to_client.decode(stream.read(body_bytes(length)))
