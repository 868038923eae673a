"""What every call passes through: the bearer token on the way in, the translation of errors on the way out.

Owns: authentication, and the rule that a client learns of an unexpected error by an id, never by its text.
Must not know: what the calls do.
"""

import hmac
import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
import structlog

from headway_gateway.statuses import CallRefusedError

HEALTH_PREFIX = "/grpc.health.v1.Health/"
_BEARER = "Bearer "

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"

_log = structlog.get_logger("headway.gateway.calls")


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls whose handler raises: as told by ``CallRefusedError``, else as INTERNAL with an id that is logged.

    Cancellation passes through untouched. Must be the first interceptor.
    """

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """See ``grpc.aio.ServerInterceptor``."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method

        async def on_error(error: Exception, context: Context) -> NoReturn:
            await _end_call(error, context, method)

        return _with_errors_told(handler, on_error)


class AuthenticationInterceptor(grpc.aio.ServerInterceptor):
    """Lets pass what carries ``authorization: Bearer TOKEN``, and health checks."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """See ``grpc.aio.ServerInterceptor``."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(HEALTH_PREFIX):
            return handler
        problem = self._problem(handler_call_details)
        return handler if problem is None else _refusing(handler, problem)

    def _problem(self, details: grpc.HandlerCallDetails) -> str | None:
        values = [value for key, value in details.invocation_metadata if key == "authorization"]
        if not values:
            return "authorization metadata is missing; send: Bearer TOKEN"
        value = values[0].decode("latin-1") if isinstance(values[0], bytes) else values[0]
        if len(values) > 1 or not value.startswith(_BEARER):
            return "authorization metadata is malformed; send once: Bearer TOKEN"
        # Constant time, so that the answer's delay does not tell how much of a guess was right.
        if not hmac.compare_digest(value.removeprefix(_BEARER).strip().encode(), self._token):
            return "the bearer token is not valid"
        return None


async def _end_call(error: Exception, context: Context, method: str) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, CallRefusedError):
        await context.abort(error.code, error.message, error.trailing_metadata())
    error_id = secrets.token_hex(8)
    _log.error("unexpected error in a call", method=method, error_id=error_id, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"internal error; the gateway's log tells more under {error_id}")
    raise AssertionError("abort does not return")


def _with_errors_told(handler: Handler, on_error: Callable[[Exception, Context], Awaitable[NoReturn]]) -> Handler:
    behaviour = _behaviour(handler)
    if inspect.isasyncgenfunction(behaviour):

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                async for response in behaviour(request, context):
                    yield response
            except Exception as error:  # noqa: BLE001  # Nothing unforeseen may reach a client with its text.
                await on_error(error, context)

        return _rebuilt(handler, stream)

    async def call(request: Any, context: Context) -> Any:
        try:
            return await behaviour(request, context)
        except Exception as error:  # noqa: BLE001  # See above.
            await on_error(error, context)

    return _rebuilt(handler, call)


def _refusing(handler: Handler, problem: str) -> Handler:
    async def refuse(request: Any, context: Context) -> NoReturn:  # noqa: ARG001
        raise CallRefusedError(grpc.StatusCode.UNAUTHENTICATED, problem)

    return _rebuilt(handler, refuse)


def _behaviour(handler: Handler) -> Callable[[Any, Any], Any]:
    behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    assert behaviour is not None
    return behaviour


def _rebuilt(handler: Handler, behaviour: Callable[[Any, Any], Any]) -> Handler:
    """The same method, served by another function."""
    make: Callable[..., Handler] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(behaviour, handler.request_deserializer, handler.response_serializer)
