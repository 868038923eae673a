"""What a generation asks of the call that it answers, over gRPC or HTTP."""

from collections.abc import Iterable
from typing import Protocol


class CallContext(Protocol):
    """One call. gRPC's own context is one."""

    def time_remaining(self) -> float | None:
        """Return the seconds before the call's deadline, if it has one."""
        ...

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Return the caller's metadata, or the request's headers."""
        ...

    def peer(self) -> str:
        """Name the connection."""
        ...

    def offer_initial_metadata(self, initial_metadata: tuple[tuple[str, str], ...]) -> None:
        """Send what goes before the first event, with it or earlier."""
        ...

    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        """Keep what goes behind the last event."""
        ...
