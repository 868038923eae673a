"""The calls behind a look and an order. Must not know: keys, or pictures."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import grpc

from headway.client import AsyncClient, HeadwayError
from headway_lab.top.controls import Order, OrderKind
from headway_lab.top.history import Look
from headway_proto.wording import one_line

ANSWER_TIMEOUT_S = 6.0
"""A little longer than a gateway waits for its scheduler, so that its own message arrives."""

AnswerT = TypeVar("AnswerT")


class NoAnswerError(Exception):
    """A call failed; the message is one line for operators."""


class Server:
    """The Admin service. A list costs the scheduler time per request, so more than ``max_listed`` are not listed."""

    def __init__(self, client: AsyncClient, *, max_listed: int) -> None:
        self._client = client
        self._max_listed = max_listed

    async def look(self) -> Look:
        """Ask for everything that is shown.

        Raises:
            NoAnswerError: a call failed.
        """
        status = await _answer(self._client.status())
        is_listed = status.num_running + status.num_waiting <= self._max_listed
        requests = tuple(await _answer(self._client.requests())) if is_listed else None
        return Look(taken_at=asyncio.get_running_loop().time(), status=status, requests=requests)

    async def carry_out(self, order: Order) -> str:
        """Send an order; return its outcome, or an explanation.

        Raises:
            NoAnswerError: the call failed.
        """
        match order.kind:
            case OrderKind.PAUSE:
                await _answer(self._client.pause())
                return "paused: waiting requests are not admitted until r resumes"
            case OrderKind.RESUME:
                await _answer(self._client.resume())
                return "resumed"
            case OrderKind.DRAIN:
                await _answer(self._client.drain())
                return "draining: new requests are refused"
            case OrderKind.DRAIN_EXECUTOR:
                await _answer(self._client.drain_executor(order.executor))
                return f"executor {order.executor} is draining: its requests go on elsewhere until u undoes it"
            case OrderKind.UNDRAIN_EXECUTOR:
                await _answer(self._client.undrain_executor(order.executor))
                return f"executor {order.executor} takes requests again"
            case OrderKind.SET_ROLE:
                await _answer(self._client.set_executor_role(order.executor, order.role))
                return f"executor {order.executor} has the role {order.role}"
            case OrderKind.CANCEL:
                await _answer(self._client.cancel(order.request_id))
                return f"cancelled {order.request_id}"
            case OrderKind.EXPLAIN:
                answer = await _answer(self._client.explain(order.request_id))
                return f"{order.request_id}: {answer.explanation}"


async def _answer(call: Awaitable[AnswerT]) -> AnswerT:
    try:
        # Until Python 3.12 wait_for may lose a cancellation that comes together with the answer.
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await call
    except HeadwayError as error:
        raise NoAnswerError(_in_words(error)) from error
    except TimeoutError:
        raise NoAnswerError(f"no answer within {ANSWER_TIMEOUT_S:g} s") from None


def _in_words(error: HeadwayError) -> str:
    reason = one_line(error)
    if error.code is grpc.StatusCode.PERMISSION_DENIED:
        return f"the token needs the role admin ({reason})"
    if error.code is grpc.StatusCode.UNAUTHENTICATED:
        return f"the server wants a token with the role admin; name its file with --token-file ({reason})"
    return reason
