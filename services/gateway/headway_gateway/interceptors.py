"""What every call passes through: the count of open calls and the bearer token on the way in, the translation of errors on the way out.

Owns: how many calls may be open, authentication, which role a call takes, the tenant that a token is bound to, and the rule that a client learns of an
unexpected error by an id, never by its text.
Must not know: what the calls do, or where tokens come from.
"""

import asyncio
import inspect
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, TypeAlias

import grpc
import structlog

from headway_gateway.credentials import ADMIN, GENERATE, Caller, TokenTable
from headway_gateway.statistics import GatewayStatistics
from headway_gateway.statuses import CallRefusedError

HEALTH_PREFIX = "/grpc.health.v1.Health/"
REFLECTION_PREFIX = "/grpc.reflection."
_ADMINS_METHODS = ("FlushCache", "SubscribeKvEvents", "StartProfile", "StopProfile")
VLLM_ENGINE_PREFIX = "/vllm.grpc.engine.VllmEngine/"
ROLE_OF_METHODS = {
    "/headway.v1.Generation/": GENERATE,
    "/headway.v1.Admin/": ADMIN,
    **{f"{VLLM_ENGINE_PREFIX}{method}": ADMIN for method in _ADMINS_METHODS},
    VLLM_ENGINE_PREFIX: GENERATE,
}
"""The role that methods take, by the beginning of their names, the first that fits; any valid token will do for others."""
TENANT_METADATA_KEY = "headway-tenant"
"""Where a caller names its tenant if the request has no field for it."""
_BEARER = "Bearer "
_MAX_TOKEN_CHARACTERS = 4096
_TELL_INTERVAL_S = 5.0
_RETRY_S = 1.0
_STATUS_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"

_log = structlog.get_logger("headway.gateway.calls")


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls whose handler raises: as told by ``CallRefusedError``, else as INTERNAL with an id that is logged.

    Cancellation passes through untouched. Must be the first interceptor but for the one that counts calls.
    """

    def __init__(self, statistics: GatewayStatistics) -> None:
        self._statistics = statistics

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """See ``grpc.aio.ServerInterceptor``."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method

        async def on_error(error: Exception, context: Context) -> NoReturn:
            if isinstance(error, CallRefusedError):
                self._statistics.refusals[error.reason,] += 1
            await _end_call(error, context, method)

        return _with_errors_told(handler, on_error)


