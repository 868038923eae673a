"""One HTTP request and its answer, over ASGI: a body within bounds, a client that may go, events.

It is a ``CallContext``, so the calls behind it see no difference from gRPC. Must not know: what bodies and events hold.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeAlias

import grpc

from headway_gateway.calls.generation import in_ascii
from headway_gateway.openai.refusals import HttpRefusedError, http_refusal
from headway_gateway.statuses import CallRefusedError, invalid_argument, past_deadline
from headway_proto.wording import shown

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

TIMEOUT_HEADER = "headway-timeout-ms"
"""The caller's deadline, as gRPC has one."""

REQUEST_ID_HEADER = b"x-request-id"
_JSON = (b"content-type", b"application/json")
_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
_CLOSE = (b"connection", b"close")
_MOST_TIMEOUT_MS = 86_400_000
_MOST_ID_BYTES = 400
_LINGER_S = 2.0
"""A refused client may go on sending its body for so long, until it reads the answer."""


class ClientGoneError(Exception):
    """The client has closed its connection."""


class HttpCall:
    """One request; ``method`` and ``path`` are what it asks for."""

    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.tenant: str | None = None
        """The tenant of the caller's token, which wins over the body's."""
        self.has_begun = False
        """Whether a part of the answer is sent."""
        self.request_id = ""
        self.error_event: Callable[[bytes], bytes] = lambda error: b"data: " + error + b"\n\n"
        """Makes the last event of a stream that fails, from an error in JSON."""
        self._scope = scope
        self._receive = receive
        self._send = send
        self._began_at = time.monotonic()
        self._deadline: float | None = None
        self._is_gone = False
        self._has_whole_body = False

    def headers(self, name: str) -> list[str]:
        """Return the values of a header (lower case)."""
        wanted = name.encode()
        return [value.decode("latin-1") for key, value in self._scope["headers"] if key == wanted]

    def read_deadline(self) -> None:
        """Take the deadline from the headers.

        Raises:
            CallRefusedError: INVALID_ARGUMENT.
        """
        for value in self.headers(TIMEOUT_HEADER):
            if not (value.isascii() and value.isdigit() and len(value) <= 9 and 1 <= int(value) <= _MOST_TIMEOUT_MS):
                raise invalid_argument(
                    f"header {TIMEOUT_HEADER}",
                    f"{shown(value)} is not allowed; allowed: milliseconds from 1 to {_MOST_TIMEOUT_MS}",
                )
            self._deadline = self._began_at + int(value) / 1e3

    async def read_body(self, most_bytes: int, most_s: float) -> bytes:
        """Return the body.

        Raises:
            CallRefusedError: it is too large, it comes too slowly, or it is compressed.
            ClientGoneError: the client went.
        """
        for coding in self.headers("content-encoding"):
            if coding.strip().lower() != "identity":
                raise _compressed(coding)
        announced = self.headers("content-length")
        if announced and announced[0].isdigit() and int(announced[0][:20]) > most_bytes:
            raise _too_large(most_bytes)
        try:
            async with asyncio.timeout(most_s):
                return await self._whole_body(most_bytes)
        except TimeoutError:
            raise HttpRefusedError(
                408,
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"the body did not come within {most_s:g} s",
                reason="slow_client",
            ) from None

    async def _whole_body(self, most_bytes: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most_bytes:
                raise _too_large(most_bytes)
            if not message.get("more_body"):
                self._has_whole_body = True
                return b"".join(parts)

    @contextlib.asynccontextmanager
    async def ended_by_deadline(self) -> AsyncIterator[None]:
        """Cancel what is inside when the call's deadline passes, also what waits before a generation begins.

        Raises:
            CallRefusedError: DEADLINE_EXCEEDED.
        """
        try:
            async with asyncio.timeout(self.time_remaining()):
                yield
        except TimeoutError:
            raise past_deadline() from None

    @contextlib.asynccontextmanager
    async def ended_by_disconnect(self) -> AsyncIterator[None]:
        """Cancel what is inside when the client goes; only after the body is read.

        Raises:
            ClientGoneError: it went.
        """
        task = asyncio.current_task()
        assert task is not None
        watcher = asyncio.create_task(self._watch(task))
        try:
            yield
        except asyncio.CancelledError:
            if not self._is_gone:
                raise
            task.uncancel()
            raise ClientGoneError from None
        finally:
            watcher.cancel()

    async def _watch(self, task: "asyncio.Task[Any]") -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        task.cancel()

    async def answer(
        self, body: bytes, *, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = (), is_last: bool = True
    ) -> None:
        """Send a whole answer, in JSON. If it is not the last that is sent, the connection stays open."""
        length = (b"content-length", b"%d" % len(body))
        await self._begin(status, [_JSON, length, *headers])
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def refuse(self, error: CallRefusedError) -> None:
        """Send a refusal: as an answer, or as the last event of a stream."""
        refusal = http_refusal(error)
        if self.has_begun:
            await self.send_event(self.error_event(refusal.body))
            await self.end_events()
            return
        if self._has_whole_body:
            await self.answer(refusal.body, status=refusal.status, headers=refusal.headers)
            return
        # The rest of an unread body would be taken for the next request's time.
        await self.answer(refusal.body, status=refusal.status, headers=(*refusal.headers, _CLOSE), is_last=False)
        await self._drop_rest()
        await self.end_events()

    async def _drop_rest(self) -> None:
        """Take what the client is still sending: closed before that, its connection is reset, and the answer is lost."""
        if self.headers("expect"):
            return  # it sends only if it is told to
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                message = await self._receive()
                while message["type"] != "http.disconnect" and message.get("more_body"):
                    message = await self._receive()

    async def begin_events(self) -> None:
        """Send the head of a stream of events."""
        await self._begin(200, [_EVENTS, (b"cache-control", b"no-cache")])

    async def send_event(self, event: bytes) -> None:
        """Send a part of the stream: one event, or several."""
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def end_events(self) -> None:
        """End the stream."""
        await self._send({"type": "http.response.body", "body": b""})

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.has_begun = True
        if self.request_id:
            headers.append((REQUEST_ID_HEADER, in_ascii(self.request_id)[:_MOST_ID_BYTES].encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def time_remaining(self) -> float | None:
        """See ``CallContext``."""
        return None if self._deadline is None else self._deadline - time.monotonic()

    def invocation_metadata(self) -> list[tuple[str, str | bytes]]:
        """See ``CallContext``."""
        return [(key.decode("latin-1"), value.decode("latin-1")) for key, value in self._scope["headers"]]

    def peer(self) -> str:
        """See ``CallContext``."""
        client = self._scope.get("client")
        return f"http:{client[0]}:{client[1]}" if client else "http"

    def offer_initial_metadata(self, initial_metadata: tuple[tuple[str, str], ...]) -> None:
        """Send nothing yet: a refusal may still need the status."""

    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        """Drop them: clients of HTTP do not read trailers."""


def _compressed(coding: str) -> HttpRefusedError:
    return HttpRefusedError(
        415,
        grpc.StatusCode.INVALID_ARGUMENT,
        f"header content-encoding: {shown(coding)} is not allowed; allowed: unset, a body that is not compressed",
        reason="compressed_body",
        headers=[(b"accept-encoding", b"identity")],
    )


def _too_large(most_bytes: int) -> HttpRefusedError:
    return HttpRefusedError(
        413,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"the body is too large; allowed: at most {most_bytes} bytes",
        reason="body_too_large",
    )
