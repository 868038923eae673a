"""Accepts the connections of one listening socket. Must not know: what is served on them.

The event loop's own servers do the same, but not all of them tell a connection's peer before its TLS handshake is done, and
without a file descriptor left they complain for each try, or throw the connection away.
"""

import asyncio
import contextvars
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

BACKLOG = 2048
"""How many connections the system keeps waiting."""

peer: contextvars.ContextVar[str] = contextvars.ContextVar("peer", default="")
"""Whose connection it is, as HOST:PORT, in all that the event loop does for one that was accepted."""

_ACCEPTED_AT_ONCE = 64
_PAUSE_S = 1.0
_TLS_HANDSHAKE_S = 10.0


class Entrance(NamedTuple):
    """Where a server is reached, and how; ``note_wait`` is told why connections cannot be accepted now."""

    sockets: Sequence[socket.socket]
    note_wait: Callable[[str], None]
    tls: ssl.SSLContext | None = None

    def open(self, make_protocol: Callable[[], asyncio.Protocol]) -> "list[Acceptor]":
        """Give each connection a protocol from now on; the sockets are closed with what is returned."""
        return [Acceptor(one, make_protocol, self.tls, self.note_wait) for one in self.sockets]


class Acceptor:
    """Gives each connection of ``listening`` a protocol. It begins at once and owns the socket."""

    def __init__(
        self,
        listening: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        note_wait: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._make_protocol = make_protocol
        self._tls = tls
        self._note_wait = note_wait
        self._connecting: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        listening.listen(BACKLOG)
        listening.setblocking(False)
        self._begin()

    def close(self) -> None:
        """Accept nothing more; end the connections that have no protocol yet."""
        if self._pause is not None:
            self._pause.cancel()
        elif self._listening.fileno() >= 0:
            self._loop.remove_reader(self._listening.fileno())
        for task in self._connecting:
            task.cancel()
        self._listening.close()

    def _begin(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listening.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, place = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no file descriptor is left, or the system has no memory
                self._note_wait(f"not accepted: {error.strerror}")
                self._loop.remove_reader(self._listening.fileno())
                self._pause = self._loop.call_later(_PAUSE_S, self._begin)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._connect(connection, place))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: socket.socket, place: tuple[Any, ...]) -> None:
        host, port = place[:2]
        peer.set(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=_TLS_HANDSHAKE_S if self._tls else None,
            )
        except (OSError, asyncio.CancelledError):
            connection.close()  # gone, or it does not speak TLS
