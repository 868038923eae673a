"""What stands around every call over gRPC: the count of ends, the limit of open calls."""

import asyncio
from types import TracebackType

import grpc
import structlog

from headway_gateway.access.rare_warnings import RareWarning
from headway_gateway.figures.statistics import GatewayStatistics
from headway_gateway.grpc_server.call import Behaviour, Call
from headway_gateway.grpc_server.server import Surrounding
from headway_gateway.statuses import CallRefusedError, try_later

_log = structlog.get_logger("headway.gateway.calls")


def counting(statistics: GatewayStatistics) -> Surrounding:
    """Count calls by method and status, and refusals by reason."""

    def around(behaviour: Behaviour, method: str) -> Behaviour:
        name = method.removeprefix("/")

        async def counted(call: Call) -> None:
            code = grpc.StatusCode.INTERNAL
            try:
                await behaviour(call)
                code = grpc.StatusCode.OK
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED
                raise
            except CallRefusedError as refusal:
                code = refusal.code
                statistics.refusals[refusal.reason,] += 1
                _log.debug(
                    "call refused", method=method, code=code.name, reason=refusal.reason, message=refusal.message
                )
                raise
            finally:
                statistics.calls[name, code.name] += 1

        return counted

    return around


class OpenCalls:
    """Counts open calls, over gRPC and HTTP alike, and refuses more than ``most``: a call is open inside ``with``.

    Raises:
        CallRefusedError: on entering, RESOURCE_EXHAUSTED.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.num_open = 0
        self._num_refused = 0
        self._warning = RareWarning(_log, "too many calls are open")

    def __enter__(self) -> None:
        if self.num_open >= self._most:
            self._num_refused += 1
            self._warning.warn(refused=self._num_refused, allowed=self._most)
            message = f"{self.num_open} calls are open; allowed: {self._most}"
            raise try_later(grpc.StatusCode.RESOURCE_EXHAUSTED, message, reason="too_many_calls")
        self.num_open += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.num_open -= 1

    def around(self, behaviour: Behaviour, method: str) -> Behaviour:  # noqa: ARG002
        """Count a method's calls over gRPC."""

        async def limited(call: Call) -> None:
            with self:
                await behaviour(call)

        return limited
