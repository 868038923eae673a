"""The reasons why a waiting request does not start.

Owns: the reasons. Must not know: how ``admission`` decides.
"""

from enum import Enum
from typing import NamedTuple

from headway_scheduler.core.state.request import Request


class Reason(Enum):
    """Why a request waits."""

    PAUSED = "admission was paused"
    ALONE = "another request ran alone"
    LOSS = "an executor had been lost, and those that ran on it came back a few at a time"
    ROWS = "as many requests ran as may run at once"
    BATCH = "the batch that ran had to end first"
    PREFIX = "the beginning of its prompt was being computed for another request"
    ADAPTERS = "as many adapters ran as may run at once"
    BLOCKS = "too few KV blocks were free"
    OBJECTIVE = "those that ran would have missed their inter-token objective"
    TURN = "the token budget was taken, or others were first"


OF_ITS_OWN = frozenset({Reason.PREFIX, Reason.TURN})
"""Reasons that hold for the refused request only. The requests behind it wait for their turn."""


class Refused(NamedTuple):
    """``request`` is the refused one; None if no request may start."""

    reason: Reason
    request: Request | None = None

    def reason_for(self, request: Request) -> Reason:
        """Return why this waiting request does not start."""
        is_meant = self.request is None or request is self.request
        return Reason.TURN if self.reason in OF_ITS_OWN and not is_meant else self.reason
