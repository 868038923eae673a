"""The check of bearer tokens, their roles and tenants. Must not know: where tokens come from."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import structlog

from headway_gateway.access.credentials import ADMIN, GENERATE, Caller, TokenTable
from headway_gateway.access.rare_warnings import RareWarning
from headway_gateway.grpc_server.call import Behaviour, Call
from headway_gateway.grpc_server.server import Surrounding
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


def authenticating(doorkeeper: Doorkeeper, open_prefixes: tuple[str, ...] = ()) -> Surrounding:
    """Require ``authorization: Bearer TOKEN`` and the method's role before a request is even parsed."""

    def around(behaviour: Behaviour, method: str) -> Behaviour:
        if method.startswith(open_prefixes):
            return behaviour
        role = next((role for prefix, role in ROLE_OF_METHODS.items() if method.startswith(prefix)), None)

        async def admitted(call: Call) -> None:
            values = [value for key, value in call.metadata if key == "authorization"]
            caller = doorkeeper.admit(values, role, method)
            if caller.tenant is not None:
                _act_for(caller.tenant, call)
            await behaviour(call)

        return admitted

    return around


def _act_for(tenant: str, call: Call) -> None:
    """A token's tenant wins over the request's and over that of the metadata."""

    def prepare(request: Any) -> None:
        if "tenant" in getattr(getattr(request, "DESCRIPTOR", None), "fields_by_name", {}):
            request.tenant = tenant

    call.prepare = prepare
    others = (pair for pair in call.metadata if pair[0] != TENANT_METADATA_KEY)
    call.metadata = (*others, (TENANT_METADATA_KEY, tenant))


def _require_role(caller: Caller, role: str | None) -> None:
    if role is not None and role not in caller.roles:
        raise CallRefusedError(
            grpc.StatusCode.PERMISSION_DENIED, f"this call needs a token with the role {role}; yours lacks it"
        )


def _unauthenticated(message: str) -> CallRefusedError:
    return CallRefusedError(grpc.StatusCode.UNAUTHENTICATED, message)
