"""The client's errors, made from gRPC's."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

import grpc
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]


class HeadwayError(Exception):
    """A failed call. ``violations`` has (field, description) pairs; ``retry_after_s`` is the server's advice.

    ``reason`` is the gateway's code for a refusal.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        violations: tuple[tuple[str, str], ...] = (),
        retry_after_s: float | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.violations = violations
        self.retry_after_s = retry_after_s
        self.reason = reason


class InvalidRequestError(HeadwayError):
    """The request is wrong."""


class AuthenticationError(HeadwayError):
    """The token is missing, wrong, or lacks the right."""


class NotFoundError(HeadwayError):
    """No such request or model."""


class AlreadyExistsError(HeadwayError):
    """A live request has this id."""


class OverloadedError(HeadwayError):
    """The server has too much work now."""


class UnavailableError(HeadwayError):
    """No gateway or no model can serve."""


class DeadlineError(HeadwayError):
    """The given time has passed."""


class StreamCancelledError(HeadwayError):
    """The stream was cancelled."""


class ServerError(HeadwayError):
    """The server failed in some other way."""


_ERROR_TYPES: dict[grpc.StatusCode, type[HeadwayError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: AuthenticationError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: StreamCancelledError,
}


# gRPC's words where nothing listens: "failed to connect to all addresses; last error: UNKNOWN: ipv4:HOST:PORT: Failed to
# connect to remote host: Connection refused".
_NO_CONNECTION = re.compile(r"last error: \w+: (?:ipv[46]:)?(\S+): Failed to connect to remote host: (.+)$")


# The same beginning, where one side speaks TLS and the other does not, or its certificate is not trusted.
_NOT_UNDERSTOOD = re.compile(
    r"last error: \w+: (?:ipv[46]:)?(\S+): (?:Socket closed|.*reset by peer.*|.*handshake failed.*)$", re.DOTALL
)
_CLOSED = (
    "closed the connection; if it speaks TLS, name its root certificates; if it asks for a client certificate, name one "
    "that it trusts"
)
_TLS_FAULTS = {
    "WRONG_VERSION_NUMBER": "does not speak TLS; allowed: no certificates",
    "CERTIFICATE_VERIFY_FAILED": "shows a certificate that is not trusted here; allowed: root certificates that have signed it",
    "Socket closed": _CLOSED,
    "reset by peer": _CLOSED,
}


def _message_of(details: str) -> str:
    if found := _NO_CONNECTION.search(details):
        return f"no server at {unquote(found[1])} ({found[2]})"
    if found := _NOT_UNDERSTOOD.search(details):
        for fault, meaning in _TLS_FAULTS.items():
            if fault in found[0]:
                return f"the server at {unquote(found[1])} {meaning}"
    return details


def error_of(error: grpc.RpcError) -> HeadwayError:
    """Convert gRPC's error."""
    call: Any = error  # Both kinds of RpcError are calls too; their types do not show it.
    code: grpc.StatusCode = call.code()
    violations: list[tuple[str, str]] = []
    retry_after_s, reason = None, ""
    for key, value in call.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        for detail in status_pb2.Status.FromString(value).details:
            bad_request, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(bad_request):
                violations += [(item.field, item.description) for item in bad_request.field_violations]
            elif detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
            elif detail.Unpack(info):
                reason = info.reason.lower()
    return _ERROR_TYPES.get(code, ServerError)(
        code, _message_of(call.details() or ""), tuple(violations), retry_after_s, reason
    )


@contextmanager
def own_errors() -> Iterator[None]:
    """Raise ``HeadwayError`` in place of gRPC's errors."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_of(error) from error