class CallCountingInterceptor(grpc.aio.ServerInterceptor):
    """Counts calls by method and the status that they end with, and refusals by reason. Must come before all others."""

    def __init__(self, statistics: GatewayStatistics) -> None:
        self._statistics = statistics

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """See ``grpc.aio.ServerInterceptor``."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method.removeprefix("/")

        def note_end(code: str) -> None:
            self._statistics.calls[method, code] += 1

        return _with_end_noted(handler, note_end)


class OpenCallsInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls beyond ``most`` that are open at a time, before anything is done for them. Must come behind errors.

    gRPC's own limits end a call without details, or without anything said.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.num_open = 0
        self._num_refused = 0
        self._told_at = float("-inf")

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """See ``grpc.aio.ServerInterceptor``."""
        handler = await continuation(handler_call_details)
        return None if handler is None else _within(handler, self._counted)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if self.num_open >= self._most:
            self._note()
            raise CallRefusedError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self.num_open} calls are open; allowed: {self._most}",
                retry_after_s=_RETRY_S,
                reason="too_many_calls",
            )
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    def _note(self) -> None:
        self._num_refused += 1
        now = time.monotonic()
        if now - self._told_at >= _TELL_INTERVAL_S:
            self._told_at = now
            _log.warning("too many calls are open", refused=self._num_refused, allowed=self._most)


class AuthenticationInterceptor(grpc.aio.ServerInterceptor):
    """Lets pass what carries ``authorization: Bearer TOKEN`` of somebody who has the call's role.

    ``tokens`` gives those in force. Methods that begin with one of ``open_prefixes`` need no token.
    """

    def __init__(self, tokens: Callable[[], TokenTable], open_prefixes: tuple[str, ...] = ()) -> None:
        self._tokens = tokens
        self._open_prefixes = open_prefixes
        self.refused: Counter[str] = Counter()
        """Calls turned away, by status."""
        self._told_at = float("-inf")

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """See ``grpc.aio.ServerInterceptor``."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(self._open_prefixes):
            return handler
        try:
            caller = self._caller(handler_call_details)
            _require_role(caller, method)
        except CallRefusedError as refusal:
            self._note(refusal.code.name, method)
            return _refusing(handler, refusal)
        return handler if caller.tenant is None else _for_tenant(handler, caller.tenant)

    def _caller(self, details: grpc.HandlerCallDetails) -> Caller:
        values = [value for key, value in details.invocation_metadata if key == "authorization"]
        if not values:
            raise _unauthenticated("authorization metadata is missing; send: Bearer TOKEN")
        value = values[0].decode("latin-1") if isinstance(values[0], bytes) else values[0]
        token = value.removeprefix(_BEARER).strip()
        if len(values) > 1 or not value.startswith(_BEARER) or not 1 <= len(token) <= _MAX_TOKEN_CHARACTERS:
            raise _unauthenticated("authorization metadata is malformed; send once: Bearer TOKEN")
        caller = self._tokens().find(token)
        if caller is None:
            raise _unauthenticated("the bearer token is not valid")
        return caller

    def _note(self, status: str, method: str) -> None:
        self.refused[status] += 1
        now = time.monotonic()
        if now - self._told_at >= _TELL_INTERVAL_S:
            self._told_at = now
            _log.warning("calls refused", latest=method, **self.refused)


def _require_role(caller: Caller, method: str) -> None:
    role = next((role for prefix, role in ROLE_OF_METHODS.items() if method.startswith(prefix)), None)
    if role is not None and role not in caller.roles:
        raise CallRefusedError(
            grpc.StatusCode.PERMISSION_DENIED, f"this call takes a token with the role {role}, which yours lacks"
        )


def _unauthenticated(message: str) -> CallRefusedError:
    return CallRefusedError(grpc.StatusCode.UNAUTHENTICATED, message)


async def _end_call(error: Exception, context: Context, method: str) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, CallRefusedError):
        _log.debug("call refused", method=method, code=error.code.name, reason=error.reason, message=error.message)
        await context.abort(error.code, error.message, error.trailing_metadata())
    error_id = secrets.token_hex(8)
    _log.error("unexpected error in a call", method=method, error_id=error_id, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"internal error; the gateway's log tells more under {error_id}")
    raise AssertionError("abort does not return")


def _with_errors_told(handler: Handler, on_error: Callable[[Exception, Context], Awaitable[NoReturn]]) -> Handler:
    behaviour = _behaviour(handler)
    deserialize = _tolerant(handler)
    if inspect.isasyncgenfunction(behaviour):

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                _require_readable(request)
                async for response in behaviour(request, context):
                    yield response
            except Exception as error:  # noqa: BLE001  # Nothing unforeseen may reach a client with its text.
                await on_error(error, context)

        return _rebuilt(handler, stream, deserialize)

    async def call(request: Any, context: Context) -> Any:
        try:
            _require_readable(request)
            return await behaviour(request, context)
        except Exception as error:  # noqa: BLE001  # See above.
            await on_error(error, context)

    return _rebuilt(handler, call, deserialize)


def _with_end_noted(handler: Handler, note_end: Callable[[str], None]) -> Handler:
    behaviour = _behaviour(handler)

    def note(context: Context, error: BaseException | None) -> None:
        if isinstance(error, asyncio.CancelledError):
            note_end(grpc.StatusCode.CANCELLED.name)
        else:
            note_end(_STATUS_NAMES.get(context.code() or 0, "UNKNOWN"))  # type: ignore[call-overload]

    if inspect.isasyncgenfunction(behaviour):

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            error: BaseException | None = None
            try:
                async for response in behaviour(request, context):
                    yield response
            except BaseException as raised:
                error = raised
                raise
            finally:
                note(context, error)

        return _rebuilt(handler, stream)

    async def call(request: Any, context: Context) -> Any:
        error: BaseException | None = None
        try:
            return await behaviour(request, context)
        except BaseException as raised:
            error = raised
            raise
        finally:
            note(context, error)

    return _rebuilt(handler, call)


