"""The envelope of every ZeroMQ message.

Owns: the 24-byte header, the body's encoding, refusing malformed frames. Must not know: what a kind means, sockets.

Layout, little-endian: ``magic 2s | version u8 | kind u8 | epoch u32 | sequence u64 | length u32 | crc32 u32``, then
``length`` bytes of MessagePack. The CRC covers the first 20 bytes and the body: over a quarter of randomly damaged
MessagePack still decodes. ``epoch`` numbers a link's lives; ``sequence`` counts a sender's frames in one, from 0.
"""

import struct
from collections.abc import Mapping

import msgspec

from headway_proto.checksum import crc32

MAGIC = b"HW"
PROTOCOL_VERSION = 1
_HEADER_FIELDS = struct.Struct("<2sBBIQI")
_CRC = struct.Struct("<I")
_HEADER = struct.Struct(f"{_HEADER_FIELDS.format}I")  # the fields and the CRC
HEADER_BYTES = _HEADER.size
MAX_FRAME_BYTES = 256 * 1024 * 1024
MAX_BYTES_TO_SCHEDULER = 16 * 1024 * 1024
"""The largest frame that a scheduler takes: it ends the connection of one that announces more. A submission of
``MAX_REQUEST_TOKENS`` fits; an executor asks for smaller steps rather than answer with more."""
VERSION_INTERVAL_S = 30.0
"""How often each side tells of a peer of another version, which tries on and on."""
VERSION_NOTICE = MAGIC + bytes([PROTOCOL_VERSION]) + bytes(HEADER_BYTES - len(MAGIC) - 1)
"""The answer to a peer of another version: no frame, but from its first bytes the peer learns which version is spoken here."""


class FramingError(ValueError):
    """An unusable frame; one line."""


class OtherVersionError(FramingError):
    """The sender speaks another version of the protocol."""


class Frame(msgspec.Struct, frozen=True):
    """One received message."""

    kind: int
    epoch: int
    sequence: int
    body: msgspec.Struct


class FrameWriter:
    """Numbers and encodes a sender's frames. ``kinds``: each type's kind byte."""

    def __init__(self, kinds: Mapping[type, int], epoch: int = 0) -> None:
        self._kinds = dict(kinds)
        self._encoder = msgspec.msgpack.Encoder()
        self.epoch = epoch
        self.next_sequence = 0

    def begin_epoch(self, epoch: int) -> None:
        """Number frames from 0 under ``epoch``."""
        self.epoch = epoch
        self.next_sequence = 0

    def encode(self, body: msgspec.Struct) -> bytes:
        """Return the next frame."""
        payload = self._encoder.encode(body)
        fields = _HEADER_FIELDS.pack(
            MAGIC, PROTOCOL_VERSION, self._kinds[type(body)], self.epoch, self.next_sequence, len(payload)
        )
        self.next_sequence += 1
        checksum = crc32(payload, crc32(fields))
        return b"".join((fields, _CRC.pack(checksum), payload))


class FrameReader:
    """Checks and decodes frames in any order. ``bodies``: each kind byte's type."""

    def __init__(self, bodies: Mapping[int, type[msgspec.Struct]], max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoders: dict[int, msgspec.msgpack.Decoder[msgspec.Struct]] = {
            kind: msgspec.msgpack.Decoder(body) for kind, body in bodies.items()
        }
        self._max_bytes = max_bytes

    def decode(self, data: bytes | memoryview) -> Frame:
        """Decode one frame.

        Raises:
            OtherVersionError: the version is another.
            FramingError: wrong size, magic, length, checksum, kind or body.
        """
        if not HEADER_BYTES <= len(data) <= self._max_bytes:
            raise FramingError(f"frame of {len(data)} bytes; allowed: {HEADER_BYTES} to {self._max_bytes}")
        magic, version, kind, epoch, sequence, length, checksum = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise FramingError(f"frame starts with {magic!r}; expected {MAGIC!r}")
        if version != PROTOCOL_VERSION:
            raise OtherVersionError(f"protocol version {version} is not allowed; allowed: {PROTOCOL_VERSION}")
        if length != len(data) - HEADER_BYTES:
            raise FramingError(f"frame announces {length} body bytes and carries {len(data) - HEADER_BYTES}")
        payload = memoryview(data)[HEADER_BYTES:]
        expected = crc32(payload, crc32(data[: _HEADER_FIELDS.size]))
        if checksum != expected:
            raise FramingError(f"checksum {checksum:#010x}; expected {expected:#010x}")
        decoder = self._decoders.get(kind)
        if decoder is None:
            raise FramingError(f"message kind {kind} is not expected here")
        try:
            body = decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FramingError(f"body of message kind {kind}: {str(error)[:200]}") from error
        return Frame(kind, epoch, sequence, body)
