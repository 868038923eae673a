"""The list of requests that stand out in a flight."""

from collections.abc import Callable

import msgspec

from headway.terminal.tables import aligned
from headway_lab.flight.life import few_names
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.events import FinishedEvent
from headway_scheduler.flight.records import Arrived
from headway_scheduler.flight.replay import Event

_SHOWN = 3


class _Ended(msgspec.Struct, frozen=True):
    request_id: str
    queue_s: float
    ttft_s: float
    num_preemptions: int


class Notables:
    """Collects a replay's events."""

    def __init__(self) -> None:
        self._names: dict[Origin, str] = {}
        self._ended: list[_Ended] = []

    def record(self, event: Event) -> None:
        """Process one event."""
        if isinstance(event.record, Arrived):
            self._names[event.record.origin] = event.record.request_id
        for end in (*event.events.finished, *event.shed):
            self._on_end(end)

    def _on_end(self, end: FinishedEvent) -> None:
        name = self._names.pop(end.origin, "")
        if name and end.scheduled_time is not None and end.first_token_time is not None:
            queue_s, ttft_s = end.scheduled_time - end.arrival_time, end.first_token_time - end.arrival_time
            self._ended.append(_Ended(name, queue_s, ttft_s, end.num_preemptions))

    def text(self) -> str:
        """Return the list, and the number of requests."""
        rows: list[tuple[str, ...]] = [("", "request", "waited ms", "TTFT ms", "preempted")]
        kinds: tuple[tuple[str, Callable[[_Ended], float]], ...] = (
            ("fastest", lambda ended: ended.ttft_s),
            ("waited longest", lambda ended: -ended.queue_s),
            ("preempted most", lambda ended: -ended.num_preemptions),
        )
        for kind, key in kinds:
            found = sorted(self._ended, key=key)[:_SHOWN]
            rows += [_row(kind, ended) for ended in found if ended.num_preemptions or kind != "preempted most"]
        unfinished = f"; {len(self._names)} did not end: {few_names(list(self._names.values()))}" if self._names else ""
        return "\n".join((*aligned(rows), f"{len(self._ended)} requests got a first token and ended{unfinished}", ""))


def _row(kind: str, ended: _Ended) -> tuple[str, ...]:
    waited, first = f"{ended.queue_s * 1e3:.1f}", f"{ended.ttft_s * 1e3:.1f}"
    return kind, ended.request_id, waited, first, str(ended.num_preemptions)
