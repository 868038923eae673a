"""Listens, and leads each call to the handler of its method. Must not know: HTTP/2, any one method."""

import asyncio
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import grpc

from headway_gateway.accepting import Acceptor, Entrance
from headway_gateway.grpc_server.call import Behaviour, Call
from headway_gateway.grpc_server.connection import Bounds, Connection, Stream
from headway_gateway.grpc_server.header_blocks import Headers
from headway_gateway.grpc_server.wire import RequestHead, read_head, refusal_without_call
from headway_gateway.statuses import CallRefusedError

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Surrounding: TypeAlias = Callable[[Behaviour, str], Behaviour]
"""Puts something around the behaviour of a method, which it is told: once, not for each call."""

_CLOSE_S = 0.5


class _Method(NamedTuple):
    serve: Behaviour
    takes_many: bool


class GrpcServer:
    """Serves the handlers that generated code adds. The first of ``surroundings`` is the outermost."""

    def __init__(self, surroundings: Sequence[Surrounding], bounds: Bounds, *, most_message_bytes: int) -> None:
        self._surroundings = surroundings
        self._bounds = bounds
        self._most_bytes = most_message_bytes
        self._methods: dict[str, _Method] = {}
        self._connections: set[Connection] = set()
        self._acceptors: list[Acceptor] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Serve a service; generated code calls this."""
        for name, handler in handlers.items():
            path = f"/{service}/{name}"
            serve = _behaviour_of(handler)
            for surrounding in reversed(self._surroundings):
                serve = surrounding(serve, path)
            self._methods[path] = _Method(serve, bool(handler.request_streaming))

    def add_generic_rpc_handlers(self, handlers: Iterable[object]) -> None:
        """Do nothing: generated code tells the same methods one by one as well."""

    def start(self, entrance: Entrance) -> None:
        """Accept connections; the sockets are closed with the server."""
        self._acceptors = entrance.open(
            lambda: Connection(functools.partial(self._open, _Heads()), self._bounds, self._connections)
        )

    @property
    def connections(self) -> Collection[Connection]:
        """The connections that are open."""
        return self._connections

    async def stop(self, grace_s: float) -> None:
        """Take no new calls; cancel what has not ended within ``grace_s`` seconds."""
        for acceptor in self._acceptors:
            acceptor.close()
        for connection in list(self._connections):
            connection.go_away()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._disconnect()

    async def _disconnect(self) -> None:
        for connection in list(self._connections):
            connection.close()
        ends_at = asyncio.get_running_loop().time() + _CLOSE_S
        while self._connections:  # a client may leave the last bytes unread
            if asyncio.get_running_loop().time() >= ends_at:
                for connection in list(self._connections):
                    connection.abort()
            await asyncio.sleep(0.01)

    def _open(self, heads: "_Heads", stream: Stream, headers: Headers) -> Call | None:
        head = heads.read(headers)
        method = self._methods.get(head.path)
        if head.problem is not None:
            stream.finish(refusal_without_call(head.problem, head.http_status))
            return None
        if method is None:
            unknown = CallRefusedError(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            stream.finish(refusal_without_call(unknown))
            return None
        return Call(stream, head, method.serve, self._tasks, takes_many=method.takes_many, most_bytes=self._most_bytes)


class _Heads:
    """The heads of one connection's calls: a client sends the same headers again and again, which are then the same list."""

    def __init__(self) -> None:
        self._headers: Headers = []
        self._head = read_head(self._headers)

    def read(self, headers: Headers) -> RequestHead:
        """Return the head that headers are."""
        if headers is not self._headers:
            self._headers, self._head = headers, read_head(headers)
        return self._head


def _behaviour_of(handler: Handler) -> Behaviour:
    """Return how calls of a handler are served, whichever of gRPC's four kinds it is."""
    function: Callable[[Any, Any], Any] | None = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    assert function is not None
    deserialize, serialize = handler.request_deserializer, handler.response_serializer
    yields = inspect.isasyncgenfunction(function)

    async def serve(call: Call) -> None:
        call.serialize = serialize
        request = call.requests(deserialize) if handler.request_streaming else await call.request(deserialize)
        if yields:
            async for response in function(request, call):
                await call.write(response)
            return
        response = await function(request, call)
        if not handler.response_streaming:
            await call.write(response)

    return serve
