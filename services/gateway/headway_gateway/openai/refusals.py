"""A refusal as HTTP: the status, the headers, OpenAI's error object. Must not know: sockets, requests."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import grpc
import msgspec

from headway_gateway.statuses import CallRefusedError

CLIENT_CLOSED = 499
"""Nobody reads it; nginx's number for a client that has gone."""

_Code = grpc.StatusCode
_INVALID, _SERVER = "invalid_request_error", "server_error"
_STATUSES = {
    _Code.CANCELLED: (CLIENT_CLOSED, "cancelled_error"),
    _Code.INVALID_ARGUMENT: (400, _INVALID),
    _Code.FAILED_PRECONDITION: (400, _INVALID),
    _Code.OUT_OF_RANGE: (400, _INVALID),
    _Code.UNAUTHENTICATED: (401, "authentication_error"),
    _Code.PERMISSION_DENIED: (403, "permission_error"),
    _Code.NOT_FOUND: (404, "not_found_error"),
    _Code.ABORTED: (409, "conflict_error"),
    _Code.ALREADY_EXISTS: (409, "conflict_error"),
    _Code.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    _Code.INTERNAL: (500, _SERVER),
    _Code.UNIMPLEMENTED: (501, "not_implemented_error"),
    _Code.UNAVAILABLE: (503, "unavailable_error"),
    _Code.DEADLINE_EXCEEDED: (504, "timeout_error"),
}
"""As google.rpc.Code maps them."""


class HttpRefusedError(CallRefusedError):
    """A refusal with an HTTP status that no gRPC status has."""

    def __init__(
        self,
        status: int,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str,
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(code, message, reason=reason)
        self.status = status
        self.headers = tuple(headers)


class Refusal(NamedTuple):
    """An answer that refuses. ``body`` is JSON."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class _Error(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class _ErrorObject(msgspec.Struct):
    error: _Error


def http_refusal(error: CallRefusedError) -> Refusal:
    """Return ``error`` as an answer, with the time to come again if it has one."""
    status, kind = _STATUSES.get(error.code, (500, _SERVER))
    headers: list[tuple[bytes, bytes]] = []
    if isinstance(error, HttpRefusedError):
        status, kind = error.status, _INVALID
        headers += error.headers
    if error.retry_after_s is not None:
        headers += [
            (b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))),
            (b"retry-after-ms", b"%d" % math.ceil(error.retry_after_s * 1e3)),
        ]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    param = error.violations[0][0] if error.violations else None
    body = msgspec.json.encode(_ErrorObject(_Error(error.message, kind, param, error.reason)))
    return Refusal(status, headers, body)
