"""Methods of a gRPC server with something around them."""

import inspect
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias

import grpc

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
NextInterceptor: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"


class MethodInterceptor(grpc.aio.ServerInterceptor):
    """Puts something around every call. What it puts around a method is made once, not for each call."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Handler, Handler]] = {}

    @abstractmethod
    def around(self, handler: Handler, method: str) -> Handler:
        """Return the method with something around it."""

    async def intercept_service(  # noqa: D102 (gRPC describes it)
        self, continuation: NextInterceptor, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        made = self._made.get(method)
        if made is None or made[0] is not handler:  # whoever is behind may make another for each call
            made = self._made[method] = handler, self.around(handler, method)
        return made[1]


def within(
    handler: Handler,
    surroundings: Callable[[Any, Context], AbstractAsyncContextManager[Context]],
    deserialize: Callable[[bytes], Any] | None = None,
) -> Handler:
    """Return the method inside ``surroundings(request, context)``, which gives its context."""
    behaviour: Callable[[Any, Any], Any] | None = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    assert behaviour is not None
    if inspect.isasyncgenfunction(behaviour):

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            async with surroundings(request, context) as seen:
                async for response in behaviour(request, seen):
                    yield response

        return rebuilt(handler, stream, deserialize)

    async def call(request: Any, context: Context) -> Any:
        async with surroundings(request, context) as seen:
            return await behaviour(request, seen)

    return rebuilt(handler, call, deserialize)


def rebuilt(
    handler: Handler, behaviour: Callable[[Any, Any], Any], deserialize: Callable[[bytes], Any] | None = None
) -> Handler:
    """Return the method, served by ``behaviour``."""
    make: Callable[..., Handler] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(behaviour, deserialize or handler.request_deserializer, handler.response_serializer)
