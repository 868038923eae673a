"""One call: its requests, its answer and its end. It is what handlers know as the context.

A handler begins when the first request is there: some clients do not expect an end before they have sent it.

Must not know: HTTP/2, which methods there are.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, NoReturn, TypeAlias

import grpc

from headway_gateway.grpc_server.connection import Stream
from headway_gateway.grpc_server.wire import (
    MessageReader,
    Metadata,
    RequestHead,
    framed,
    head_of_answer,
    refusal_without_call,
    write_metadata,
    write_status,
)
from headway_gateway.statuses import CallRefusedError, unexpected

Behaviour: TypeAlias = "Callable[[Call], Awaitable[None]]"
"""Serves a call."""

_HEAD = head_of_answer()
_OK = write_status(grpc.StatusCode.OK, "", ())
_HEAD_WAITS_S = 0.02
"""So long a head waits for the first message, so that both leave in one write: each write wakes the client."""

_LATE_S = 0.5
"""A call that has not ended itself so long after its deadline is ended."""


class Call:
    """A call of a method that takes one message, or with ``takes_many`` a stream of them."""

    def __init__(
        self,
        stream: Stream,
        head: RequestHead,
        serve: Behaviour,
        tasks: "set[asyncio.Task[None]]",
        *,
        takes_many: bool,
        most_bytes: int,
    ) -> None:
        """``tasks`` holds the task while it runs; ``most_bytes`` bounds a message."""
        self.method = head.path
        self.metadata = head.metadata
        self.prepare: Callable[[Any], None] | None = None
        """Is given each request before the handler."""
        self.serialize: Callable[[Any], bytes] | None = None
        """Makes bytes of an answer."""
        self._stream = stream
        self._serve = serve
        self._tasks = tasks
        self._takes_many = takes_many
        self._reader = MessageReader(head.encoding, most_bytes)
        self._deadline = None if head.timeout_s is None else time.monotonic() + head.timeout_s
        self._requests: deque[bytes | CallRefusedError | None] = deque()
        self._num_unacknowledged = 0
        self._has_news: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_late = False
        self._has_begun = False
        self._waiting_head: bytes | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._trailing: Metadata = ()

    # What a stream tells.

    def receive(self, data: bytes, num_bytes: int) -> None:
        """See ``Receiver``."""
        if self._task is not None and not self._takes_many:
            self._stream.acknowledge(num_bytes)  # nobody reads it
            return
        try:
            messages = self._reader.read(data)
        except CallRefusedError as problem:
            self._add(problem)
            return
        self._num_unacknowledged += num_bytes
        for message in messages:
            self._add(message)
        if not self._requests:
            self._acknowledge()  # a message may be larger than the window

    def end(self) -> None:
        """See ``Receiver``."""
        if self._reader.is_inside:
            self._add(CallRefusedError(grpc.StatusCode.INTERNAL, "the last message is cut short"))
        elif self._takes_many:
            self._add(None)
        elif self._task is None:
            self._add(CallRefusedError(grpc.StatusCode.INTERNAL, "the request has no message"))

    def cancel(self) -> None:
        """See ``Receiver``."""
        if self._task is not None:
            self._task.cancel()

    def end_unless_begun(self) -> None:
        """See ``Receiver``."""
        if self._task is None:
            late = CallRefusedError(
                grpc.StatusCode.DEADLINE_EXCEEDED, "the request did not come in time", reason="slow_client"
            )
            self._stream.finish(refusal_without_call(late))

    # What a handler asks.

    def invocation_metadata(self) -> Metadata:
        """Return what the caller sent beside the request."""
        return self.metadata

    def peer(self) -> str:
        """Name the connection."""
        return self._stream.peer

    def time_remaining(self) -> float | None:
        """Return the seconds before the call's deadline, if it has one."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    async def send_initial_metadata(self, initial_metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Send what goes before the first message."""
        self._has_begun = True
        self._stream.send_head(_HEAD + write_metadata(initial_metadata))

    def offer_initial_metadata(self, initial_metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Send what goes before the first message with it, or soon without it."""
        self._waiting_head = _HEAD + write_metadata(initial_metadata)
        self._head_timer = asyncio.get_running_loop().call_later(_HEAD_WAITS_S, self._send_waiting_head)

    def set_trailing_metadata(self, trailing_metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Keep what goes behind the last message."""
        self._trailing = tuple(trailing_metadata)

    async def write(self, message: Any) -> None:
        """Send a message; wait while the client reads too slowly."""
        data = framed(message if self.serialize is None else self.serialize(message))
        self._send_waiting_head()
        if not self._has_begun:
            await self.send_initial_metadata(())
        self._stream.send(data)
        if not self._stream.has_room:
            await self._stream.until_room()

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Iterable[tuple[str, str | bytes]] = ()
    ) -> NoReturn:
        """End the call with a status."""
        self.set_trailing_metadata((*self._trailing, *trailing_metadata))
        raise CallRefusedError(code, details)

    async def request(self, deserialize: Callable[[bytes], Any] | None) -> Any:
        """Return the next request; None behind the last.

        Raises:
            CallRefusedError: it cannot be read.
        """
        while not self._requests:
            self._has_news = asyncio.get_running_loop().create_future()
            await self._has_news
        taken = self._requests[0]
        if taken is None:
            return None
        self._requests.popleft()
        if not self._requests:
            self._acknowledge()
        if isinstance(taken, CallRefusedError):
            raise taken
        request = taken if deserialize is None else _deserialized(taken, deserialize)
        if self.prepare is not None:
            self.prepare(request)
        return request

    async def requests(self, deserialize: Callable[[bytes], Any] | None) -> AsyncIterator[Any]:
        """Yield the requests of a stream."""
        while (request := await self.request(deserialize)) is not None:
            yield request

    def _send_waiting_head(self) -> None:
        if self._waiting_head is None or self._head_timer is None:
            return
        self._head_timer.cancel()
        self._has_begun = True
        self._stream.send_head(self._waiting_head)
        self._waiting_head = None

    def _acknowledge(self) -> None:
        self._stream.acknowledge(self._num_unacknowledged)
        self._num_unacknowledged = 0

    def _add(self, news: bytes | CallRefusedError | None) -> None:
        self._requests.append(news)
        if self._has_news is not None and not self._has_news.done():
            self._has_news.set_result(None)
        if self._task is None:
            self._start()

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._run())
        self._tasks.add(self._task)
        self._task.add_done_callback(self._tasks.discard)
        if self._deadline is not None:
            self._timer = loop.call_later(max(0.0, self._deadline - time.monotonic()) + _LATE_S, self._end_late)

    def _end_late(self) -> None:
        self._is_late = True
        self.cancel()

    async def _run(self) -> None:
        try:
            await self._serve(self)
            self._finish(grpc.StatusCode.OK, "", self._trailing)
        except CallRefusedError as refusal:
            self._refuse(refusal)
        except asyncio.CancelledError:
            code = grpc.StatusCode.DEADLINE_EXCEEDED if self._is_late else grpc.StatusCode.CANCELLED
            self._finish(code, "the call was ended before its answer", ())
            raise
        except BaseException as error:  # noqa: BLE001  # a client never gets the text of an unexpected error
            self._refuse(unexpected(error, self.method))
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _refuse(self, refusal: CallRefusedError) -> None:
        self._finish(refusal.code, refusal.message, (*self._trailing, *refusal.trailing_metadata()))

    def _finish(self, code: grpc.StatusCode, message: str, metadata: Metadata) -> None:
        is_plain = code is grpc.StatusCode.OK and not metadata
        trailers = _OK if is_plain else write_status(code, message, metadata)
        self._send_waiting_head()
        self._stream.finish(trailers if self._has_begun else _HEAD + trailers)


def _deserialized(data: bytes, deserialize: Callable[[bytes], Any]) -> Any:
    try:
        return deserialize(data)
    except Exception:  # noqa: BLE001  # protobuf's implementations raise different errors
        raise CallRefusedError(
            grpc.StatusCode.INVALID_ARGUMENT,
            "the request cannot be parsed; allowed: this method's protobuf message",
        ) from None
