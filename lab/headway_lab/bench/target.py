"""The bench's protocol for a server."""

from typing import Any, Protocol

import msgspec

from headway_lab.bench.records import Answer
from headway_lab.workload.requests import PlannedRequest

UNKNOWN_CONTEXT = 1 << 24


class TargetError(Exception):
    """The server cannot be benched."""


class TargetInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The server and its model. ``counted_by`` says how tokens are counted."""

    model: str
    address: str
    runs_on: str
    context_length: int
    counted_by: str


class Target(Protocol):
    """A server. ``open`` comes first."""

    async def open(self) -> TargetInfo:
        """Connect, and ask for the model.

        Raises:
            TargetError: there is no answer.
        """
        ...

    def prepare(self, request: PlannedRequest) -> Any:
        """Do all work that is possible before sending."""
        ...

    async def send(self, prepared: Any, answer: Answer) -> None:
        """Send a request and follow its answer; cancellation ends it.

        Raises:
            RequestFailed: the answer broke off or failed.
        """
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...
