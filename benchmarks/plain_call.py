"""A call of gRPC over a plain socket, and bare servers of grpcio and of asyncio: what each costs by itself.

Owns: the bytes of such a call. Must not know: what is measured with it.

    python benchmarks/plain_call.py 127.0.0.1:50970 127.0.0.1:50969      # grpcio's and asyncio's, until they are ended
"""

import asyncio
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import grpc

METHOD = "/headway.v1.Generation/Generate"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW = 0, 1, 3, 4, 6, 8
_LARGEST_WINDOW = struct.pack(">HI", 4, (1 << 31) - 1)


def plain_socket(address: str) -> socket.socket:
    """Return a connection that blocks and sends at once."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def echo(connection: socket.socket, data: bytes) -> float:
    """Send bytes to the bare server of asyncio; return when they were back, in seconds from sending."""
    began = time.perf_counter()
    connection.sendall(data)
    if len(connection.recv(len(data), socket.MSG_WAITALL)) < len(data):
        raise RuntimeError("the server closed the connection")
    return time.perf_counter() - began


class Message(NamedTuple):
    """One message of an answer."""

    at: float
    """When it came, by ``time.perf_counter``, in seconds."""
    data: bytes


class PlainCaller:
    """One connection, one call at a time; it blocks. It has no thread and no event loop that could be late."""

    def __init__(self, address: str) -> None:
        self._socket = plain_socket(address)
        window = _frame(_WINDOW, 0, 0, struct.pack(">I", 1 << 30))
        self._socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, _LARGEST_WINDOW) + window)
        self._held = b""
        self._stream = -1

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def call(self, request: bytes) -> list[Message]:
        """Send a request of ``METHOD``; return all messages of its answer."""
        self._stream += 2
        found: list[Message] = []
        held = b""
        head = _frame(_HEADERS, 4, self._stream, _HEAD)
        self._socket.sendall(head + _frame(_DATA, 1, self._stream, struct.pack(">BI", 0, len(request)) + request))
        for kind, flags, stream, payload in self._frames():
            if stream != self._stream:
                continue
            if kind == _RESET:
                raise RuntimeError("the server gave up the call")
            if kind == _DATA:
                at = time.perf_counter()
                held += payload
                while len(held) >= 5 and len(held) >= (end := 5 + int.from_bytes(held[1:5])):
                    found.append(Message(at, held[5:end]))
                    held = held[end:]
            if flags & 1:
                return found
        raise RuntimeError("the server closed the connection")

    def _frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        while True:
            while len(self._held) >= 9 and len(self._held) >= 9 + int.from_bytes(self._held[:3]):
                end = 9 + int.from_bytes(self._held[:3])
                kind, flags, stream = struct.unpack_from(">BBI", self._held, 3)
                payload, self._held = self._held[9:end], self._held[end:]
                if kind in {_SETTINGS, _PING} and not flags & 1:
                    self._socket.sendall(_frame(kind, 1, 0, payload if kind == _PING else b""))
                yield kind, flags, stream, payload
            data = self._socket.recv(65536)
            if not data:
                return
            self._held += data


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(text: str) -> bytes:
    return bytes((len(text),)) + text.encode()


_HEAD = b"".join(
    b"\0" + _literal(name) + _literal(value)
    for name, value in (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", METHOD),
        (":authority", "benchmark"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    )
)


class _Echo(asyncio.Protocol):
    """Sends what comes back: the least that a server in an event loop of Python does."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


async def serve_bare(address: str, echo_address: str) -> None:
    """Answer every call with three messages, of the sizes of a generation of one token, from grpcio's server; and echo."""
    host, _, port = echo_address.rpartition(":")
    await asyncio.get_running_loop().create_server(_Echo, host, int(port))

    async def answer(_request: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        for size in (40, 24, 60):
            await context.write(bytes(size))

    service, _, method = METHOD.strip("/").partition("/")
    handler = grpc.unary_stream_rpc_method_handler(answer)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    sys.setswitchinterval(0.0005)
    asyncio.run(serve_bare(*sys.argv[1:]))
