"""What the bench needs of a server.

Owns: the protocol. Must not know: any server, or when requests are sent.
"""

from typing import Any, Protocol

import msgspec

from headway_lab.bench.records import Answer
from headway_lab.workload.requests import PlannedRequest

UNKNOWN_CONTEXT = 1 << 24


class TargetError(Exception):
    """The server cannot be benched; the message is one line."""


class TargetInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The server that is benched. ``counted_by`` says how tokens are counted. ``context_length`` is ``UNKNOWN_CONTEXT``
    if the server does not say.
    """

    model: str
    address: str
    runs_on: str
    context_length: int
    counted_by: str


class Target(Protocol):
    """A server. ``open`` comes first."""

    async def open(self) -> TargetInfo:
        """Connect, and ask what is served.

        Raises:
            TargetError: it does not answer.
        """
        ...

    def prepare(self, request: PlannedRequest) -> Any:
        """Do everything that can be done before the time of sending; the result goes to ``send``."""
        ...

    async def send(self, prepared: Any, answer: Answer) -> None:
        """Send a request and follow its answer to the end; cancellation ends it.

        Raises:
            RequestFailed: there was no end, or an error.
        """
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...
