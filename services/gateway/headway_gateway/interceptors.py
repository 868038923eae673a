"""Interceptors of every call: the limit of open calls, the counts by status, the errors that reach the client."""

# ruff: noqa: D102 (gRPC describes the methods)

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NoReturn

import grpc
import structlog

from headway_gateway.rare_warnings import RareWarning
from headway_gateway.rpc_handlers import Context, Handler, MethodInterceptor, within
from headway_gateway.statistics import GatewayStatistics
from headway_gateway.statuses import CallRefusedError, try_later

_STATUS_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}

_log = structlog.get_logger("headway.gateway.calls")


class ErrorInterceptor(MethodInterceptor):
    """Gives a failed call the status of ``CallRefusedError``, or INTERNAL and a logged id."""

    def __init__(self, statistics: GatewayStatistics) -> None:
        super().__init__()
        self._statistics = statistics

    def around(self, handler: Handler, method: str) -> Handler:
        @asynccontextmanager
        async def errors_sent(request: Any, context: Context) -> AsyncIterator[Context]:
            try:
                _require_readable(request)
                yield context
            except Exception as error:  # noqa: BLE001  # noqa: BLE001  # a client never gets the text of an unexpected error
                if isinstance(error, CallRefusedError):
                    self._statistics.refusals[error.reason,] += 1
                await _end_call(error, context, method)

        return within(handler, errors_sent, _tolerant(handler))


class CallCountingInterceptor(MethodInterceptor):
    """Counts calls by method and status."""

    def __init__(self, statistics: GatewayStatistics) -> None:
        super().__init__()
        self._statistics = statistics

    def around(self, handler: Handler, method: str) -> Handler:
        name = method.removeprefix("/")

        @asynccontextmanager
        async def end_counted(request: Any, context: Context) -> AsyncIterator[Context]:  # noqa: ARG001
            is_cancelled = False
            try:
                yield context
            except asyncio.CancelledError:
                is_cancelled = True
                raise
            finally:
                code = "CANCELLED" if is_cancelled else _STATUS_NAMES.get(context.code() or 0, "UNKNOWN")  # type: ignore[call-overload]
                self._statistics.calls[name, code] += 1

        return within(handler, end_counted)


class OpenCalls:
    """Counts open calls, over gRPC and HTTP alike, and refuses more than ``most``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.num_open = 0
        self._num_refused = 0
        self._warning = RareWarning(_log, "too many calls are open")

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Count a call.

        Raises:
            CallRefusedError: RESOURCE_EXHAUSTED.
        """
        if self.num_open >= self._most:
            self._num_refused += 1
            self._warning.warn(refused=self._num_refused, allowed=self._most)
            message = f"{self.num_open} calls are open; allowed: {self._most}"
            raise try_later(grpc.StatusCode.RESOURCE_EXHAUSTED, message, reason="too_many_calls")
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1


class OpenCallsInterceptor(MethodInterceptor):
    """Refuses calls beyond those of ``open_calls``, with a message."""

    def __init__(self, open_calls: OpenCalls) -> None:
        super().__init__()
        self._open_calls = open_calls

    def around(self, handler: Handler, method: str) -> Handler:  # noqa: ARG002
        return within(handler, self._counted)

    @asynccontextmanager
    async def _counted(self, request: Any, context: Context) -> AsyncIterator[Context]:  # noqa: ARG002
        with self._open_calls.one_more():
            yield context


def unexpected(error: Exception, method: str) -> CallRefusedError:
    """Log an error whose text no client gets; return what it gets."""
    error_id = secrets.token_hex(8)
    _log.error("unexpected error in a call", method=method, error_id=error_id, exc_info=error)
    return CallRefusedError(grpc.StatusCode.INTERNAL, f"internal error; see {error_id} in the gateway's log")


async def _end_call(error: Exception, context: Context, method: str) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, CallRefusedError):
        _log.debug("call refused", method=method, code=error.code.name, reason=error.reason, message=error.message)
        await context.abort(error.code, error.message, error.trailing_metadata())
    refusal = unexpected(error, method)
    await context.abort(refusal.code, refusal.message)
    raise AssertionError("abort does not return")


class _Unreadable:
    """A request that could not be parsed."""


def _tolerant(handler: Handler) -> Callable[[bytes], Any] | None:
    """Never raise: the error's text would reach the client."""
    deserialize = handler.request_deserializer
    if deserialize is None or handler.request_streaming:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except Exception:  # noqa: BLE001  # noqa: BLE001  # protobuf's implementations raise different errors
            return _Unreadable()

    return read


def _require_readable(request: Any) -> None:
    if isinstance(request, _Unreadable):
        raise CallRefusedError(
            grpc.StatusCode.INVALID_ARGUMENT, "the request cannot be parsed; allowed: this method's protobuf message"
        )
