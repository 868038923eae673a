"""The frames of HTTP/2 (RFC 9113, sections 3.4, 4 and 6): bytes of a client become whole frames of bounded size.

Owns: the form of a frame, the preface before the first one. Must not know: what a frame does.
"""

import enum
import struct
from collections.abc import Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_SIZE = 16_384
"""The largest payload that is received, and the largest that is sent: every client takes it."""

_HEAD = struct.Struct(">BHBBI")
_STREAM_ID = (1 << 31) - 1


class Kind(enum.IntEnum):
    """What a frame is."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class ErrorCode(enum.IntEnum):
    """Why a stream or a connection ends."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class BreachError(Exception):
    """The client broke the protocol; the connection must be closed."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def pack_frame(kind: Kind, flags: int, stream_id: int, payload: bytes) -> bytes:
    """Return a frame."""
    return _HEAD.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream_id) + payload


class FrameReader:
    """Cuts what one client sends into frames. It holds less than a frame."""

    def __init__(self) -> None:
        self._held = b""
        self._has_preface = False

    def read(self, data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield kind, flags, stream and payload of each frame that these bytes complete.

        Raises:
            BreachError: this is no HTTP/2, or a frame is too large.
        """
        data, place = self._held + data, 0
        if not self._has_preface:
            if data[: len(PREFACE)] != PREFACE[: len(data)]:
                raise BreachError(ErrorCode.PROTOCOL_ERROR, "this is no HTTP/2")
            if len(data) >= len(PREFACE):
                self._has_preface, place = True, len(PREFACE)
        while self._has_preface and len(data) - place >= _HEAD.size:
            high, low, kind, flags, stream_id = _HEAD.unpack_from(data, place)
            length = high << 16 | low
            if length > FRAME_SIZE:
                raise BreachError(ErrorCode.FRAME_SIZE_ERROR, "a frame is too large")
            end = place + _HEAD.size + length
            if end > len(data):
                break
            yield kind, flags, stream_id & _STREAM_ID, data[place + _HEAD.size : end]
            place = end
        self._held = data[place:]
