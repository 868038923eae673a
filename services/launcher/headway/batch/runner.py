"""Sends a batch's requests, many at once, and yields the answers in order.

Owns: how many requests are open, and what is tried again. Must not know: files, processes, what bodies mean.
"""

import asyncio
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import httpx2
import msgspec

from headway.batch.lines import BatchLine

OK = 200
_MOST_AHEAD = 16
"""Answers that wait for an earlier one, over the requests at a time."""

_TRY_AGAIN = frozenset({429, 502, 503, 504})
_OF_THE_LINE = frozenset({"chat_not_rendered", "constraint_not_judged"})
"""Codes of what may pass, but may as well be the request's own doing: it took too long."""

_CONFLICT, _CANCELLED = 409, "cancelled"
_STRANGER = frozenset({401, 403})
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_CONNECT_TIMEOUT_S = 10.0
_MOST_FOREIGN_TEXT = 2000


class ServerGoneError(Exception):
    """The server has answered nothing for too long; one line."""


class ServerRefusedError(Exception):
    """The server does not know the caller, so it would refuse every request; one line."""


class Server:
    """The gateway's HTTP API, and the patience with it.

    Args:
        url: without the path, as ``http://127.0.0.1:8000``.
        token: what the server knows the caller by; empty for none.
        tls: for ``https``; None for the system's certificates.
        concurrency: requests that are open at one time.
        retry_s: seconds without any answer, from a first failure on, after which it counts as gone.
        transport: instead of the network.
    """

    def __init__(
        self,
        url: str,
        *,
        concurrency: int,
        retry_s: float,
        token: str = "",
        tls: ssl.SSLContext | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self._concurrency = concurrency
        self._retry_s = retry_s
        self._heard_at = time.monotonic()
        self._client = httpx2.AsyncClient(
            base_url=url,
            headers={"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {}),
            verify=tls if tls is not None else True,
            timeout=httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            limits=httpx2.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            trust_env=False,
            transport=transport,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def answers(self, lines: Iterable[BatchLine]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the answer to each line, in OpenAI's batch format, in order.

        Raises:
            ServerGoneError: see ``retry_s``.
            ServerRefusedError: the token is wrong or missing.
        """
        places = asyncio.Semaphore(self._concurrency)
        asked: deque[asyncio.Task[dict[str, Any]]] = deque()

        async def ask(line: BatchLine) -> dict[str, Any]:
            try:
                return await self._answer(line)
            finally:
                places.release()

        try:
            for line in lines:
                await places.acquire()
                asked.append(asyncio.create_task(ask(line)))
                while asked[0].done() or len(asked) >= _MOST_AHEAD * self._concurrency:
                    yield await asked.popleft()
                    if not asked:
                        break
            while asked:
                yield await asked.popleft()
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _answer(self, line: BatchLine) -> dict[str, Any]:
        pause_s = _FIRST_PAUSE_S
        failing_since: float | None = None
        while True:
            problem, wait_s = "", pause_s
            response: httpx2.Response | None = None
            try:
                response = await self._client.post(line.url, content=line.body)
            except httpx2.TransportError as error:
                problem = f"{type(error).__name__}: {error}".removesuffix(": ")
            now = time.monotonic()
            since = now if failing_since is None else failing_since
            has_patience = now - since < self._retry_s
            if response is not None:
                if response.status_code in _STRANGER:
                    raise ServerRefusedError(
                        f"{self._client.base_url} refused with status {response.status_code}: {_reason(response)}"
                    )
                # After a connection broke, the request that it carried may live on for a moment, and have the line's id.
                is_old = failing_since is not None and has_patience and _is_conflict(response)
                is_of_the_line = _said(response, "code") in _OF_THE_LINE
                passes = has_patience if is_of_the_line else is_old or response.status_code in _TRY_AGAIN
                if is_of_the_line or not passes:
                    self._heard_at = now
                if not passes:
                    return _record(line, response)
                problem = f"status {response.status_code}"
                wait_s = max(pause_s, _seconds(response.headers.get("retry-after", "")))
            # An answer may take longer than ``retry_s``: the server is silent from the failure on.
            failing_since = since
            if now - max(self._heard_at, failing_since) >= self._retry_s:
                raise ServerGoneError(f"no answer from {self._client.base_url} for {self._retry_s:g} s ({problem})")
            await asyncio.sleep(min(wait_s, _LONGEST_PAUSE_S))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _record(line: BatchLine, response: httpx2.Response) -> dict[str, Any]:
    return {
        "id": line.answer_id,
        "custom_id": line.custom_id,
        "response": {
            "status_code": response.status_code,
            "request_id": response.headers.get("x-request-id", ""),
            "body": _body(response),
        },
        "error": None,
    }


def _body(response: httpx2.Response) -> Any:
    try:
        return msgspec.json.decode(response.content)
    except ValueError:  # of something between us and the gateway
        message = response.text[:_MOST_FOREIGN_TEXT]
        return {"error": {"message": message, "type": "unreadable_answer", "param": None, "code": None}}


def _is_conflict(response: httpx2.Response) -> bool:
    """Whether another request has this one's id. What an operator cancels has the same status."""
    return response.status_code == _CONFLICT and _said(response, "code") != _CANCELLED


def _reason(response: httpx2.Response) -> str:
    return _said(response, "message") or response.reason_phrase


def _said(response: httpx2.Response, field: str) -> str:
    """A field of the error; "" if it has none."""
    try:
        return str(_body(response)["error"][field])
    except (KeyError, TypeError):
        return ""


def _seconds(text: str) -> float:
    return float(text) if text.isdecimal() else 0.0
