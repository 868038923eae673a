"""What the scheduler logs.

Owns: unwritten notices and their words. Must not know: the log's destination, the clock.
"""

import msgspec

from headway_proto.ingress import Rejected, Submit
from headway_scheduler.cells.live_sequences import LiveSequence, Name, name_of
from headway_scheduler.core.state.events import FinishedEvent
from headway_scheduler.core.state.request import FinishReason

Detail = str | int | float


class Notice(msgspec.Struct, frozen=True):
    """One log line."""

    event: str
    details: dict[str, Detail]
    level: str = "info"


class Notices:
    """Collects notices until ``take``."""

    def __init__(self) -> None:
        self.includes_requests = False
        """Whether each arrival and end makes a debug notice."""
        self._notices: list[Notice] = []

    def take(self) -> list[Notice]:
        """Return the notices since the last call."""
        notices, self._notices = self._notices, []
        return notices

    def add(self, event: str, **details: Detail) -> None:
        """Add a notice about no single request."""
        self._notices.append(Notice(event, details))

    def accepted(self, live: LiveSequence, num_tokens: int, tenant: str) -> None:
        """Report an accepted sequence."""
        if self.includes_requests:
            self._about(live.name, live.traceparent, "request accepted", tokens=num_tokens, tenant=tenant)

    def refused(self, submit: Submit, rejected: Rejected) -> None:
        """Report a refused sequence."""
        if self.includes_requests:
            details = {"reason": rejected.reason, "message": rejected.message}
            self._about(name_of(submit), submit.traceparent, "request refused", **details)

    def ended(self, live: LiveSequence, end: FinishedEvent) -> None:
        """Report an end; errors always."""
        if end.reason is FinishReason.ERROR:
            self._about(live.name, live.traceparent, "request failed", "warning", error=end.error)
        elif self.includes_requests:
            self._about(
                live.name,
                live.traceparent,
                "request finished",
                reason=end.reason.value,
                output_tokens=end.num_output_tokens,
                preemptions=end.num_preemptions,
            )

    def _about(self, name: Name, traceparent: str, event: str, level: str = "debug", **details: Detail) -> None:
        ids: dict[str, Detail] = {"request_id": name.request_id, "continuation": name.continuation}
        if traceparent:
            ids["trace_id"] = trace_id_of(traceparent)
        self._notices.append(Notice(event, {**ids, **details}, level))


def trace_id_of(traceparent: str) -> str:
    """Return the trace id of a W3C ``traceparent``, or ""."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) >= 4 else ""
