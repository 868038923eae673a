"""A refusal's way to a gRPC client: status code, line, machine-readable details."""

import secrets
from collections.abc import Iterable, Mapping

import grpc
import structlog
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

STATUS_DETAILS_KEY = "grpc-status-details-bin"
ERROR_DOMAIN = "headway"
RETRY_S = 1.0
"""The usual wait before another attempt."""

_log = structlog.get_logger("headway.gateway.calls")


class CallRefusedError(Exception):
    """Ends a call.

    ``violations`` become a ``BadRequest``, ``retry_after_s`` a ``RetryInfo``, ``reason`` an ``ErrorInfo`` and a label
    of the metrics. ``field`` is what the message begins with where there is no violation: the field may be right.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        violations: Iterable[tuple[str, str]] = (),
        retry_after_s: float | None = None,
        reason: str = "",
        field: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.violations = tuple(violations)
        self.retry_after_s = retry_after_s
        self.reason = reason or code.name.lower()

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        """Return the details as trailing metadata."""
        details = []
        if self.violations:
            details.append(_pack(_bad_request(self.violations)))
        if self.retry_after_s is not None:
            delay = Duration()
            delay.FromNanoseconds(int(self.retry_after_s * 1e9))
            details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
        details.append(_pack(error_details_pb2.ErrorInfo(reason=self.reason.upper(), domain=ERROR_DOMAIN)))
        number: int = self.code.value[0]
        status = status_pb2.Status(code=number, message=self.message, details=details)
        return ((STATUS_DETAILS_KEY, status.SerializeToString()),)


def invalid_argument(field: str, description: str) -> CallRefusedError:
    """Make an INVALID_ARGUMENT about one field."""
    return invalid_arguments({field: description})


def beyond_context(field: str, description: str, context: int) -> CallRefusedError:
    """Make an INVALID_ARGUMENT about a field that does not fit into so many tokens.

    The reason is OpenAI's code for it, by which clients know that a shorter prompt would do. Many look for its words in
    place of the code.
    """
    description = f"{description}, since this model's maximum context length is {context} here"
    return CallRefusedError(
        grpc.StatusCode.INVALID_ARGUMENT,
        f"{field}: {description}",
        violations=[(field, description)],
        reason="context_length_exceeded",
    )


def invalid_arguments(violations: Mapping[str, str]) -> CallRefusedError:
    """Make an INVALID_ARGUMENT about several fields."""
    message = "; ".join(f"{field}: {description}" for field, description in violations.items())
    return CallRefusedError(grpc.StatusCode.INVALID_ARGUMENT, message, violations=violations.items())


def try_later(
    code: grpc.StatusCode, message: str, *, field: str = "", reason: str = "", after_s: float = RETRY_S
) -> CallRefusedError:
    """Make a refusal with ``RetryInfo``; ``field``: what it is about, which may be right."""
    told = f"{field}: {message}" if field else message
    return CallRefusedError(code, told, retry_after_s=after_s, reason=reason, field=field)


def past_deadline() -> CallRefusedError:
    """Make a DEADLINE_EXCEEDED."""
    return CallRefusedError(
        grpc.StatusCode.DEADLINE_EXCEEDED, "the call's deadline passed before the output was complete"
    )


def unexpected(error: BaseException, method: str) -> CallRefusedError:
    """Log an error whose text no client gets; return what it gets.

    A panic of a library in Rust is no ``Exception``, and ends a call like one. What is to end the process is raised again.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        raise error
    error_id = secrets.token_hex(8)
    _log.error("unexpected error in a call", method=method, error_id=error_id, exc_info=error)
    return CallRefusedError(grpc.StatusCode.INTERNAL, f"internal error; see {error_id} in the gateway's log")


def renamed(refusal: CallRefusedError, names: Iterable[tuple[str, str]]) -> CallRefusedError:
    """Use a caller's field names; ``names`` pairs prefixes of ours and of theirs, and the first that fits counts."""
    names = tuple(names)
    if not refusal.violations and refusal.field:
        message = refusal.message.removeprefix(f"{refusal.field}: ")
        field, after_s = _callers_name(refusal.field, names), refusal.retry_after_s or RETRY_S
        return try_later(refusal.code, message, field=field, reason=refusal.reason, after_s=after_s)
    if not refusal.violations:
        return refusal
    made = invalid_arguments({_callers_name(field, names): description for field, description in refusal.violations})
    return CallRefusedError(
        refusal.code,
        made.message,
        violations=made.violations,
        retry_after_s=refusal.retry_after_s,
        reason=refusal.reason,
    )


def _callers_name(field: str, names: Iterable[tuple[str, str]]) -> str:
    for ours, theirs in names:
        if field.startswith(ours):
            return theirs + field.removeprefix(ours)
    return field


def _bad_request(violations: Iterable[tuple[str, str]]) -> error_details_pb2.BadRequest:
    return error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
            for field, description in violations
        ]
    )


def _pack(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
