"""A sign of life to a process's starter: a byte in a pipe.

Owns: how the pipe is found, and the interval. Must not know: who listens.
A hanging process has not ended, so the starter watches whether the main loop still writes.
"""

import contextlib
import os
from collections.abc import MutableMapping

PULSE_VARIABLE = "_HEADWAY_PULSE_FD"
PULSE_INTERVAL_S = 0.25


class Pulse:
    """Does nothing without a descriptor."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._next = float("-inf")

    def beat(self, now: float) -> None:
        """Report at ``now`` (seconds, monotonic) that the loop runs."""
        if self._fd is not None and now >= self._next:
            self._next = now + PULSE_INTERVAL_S
            with contextlib.suppress(OSError):  # full or closed: nobody listens
                os.write(self._fd, b".")


def pulse_of(environment: MutableMapping[str, str]) -> Pulse:
    """Take ``PULSE_VARIABLE``, which this process's children must not have."""
    fd = environment.pop(PULSE_VARIABLE, "")
    return Pulse(int(fd) if fd.isascii() and fd.isdigit() else None)
