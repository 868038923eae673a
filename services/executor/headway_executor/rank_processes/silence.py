"""How long others have been silent.

Owns: counting. Must not know: who they are. Silence is counted in looks, not in time: a process that stood still itself
must not take the others for dead.
"""

from collections.abc import Hashable

from headway_executor.rank_processes.messages import SIGN_INTERVAL_S

MOST_SILENT_LOOKS = 20
MOST_SILENT_LOOKS_IN_OPENING = 120
"""Loading a library or a model may keep a process from everything else for a while."""


class Silence:
    """Looks at intervals of ``SIGN_INTERVAL_S``."""

    def __init__(self) -> None:
        self._looks: dict[Hashable, int] = {}
        self._most = MOST_SILENT_LOOKS_IN_OPENING
        self.next_look = float("-inf")

    def begin(self) -> None:
        """All are open: from now on silence is short."""
        self._most = MOST_SILENT_LOOKS

    def heard(self, name: Hashable) -> None:
        """Note a sign of life; the first one begins the watch."""
        self._looks[name] = 0

    def look(self, now: float) -> Hashable | None:
        """Return one who has been silent for too long, or None."""
        if now < self.next_look:
            return None
        self.next_look = now + SIGN_INTERVAL_S
        for name in self._looks:
            self._looks[name] += 1
        return next((name for name, looks in self._looks.items() if looks > self._most), None)
