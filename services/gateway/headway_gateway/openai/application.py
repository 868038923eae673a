"""The ASGI application: who may ask for what, and every error as an answer. Must not know: what endpoints do."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple, TypeAlias

import grpc
import structlog

from headway_gateway.access.authentication import Doorkeeper
from headway_gateway.access.interceptors import OpenCalls
from headway_gateway.figures.statistics import GatewayStatistics
from headway_gateway.openai.http_call import ClientGoneError, HttpCall, Message, Receive, Send
from headway_gateway.openai.refusals import HttpRefusedError
from headway_gateway.statuses import CallRefusedError, unexpected
from headway_proto.wording import shown

Handler: TypeAlias = Callable[[HttpCall, bytes], Awaitable[None]]

_log = structlog.get_logger("headway.gateway.calls")


class Route(NamedTuple):
    """``handler`` answers ``method`` of ``path`` (with a slash at its end: and of what follows it).

    ``role`` is the one that a caller needs; without one any valid token does. ``is_open``: no token is needed.
    """

    method: str
    path: str
    handler: Handler
    role: str | None
    is_open: bool = False


class Bounds(NamedTuple):
    """A body's bounds."""

    most_bytes: int
    most_s: float


class Application:
    """Answers every request, whatever it is."""

    def __init__(
        self,
        routes: Iterable[Route],
        *,
        doorkeeper: Doorkeeper | None,
        open_calls: OpenCalls,
        statistics: GatewayStatistics,
        bounds: Bounds,
    ) -> None:
        """Without a ``doorkeeper`` no call needs a token."""
        self._routes: dict[str, dict[str, Route]] = {}
        for route in routes:
            self._routes.setdefault(route.path, {})[route.method] = route
        self._doorkeeper = doorkeeper
        self._open_calls = open_calls
        self._statistics = statistics
        self._bounds = bounds

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        call = HttpCall(scope, receive, send)
        path = self._known_path(call.path)
        method = f"HTTP{path or ' of an unknown path'}"
        code = grpc.StatusCode.CANCELLED
        try:
            code = await self._answer(call, path, method)
        except ClientGoneError:
            _log.debug("client gone", method=method)
        finally:
            self._statistics.calls[method, code.name] += 1

    async def _answer(self, call: HttpCall, path: str, method: str) -> grpc.StatusCode:
        try:
            route = self._route(call, path)
            _require_no_page(call)
            self._admit(call, route, method)
            with self._open_calls:
                call.read_deadline()
                async with call.ended_by_deadline():
                    body = await call.read_body(*self._bounds)
                    async with call.ended_by_disconnect():
                        await route.handler(call, body)
        except CallRefusedError as refusal:
            self._statistics.refusals[refusal.reason,] += 1
            _log.debug("call refused", method=method, code=refusal.code.name, reason=refusal.reason)
            await call.refuse(refusal)
            return refusal.code
        except (ClientGoneError, asyncio.CancelledError):
            raise
        except BaseException as error:  # noqa: BLE001  # a client never gets the text of an unexpected error
            await call.refuse(unexpected(error, method))
            return grpc.StatusCode.INTERNAL
        return grpc.StatusCode.OK

    def _known_path(self, path: str) -> str:
        if path in self._routes:
            return path
        return next((known for known in self._routes if known.endswith("/") and path.startswith(known)), "")

    def _route(self, call: HttpCall, path: str) -> Route:
        methods = self._routes.get(path)
        if methods is None:
            raise CallRefusedError(
                grpc.StatusCode.NOT_FOUND, f"path: {shown(call.path)} is not served; see docs/openai.md"
            )
        route = methods.get("GET" if call.method == "HEAD" else call.method)
        if route is None:
            allowed = ", ".join(methods)
            raise HttpRefusedError(
                405,
                grpc.StatusCode.UNIMPLEMENTED,
                f"method: {shown(call.method)} is not allowed here; allowed: {allowed}",
                reason="method_not_allowed",
                headers=[(b"allow", allowed.encode())],
            )
        return route

    def _admit(self, call: HttpCall, route: Route, method: str) -> None:
        if self._doorkeeper is not None and not route.is_open:
            call.tenant = self._doorkeeper.admit(call.headers("authorization"), route.role, method).tenant


def _require_no_page(call: HttpCall) -> None:
    """A browser would let any page send a request to loopback, in the name of whoever looks at the page."""
    if origins := call.headers("origin"):
        raise CallRefusedError(
            grpc.StatusCode.PERMISSION_DENIED,
            f"requests of pages of {shown(origins[0])} are refused; allowed: those of allowed_origins",
            reason="web_page",
        )
