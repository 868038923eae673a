"""What gRPC puts into an HTTP/2 stream: messages, metadata, deadlines, statuses. Must not know: streams, sockets.

Source: PROTOCOL-HTTP2.md of the gRPC project.
"""

import base64
import binascii
import re
import struct
import zlib
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias
from urllib.parse import quote

import grpc

from headway_gateway.grpc_server.header_blocks import pack_headers
from headway_gateway.statuses import CallRefusedError

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

ENCODINGS = ("identity", "gzip", "deflate")
"""Compressions of requests. Answers are not compressed."""

MOST_METADATA_BYTES = 16 * 1024
"""Of one request; that is as much as gRPC's own servers take."""

_PREFIX = struct.Struct(">BI")
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_OF_THE_PROTOCOL = frozenset((b"te", b"content-type", b"grpc-encoding", b"grpc-accept-encoding", b"grpc-timeout"))
_WINDOW_BITS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


class RequestHead(NamedTuple):
    """The head of a call. ``problem`` is why it cannot be served, an HTTP status if it is no gRPC at all."""

    path: str
    metadata: Metadata
    encoding: str
    timeout_s: float | None
    http_status: int = 200
    problem: CallRefusedError | None = None


def read_head(headers: Iterable[tuple[bytes, bytes]]) -> RequestHead:
    """Read a request's headers, of which h2 has checked the form."""
    fields: dict[bytes, bytes] = {}
    others: list[tuple[bytes, bytes]] = []
    for name, value in headers:
        if name.startswith(b":") or name in _OF_THE_PROTOCOL:
            fields[name] = value
        else:
            others.append((name, value))
    encoding = fields.get(b"grpc-encoding", b"identity").decode("latin-1")
    timeout = fields.get(b"grpc-timeout")
    head = RequestHead(fields.get(b":path", b"").decode("latin-1"), (), encoding, None)
    if fields.get(b":method") != b"POST":
        return head._replace(http_status=405, problem=_internal("the HTTP method must be POST"))
    if not fields.get(b"content-type", b"").startswith(b"application/grpc"):
        return head._replace(http_status=415, problem=_internal("the content-type must be application/grpc"))
    try:
        metadata = read_metadata(others)
        timeout_s = None if timeout is None else read_timeout(timeout)
    except CallRefusedError as problem:
        return head._replace(problem=problem)
    head = head._replace(metadata=metadata, timeout_s=timeout_s)
    if encoding not in ENCODINGS:
        return head._replace(
            problem=CallRefusedError(
                grpc.StatusCode.UNIMPLEMENTED,
                f"grpc-encoding: {encoding[:32]!r} is not allowed; allowed: {', '.join(ENCODINGS)}",
            )
        )
    return head


def read_metadata(headers: Iterable[tuple[bytes, bytes]]) -> Metadata:
    """Return what a caller has sent beside the request; bytes for keys that end in ``-bin``.

    Raises:
        CallRefusedError: it is too large, or is no base64.
    """
    found: list[tuple[str, str | bytes]] = []
    size = 0
    for name, value in headers:
        size += len(name) + len(value) + 32
        if size > MOST_METADATA_BYTES:
            raise CallRefusedError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the metadata is too large; allowed: at most {MOST_METADATA_BYTES} bytes",
            )
        key = name.decode("latin-1")
        if name.endswith(b"-bin"):
            found += [(key, _read_binary(key, part.strip())) for part in value.split(b",")]
        else:
            found.append((key, value.decode("latin-1")))
    return tuple(found)


def _read_binary(key: str, value: bytes) -> bytes:
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except binascii.Error:
        raise _internal(f"the metadata {key[:64]!r} is no base64") from None


def write_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    """Return metadata as a part of a block of headers."""
    return pack_headers(
        (
            key.encode("ascii"),
            base64.b64encode(value).rstrip(b"=") if isinstance(value, bytes) else value.encode("ascii"),
        )
        for key, value in metadata
    )


def read_timeout(value: bytes) -> float:
    """Return seconds.

    Raises:
        CallRefusedError: it has another form.
    """
    found = _TIMEOUT.fullmatch(value)
    if found is None:
        raise _internal("the grpc-timeout must be up to 8 digits and a unit")
    return int(found[1]) * _SECONDS[found[2]]


def write_status(code: grpc.StatusCode, message: str, metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    """Return the trailers that end a call."""
    headers = [(b"grpc-status", b"%d" % code.value[0])]
    if message:
        headers.append((b"grpc-message", quote(message, safe=_PRINTABLE).encode("ascii")))
    return pack_headers(headers) + write_metadata(metadata)


def head_of_answer(http_status: int = 200) -> bytes:
    """Return what every answer begins with."""
    return pack_headers(((b":status", b"%d" % http_status), (b"content-type", b"application/grpc")))


def refusal_without_call(refusal: CallRefusedError, http_status: int = 200) -> bytes:
    """Return the whole answer to a request that becomes no call."""
    return head_of_answer(http_status) + write_status(refusal.code, refusal.message, refusal.trailing_metadata())


def framed(message: bytes) -> bytes:
    """Return a message as it stands in a stream."""
    return _PREFIX.pack(0, len(message)) + message


class MessageReader:
    """Cuts the bytes of one stream into messages of at most ``most_bytes``, compressed or not."""

    def __init__(self, encoding: str, most_bytes: int) -> None:
        self._encoding = encoding
        self._most_bytes = most_bytes
        self._held = bytearray()

    @property
    def is_inside(self) -> bool:
        """Whether a message has begun that is not complete."""
        return bool(self._held)

    def read(self, data: bytes) -> list[bytes]:
        """Return the messages that these bytes complete.

        Raises:
            CallRefusedError: one is too large, or cannot be uncompressed.
        """
        held = self._held
        held += data
        messages = []
        while len(held) >= _PREFIX.size:
            is_compressed, length = _PREFIX.unpack_from(held)
            if length > self._most_bytes:
                raise self._too_large(str(length))
            end = _PREFIX.size + length
            if len(held) < end:
                break
            message = bytes(held[_PREFIX.size : end])
            del held[:end]
            messages.append(self._uncompressed(message) if is_compressed else message)
        return messages

    def _uncompressed(self, message: bytes) -> bytes:
        bits = _WINDOW_BITS.get(self._encoding)
        if bits is None:
            raise _internal("a message is compressed, and the grpc-encoding names no compression")
        reader = zlib.decompressobj(bits)
        try:
            whole = reader.decompress(message, self._most_bytes + 1)
        except zlib.error:
            raise _internal(f"a message is not compressed as {self._encoding}") from None
        if len(whole) > self._most_bytes:
            raise self._too_large("more")
        if not reader.eof:
            raise _internal("a compressed message is cut short")
        return whole

    def _too_large(self, size: str) -> CallRefusedError:
        return CallRefusedError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"the message is larger than allowed: {size} bytes; allowed: at most {self._most_bytes}",
        )


def _internal(message: str) -> CallRefusedError:
    """The status that gRPC names for a breach of its protocol."""
    return CallRefusedError(grpc.StatusCode.INTERNAL, message)
