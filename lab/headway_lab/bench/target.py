"""What a server is to the bench.

Owns: the protocol. Must not know: any server, or when requests are sent.
"""

from typing import Any, Protocol

import msgspec

from headway_lab.bench.records import Answer
from headway_lab.workload.requests import PlannedRequest

UNKNOWN_CONTEXT = 1 << 24


class TargetError(Exception):
    """There is no server to bench; the message is one line."""


class TargetInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is benched. ``counted_by`` says how its tokens are counted; ``UNKNOWN_CONTEXT`` if it does not tell its own."""

    model: str
    address: str
    runs_on: str
    context_length: int
    counted_by: str


class Target(Protocol):
    """A server. ``open`` comes first."""

    async def open(self) -> TargetInfo:
        """Connect, and find out what is served.

        Raises:
            TargetError: it does not answer.
        """
        ...

    def prepare(self, request: PlannedRequest) -> Any:
        """Do all that need not wait until the request is sent; what is returned goes to ``send``."""
        ...

    async def send(self, prepared: Any, answer: Answer) -> None:
        """Send it, and follow the answer to its end; cancellation gives it up.

        Raises:
            RequestFailed: there was no end, or an error.
        """
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...
