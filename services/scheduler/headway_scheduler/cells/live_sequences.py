"""The sequences that the core holds. A client's *request* has one *sequence* per continuation.

Owns: one record per live sequence. Must not know: frames, the core.
"""

from typing import NamedTuple

from headway_proto.ingress import Submit
from headway_scheduler.core.state.arrival import Origin


class Name(NamedTuple):
    """The public name of a sequence. It stays valid when the gateway's link is lost."""

    request_id: str
    continuation: int


def name_of(submit: Submit) -> Name:
    """Return a sequence's name."""
    return Name(submit.request_id, submit.index)


class LiveSequence(NamedTuple):
    """One live sequence."""

    origin: Origin
    name: Name
    traceparent: str


class LiveSequences:
    """Live sequences by origin and by name."""

    def __init__(self) -> None:
        self._by_origin: dict[Origin, LiveSequence] = {}
        self._by_name: dict[Name, LiveSequence] = {}

    def __len__(self) -> int:
        return len(self._by_origin)

    def add(self, live: LiveSequence) -> None:
        """Add a sequence."""
        self._by_origin[live.origin] = self._by_name[live.name] = live

    def remove(self, origin: Origin) -> LiveSequence | None:
        """Remove and return a sequence."""
        live = self._by_origin.pop(origin, None)
        if live is not None:
            del self._by_name[live.name]
        return live

    def get(self, origin: Origin) -> LiveSequence | None:
        """Find by origin."""
        return self._by_origin.get(origin)

    def named(self, name: Name) -> LiveSequence | None:
        """Find by name."""
        return self._by_name.get(name)

    def of_owner(self, owner: int) -> list[LiveSequence]:
        """Find by gateway link."""
        return [live for origin, live in self._by_origin.items() if origin.owner == owner]

    def of_request(self, request_id: str) -> list[LiveSequence]:
        """Find by request, in order."""
        found = [live for name, live in self._by_name.items() if name.request_id == request_id]
        return sorted(found, key=lambda live: live.name.continuation)
