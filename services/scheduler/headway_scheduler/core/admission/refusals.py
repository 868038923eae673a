"""Reasons for which a waiting request does not start.

Owns: the reasons. Must not know: how they are decided (``admission``), or who reads them.
"""

from enum import Enum
from typing import NamedTuple

from headway_scheduler.core.state.request import Request


class Reason(Enum):
    """Why a request waits, in a few words."""

    PAUSED = "admission was paused"
    ALONE = "another request ran alone"
    LOSS = "an executor had been lost, and those that ran on it came back a few at a time"
    ROWS = "as many requests ran as may run at once"
    BATCH = "the batch that ran had to end first"
    PREFIX = "the beginning of its prompt was being computed for another request"
    BLOCKS = "too few KV blocks were free"
    OBJECTIVE = "those that ran would have missed their inter-token objective"
    TURN = "the token budget was taken, or others were first"


OF_ITS_OWN = frozenset({Reason.PREFIX, Reason.TURN})
"""Reasons that hold for the refused request and not for those behind it: those wait for their turn."""


class Refused(NamedTuple):
    """Admission ended with this ``reason``; ``request`` was the one that it refused, None if it refused all alike."""

    reason: Reason
    request: Request | None = None

    def reason_for(self, request: Request) -> Reason:
        """Why this waiting request does not start."""
        is_meant = self.request is None or request is self.request
        return Reason.TURN if self.reason in OF_ITS_OWN and not is_meant else self.reason
