"""A client of gRPC that is only HTTP/2: it sends and sees what gRPC's own clients keep to themselves."""

import asyncio
import contextlib
import struct
from collections.abc import Iterable
from typing import Self

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)

Headers = Iterable[tuple[str, str]]


class Answer:
    """What came on one stream."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.trailers: dict[str, str] = {}
        self.data = b""
        self.reset_code: int | None = None
        self.is_over = asyncio.Event()

    @property
    def status(self) -> dict[str, str]:
        """Where the status of the call is."""
        return self.trailers or self.headers

    @property
    def messages(self) -> list[bytes]:
        """The messages of gRPC in the data."""
        found, place = [], 0
        while place < len(self.data):
            is_compressed, length = struct.unpack_from(">BI", self.data, place)
            assert not is_compressed
            found.append(self.data[place + 5 : place + 5 + length])
            place += 5 + length
        return found


class PlainH2:
    """One connection, for ``async with``. It acknowledges data at once unless ``reads`` is false."""

    def __init__(self, address: str, *, reads: bool = True) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._reads = reads
        self.h2 = H2Connection(H2Configuration(header_encoding="utf-8", validate_outbound_headers=False))
        self.answers: dict[int, Answer] = {}
        self.goaway: ConnectionTerminated | None = None
        self.is_closed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        self.h2.initiate_connection()
        self.flush()
        self._task = asyncio.create_task(self._receive())
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._writer.close()
        await asyncio.gather(self._writer.wait_closed(), return_exceptions=True)

    def flush(self, more: bytes = b"") -> None:
        """Send what h2 has to send, and then these bytes."""
        self._writer.write(self.h2.data_to_send() + more)

    def open(self, path: str, headers: Headers = (), *, method: str = "POST") -> int:
        """Send the head of a request; return its stream."""
        stream_id = self.h2.get_next_available_stream_id()
        self.answers[stream_id] = Answer()
        fields = {":method": method, ":scheme": "http", ":path": path, ":authority": "test", "te": "trailers",
                  "content-type": "application/grpc"} | dict(headers)  # fmt: skip
        self.h2.send_headers(stream_id, list(fields.items()))
        self.flush()
        return stream_id

    def send(self, stream_id: int, data: bytes, *, is_last: bool = True) -> None:
        """Send data as it is."""
        self.h2.send_data(stream_id, data, end_stream=is_last)
        self.flush()

    async def call(self, path: str, *messages: bytes, headers: Headers = ()) -> Answer:
        """Make a whole call."""
        stream_id = self.open(path, headers)
        self.send(stream_id, b"".join(framed(message) for message in messages))
        return await self.answer(stream_id)

    async def answer(self, stream_id: int) -> Answer:
        """Return the whole answer."""
        answer = self.answers[stream_id]
        async with asyncio.timeout(10):
            await answer.is_over.wait()
        return answer

    async def _receive(self) -> None:
        with contextlib.suppress(ConnectionResetError):  # what it wrote came to a server that had closed
            while data := await self._reader.read(65536):
                for event in self.h2.receive_data(data):
                    self._take(event)
                self.flush()
        self.is_closed.set()
        for answer in self.answers.values():
            answer.is_over.set()

    def _take(self, event: Event) -> None:
        if isinstance(event, ConnectionTerminated):
            self.goaway = event
            return
        answer = self.answers.get(getattr(event, "stream_id", None) or 0)
        if answer is None:
            return
        if isinstance(event, ResponseReceived):
            answer.headers = dict(event.headers)
        elif isinstance(event, TrailersReceived):
            answer.trailers = dict(event.headers)
        elif isinstance(event, DataReceived):
            answer.data += event.data
            if self._reads:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, StreamReset):
            answer.reset_code = event.error_code
            answer.is_over.set()
        elif isinstance(event, StreamEnded):
            answer.is_over.set()


def framed(message: bytes, *, is_compressed: bool = False) -> bytes:
    """A message of gRPC."""
    return struct.pack(">BI", is_compressed, len(message)) + message
