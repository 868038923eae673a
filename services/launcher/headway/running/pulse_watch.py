"""Detection of children that hang: stopped, or in a call that never returns.

Silence is counted in looks, not in time: a suspended machine must not make children look dead.
"""

import math
import os
import select

LOOK_INTERVAL_S = 0.5


class PulseWatch:
    """Call ``look`` every ``LOOK_INTERVAL_S`` seconds; ``hang_s`` 0 watches no child."""

    def __init__(self, hang_s: float) -> None:
        self._most_silent_looks = math.ceil(hang_s / LOOK_INTERVAL_S) if hang_s else None
        self._pipes: dict[str, int] = {}
        self._silent_looks: dict[str, int] = {}

    def open(self, name: str) -> int:
        """Return the child's end of a pipe, which the caller closes."""
        self.close(name)
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._pipes[name] = reader
        return writer

    def close(self, name: str) -> None:
        """Forget a child that ended."""
        self._silent_looks.pop(name, None)
        reader = self._pipes.pop(name, None)
        if reader is not None:
            os.close(reader)

    def has_begun(self, name: str) -> bool:
        """Return whether ``look`` has seen a sign of a child that lives."""
        return name in self._silent_looks

    def num_begun(self) -> int:
        """Return how many children have given a sign, also one that no ``look`` has seen yet, or have ended."""
        poll = select.poll()
        for reader in self._pipes.values():
            poll.register(reader, select.POLLIN)
        unseen = {reader for reader, _ in poll.poll(0)}
        return sum(self.has_begun(name) or reader in unseen for name, reader in self._pipes.items())

    def look(self) -> list[str]:
        """Return newly silent children."""
        silent = []
        for name, reader in self._pipes.items():
            if _has_signs(reader):
                self._silent_looks[name] = 0
            elif name in self._silent_looks:
                self._silent_looks[name] += 1
                if self._silent_looks[name] == self._most_silent_looks:
                    silent.append(name)
        return silent


def _has_signs(reader: int) -> bool:
    try:
        return bool(os.read(reader, 1 << 16))
    except BlockingIOError:
        return False