def _within(handler: Handler, surroundings: Callable[[], AbstractContextManager[None]]) -> Handler:
    """The same method, from its first line to its end within a context."""
    behaviour = _behaviour(handler)
    if inspect.isasyncgenfunction(behaviour):

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            with surroundings():
                async for response in behaviour(request, context):
                    yield response

        return _rebuilt(handler, stream)

    async def call(request: Any, context: Context) -> Any:
        with surroundings():
            return await behaviour(request, context)

    return _rebuilt(handler, call)


class _Unreadable:
    """Stands for a request that could not be parsed."""


def _tolerant(handler: Handler) -> Callable[[bytes], Any] | None:
    """A reading of single requests that never raises: what it raised would reach the client with its text."""
    deserialize = handler.request_deserializer
    if deserialize is None or handler.request_streaming:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except Exception:  # noqa: BLE001  # What protobuf raises differs between its implementations.
            return _Unreadable()

    return read


def _require_readable(request: Any) -> None:
    if isinstance(request, _Unreadable):
        raise CallRefusedError(
            grpc.StatusCode.INVALID_ARGUMENT, "the request cannot be parsed; allowed: this method's protobuf message"
        )


def _refusing(handler: Handler, refusal: CallRefusedError) -> Handler:
    async def refuse(request: Any, context: Context) -> NoReturn:  # noqa: ARG001
        raise refusal

    # What somebody without a right sends is not even parsed.
    return _rebuilt(handler, refuse, lambda data: data)


def _for_tenant(handler: Handler, tenant: str) -> Handler:
    """The same method; whatever tenant a request or its metadata names, it is this one's."""
    deserialize = handler.request_deserializer
    behaviour = _behaviour(handler)

    def deserialize_for_tenant(data: bytes) -> Any:
        request: Any = deserialize(data) if deserialize is not None else data
        if "tenant" in getattr(getattr(request, "DESCRIPTOR", None), "fields_by_name", {}):
            request.tenant = tenant
        return request

    def behave_for_tenant(request: Any, context: Context) -> Any:
        return behaviour(request, _TenantsContext(context, tenant))

    if inspect.isasyncgenfunction(behaviour):

        async def stream_for_tenant(request: Any, context: Context) -> AsyncIterator[Any]:
            async for response in behave_for_tenant(request, context):
                yield response

        return _rebuilt(handler, stream_for_tenant, deserialize_for_tenant)

    async def call_for_tenant(request: Any, context: Context) -> Any:
        return await behave_for_tenant(request, context)

    return _rebuilt(handler, call_for_tenant, deserialize_for_tenant)


class _TenantsContext:
    """A call's context whose metadata names this tenant, whatever the caller wrote."""

    def __init__(self, context: Context, tenant: str) -> None:
        self._context = context
        self._tenant = tenant

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """See ``grpc.aio.ServicerContext``."""
        others = (pair for pair in self._context.invocation_metadata() or () if pair[0] != TENANT_METADATA_KEY)
        return (*others, (TENANT_METADATA_KEY, self._tenant))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _behaviour(handler: Handler) -> Callable[[Any, Any], Any]:
    behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    assert behaviour is not None
    return behaviour


def _rebuilt(
    handler: Handler, behaviour: Callable[[Any, Any], Any], deserialize: Callable[[bytes], Any] | None = None
) -> Handler:
    """The same method, served by another function, with another reading of requests if one is given."""
    make: Callable[..., Handler] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(behaviour, deserialize or handler.request_deserializer, handler.response_serializer)
