"""Web pages that may call: cross-origin resource sharing, as the Fetch standard has it (section 3.3, CORS protocol).

A browser asks before it sends what a page wants to send, and shows the page only answers that name its origin. Must not
know: what endpoints do.
"""

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from headway_gateway.openai.http_call import Message, Receive, Send

AsgiApplication: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]
Header: TypeAlias = tuple[bytes, bytes]

_VARIES = (b"vary", b"origin")
_SHOWN = (b"access-control-expose-headers", b"x-request-id, retry-after, retry-after-ms")
_METHODS = (b"access-control-allow-methods", b"GET, POST")
_KEPT = (b"access-control-max-age", b"600")
"""Seconds for which a browser need not ask again."""


def let_in(application: AsgiApplication, origins: frozenset[str]) -> AsgiApplication:
    """Return ``application`` as pages of these origins may call it; to it they look like other callers."""
    if not origins:
        return application

    async def answer(scope: Message, receive: Receive, send: Send) -> None:
        origin = _only(scope, b"origin")
        if origin is None or origin.decode("latin-1") not in origins:
            await application(scope, receive, send)
            return
        named = [(b"access-control-allow-origin", origin), _VARIES]
        if scope["method"] == "OPTIONS" and _only(scope, b"access-control-request-method") is not None:
            await _answer_browser(send, [*named, _METHODS, _KEPT, *_allowed_headers(scope)])
            return

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *named, _SHOWN]
            await send(message)

        others = [header for header in scope["headers"] if header[0] != b"origin"]
        await application({**scope, "headers": others}, receive, send_named)

    return answer


def _only(scope: Message, name: bytes) -> bytes | None:
    """The value of a header that a request has once."""
    values: list[bytes] = [value for key, value in scope["headers"] if key == name]
    return values[0] if len(values) == 1 else None


def _allowed_headers(scope: Message) -> list[Header]:
    """Clients of OpenAI send headers of their own, which change nothing."""
    wanted = _only(scope, b"access-control-request-headers")
    return [] if wanted is None else [(b"access-control-allow-headers", wanted)]


async def _answer_browser(send: Send, headers: list[Header]) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
