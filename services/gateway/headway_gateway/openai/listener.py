"""The HTTP server: sockets of its own, uvicorn on the gateway's loop, bounds that uvicorn lacks.

Must not know: what is served.
"""

import asyncio
import contextlib
import functools
import socket
import sys
from collections.abc import Collection, Iterator
from typing import Any

import httptools
import uvicorn
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headway_gateway.accepting import Acceptor, Entrance
from headway_gateway.openai.web_pages import AsgiApplication

_MOST_HEAD_S = 10.0
_MOST_HEAD_BYTES = 64 * 1024
_LEAST_READ_BYTES = 64 * 1024
"""Of an answer that a client is slow to read, in ``most_unread_s`` seconds."""

_MOST_PIPELINED = 16
"""Requests that wait behind another of their connection; when there are more, nothing is read."""

_CANCEL_GRACE_S = 1
"""For open requests when the server closes; uvicorn counts whole seconds."""


class HttpListener:
    """Serves ``application`` on HOST:PORT."""

    def __init__(
        self,
        application: AsgiApplication,
        entrance: Entrance,
        *,
        slow_client_s: float,
    ) -> None:
        """The sockets are closed with the server. ``slow_client_s``: see ``_Connection``."""
        config = uvicorn.Config(
            application,
            http=functools.partial(_Connection, most_unread_s=slow_client_s),  # type: ignore[arg-type]  # it is only called
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",
            access_log=False,
            # A header must not change who the peer is.
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=_CANCEL_GRACE_S,
        )
        config.load()
        self._sockets = entrance.sockets
        self._server = _Server(config, entrance)
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port."""
        port: int = self._sockets[0].getsockname()[1]
        return port

    @property
    def connections(self) -> "Collection[_Connection]":
        """The connections that are open."""
        return self._server.server_state.connections  # type: ignore[return-value]  # as they are made below

    async def start(self) -> None:
        """Serve from now on."""
        self._task = asyncio.create_task(self._server.serve(sockets=[]), name="http")
        started = asyncio.create_task(self._server.until_started())
        await asyncio.wait((self._task, started), return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._task.done():
            await self._task

    async def close(self) -> None:
        """End open requests and release everything."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        # uvicorn cancels what is left, and does not wait for it.
        await asyncio.gather(*self._server.server_state.tasks, return_exceptions=True)


class _Server(uvicorn.Server):
    """Signals and sockets are the gateway's business."""

    def __init__(self, config: uvicorn.Config, entrance: Entrance) -> None:
        super().__init__(config)
        self._entrance = entrance
        self._acceptors: list[Acceptor] = []
        self._has_started = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._acceptors = self._entrance.open(self._connection)
        self._has_started.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        await super().shutdown(sockets)

    async def until_started(self) -> None:
        await self._has_started.wait()

    def _connection(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]  # as uvicorn calls it
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


class _Connection(HttpToolsProtocol):
    """One connection. It ends if the head of a request is late or large, if what stands behind the last chunk of a body is
    large, or if the client reads nearly nothing of an answer for ``most_unread_s`` seconds after the buffers are full.
    """

    def __init__(self, *arguments: Any, most_unread_s: float, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._most_unread_s = most_unread_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._head: object = None
        """Another one for each head that is read, and for what follows the size of a chunk; None inside a body."""
        self._num_head_bytes = 0
        self._answered: RequestResponseCycle | None = None
        """The request that is answered now; uvicorn knows only the last that came, which may wait behind it."""

    @property
    def is_sending(self) -> bool:
        """Whether a request is being answered, or the client has not read the answer."""
        is_answering = self._answered is not None and not self._answered.response_complete
        return self in self.connections and (is_answering or self.transport.get_write_buffer_size() > 0)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._unread_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        if self._answered is not None:
            self._answered.disconnected = not self._answered.response_complete
            self._answered.message_event.set()
            self._answered = None
        # uvicorn lets a reset connection wait out its keep-alive time, and leaves circles behind, which the collector of a
        # busy gateway would find only after some ten thousand connections.
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        self.cycle = None  # type: ignore[assignment]  # as uvicorn's, before the first request

    def data_received(self, data: bytes) -> None:
        before = self._head
        self._parse(data)
        # Data with the end of a body before it is not all of the head, and is bounded as one read.
        if self._head is not None and self._head is before:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > _MOST_HEAD_BYTES:
                self._abort()

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                # The parser takes what follows for another protocol, also the body.
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return
            else:
                return

    def _asks_for_upgrade(self) -> bool:
        """As clients of Java do, which speak HTTP/2 where a server does: it is answered as if it did not ask."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join((*lines, b"", b""))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        if self._asks_for_upgrade():
            return
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self._head = None
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= _MOST_PIPELINED:
            self.flow.resume_reading()  # nobody would see that the client goes

    def on_chunk_header(self) -> None:
        """Trailers follow, if it is the last chunk."""
        self._begin_head()

    def on_body(self, body: bytes) -> None:
        self._head = None
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._asks_for_upgrade():
            return
        self._head = None
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, _until_closed(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _watch_unread(self) -> None:
        num_unread = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(self._most_unread_s, self._end_unread, num_unread)

    def _end_unread(self, num_before: int) -> None:
        """A large answer takes long, as long as it is read."""
        if num_before - self.transport.get_write_buffer_size() < _LEAST_READ_BYTES:
            self._abort()
        else:
            self._watch_unread()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._begin_head()
            self._head_timer = self.loop.call_later(_MOST_HEAD_S, self._abort)

    def _begin_head(self) -> None:
        self._head = object()
        self._num_head_bytes = 0

    def _abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


def _until_closed(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """Let a stream end with its connection: a client of HTTP/1.0 knows no chunks, in which uvicorn sends it all the same."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        async def send_plainly(message: Any) -> None:
            if message["type"] == "http.response.start":
                if b"content-length" not in dict(message["headers"]):
                    cycle.chunked_encoding, cycle.expected_content_length = False, sys.maxsize
            elif not message.get("more_body") and not cycle.response_complete:
                cycle.expected_content_length = len(message["body"])
            await send(message)

        await app(scope, receive, send_plainly)

    return answer
