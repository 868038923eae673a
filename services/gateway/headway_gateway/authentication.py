"""The check of bearer tokens, their roles and tenants. Must not know: where tokens come from."""

# ruff: noqa: D102 (gRPC describes the methods)

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc
import structlog

from headway_gateway.credentials import ADMIN, GENERATE, Caller, TokenTable
from headway_gateway.rare_warnings import RareWarning
from headway_gateway.rpc_handlers import Context, Handler, NextInterceptor, rebuilt, within
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
"""The first matching prefix counts. Other methods need any valid token."""
TENANT_METADATA_KEY = "headway-tenant"
"""Names the tenant, if the request has no field for it."""
_BEARER = "Bearer "
_MAX_TOKEN_CHARACTERS = 4096

_log = structlog.get_logger("headway.gateway.calls")


class Doorkeeper:
    """Admits callers by their token, over gRPC and HTTP alike."""

    def __init__(self, tokens: Callable[[], TokenTable]) -> None:
        self._tokens = tokens
        self.refused: Counter[str] = Counter()
        """Calls turned away, by status."""
        self._warning = RareWarning(_log, "calls refused")

    def admit(self, authorization: Sequence[str | bytes], role: str | None, method: str) -> Caller:
        """Return the caller; ``authorization`` are the values sent under this name, ``role`` is the one it needs.

        Raises:
            CallRefusedError: UNAUTHENTICATED, or PERMISSION_DENIED.
        """
        try:
            caller = self._caller(authorization)
            _require_role(caller, role)
        except CallRefusedError as refusal:
            self.refused[refusal.code.name] += 1
            self._warning.warn(latest=method, **self.refused)
            raise
        return caller

    def _caller(self, values: Sequence[str | bytes]) -> Caller:
        if not values:
            raise _unauthenticated("authorization is missing; send: Bearer TOKEN")
        value = values[0].decode("latin-1") if isinstance(values[0], bytes) else values[0]
        token = value.removeprefix(_BEARER).strip()
        if len(values) > 1 or not value.startswith(_BEARER) or not 1 <= len(token) <= _MAX_TOKEN_CHARACTERS:
            raise _unauthenticated("authorization is malformed; send once: Bearer TOKEN")
        caller = self._tokens().find(token)
        if caller is None:
            raise _unauthenticated("the bearer token is not valid")
        return caller


class AuthenticationInterceptor(grpc.aio.ServerInterceptor):
    """Requires ``authorization: Bearer TOKEN`` and the method's role."""

    def __init__(self, doorkeeper: Doorkeeper, open_prefixes: tuple[str, ...] = ()) -> None:
        self._doorkeeper = doorkeeper
        self._open_prefixes = open_prefixes

    async def intercept_service(
        self, continuation: NextInterceptor, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(self._open_prefixes):
            return handler
        values = [value for key, value in handler_call_details.invocation_metadata if key == "authorization"]
        role = next((role for prefix, role in ROLE_OF_METHODS.items() if method.startswith(prefix)), None)
        try:
            caller = self._doorkeeper.admit(values, role, method)
        except CallRefusedError as refusal:
            return _refusing(handler, refusal)
        return handler if caller.tenant is None else _for_tenant(handler, caller.tenant)


def _require_role(caller: Caller, role: str | None) -> None:
    if role is not None and role not in caller.roles:
        raise CallRefusedError(
            grpc.StatusCode.PERMISSION_DENIED, f"this call needs a token with the role {role}; yours lacks it"
        )


def _unauthenticated(message: str) -> CallRefusedError:
    return CallRefusedError(grpc.StatusCode.UNAUTHENTICATED, message)


def _refusing(handler: Handler, refusal: CallRefusedError) -> Handler:
    async def refuse(request: Any, context: Context) -> NoReturn:  # noqa: ARG001
        raise refusal

    # A request without the right token is not even parsed.
    return rebuilt(handler, refuse, lambda data: data)


def _for_tenant(handler: Handler, tenant: str) -> Handler:
    deserialize = handler.request_deserializer

    def deserialize_for_tenant(data: bytes) -> Any:
        request: Any = deserialize(data) if deserialize is not None else data
        if "tenant" in getattr(getattr(request, "DESCRIPTOR", None), "fields_by_name", {}):
            request.tenant = tenant
        return request

    @asynccontextmanager
    async def as_tenant(request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: ARG001
        yield _TenantsContext(context, tenant)

    return within(handler, as_tenant, deserialize_for_tenant)


class _TenantsContext:
    def __init__(self, context: Context, tenant: str) -> None:
        self._context = context
        self._tenant = tenant

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        others = (pair for pair in self._context.invocation_metadata() or () if pair[0] != TENANT_METADATA_KEY)
        return (*others, (TENANT_METADATA_KEY, self._tenant))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)
