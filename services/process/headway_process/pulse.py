"""A sign of life from a child process to its starter: a byte in a pipe, now and then.

Owns: how the pipe is found, and how often a byte is written. Must not know: who listens.

A stopped or hanging process has not ended, so its starter would notice nothing. The starter passes the writing end of a
pipe in ``PULSE_VARIABLE`` and sees whether the main loop still runs.
"""

import contextlib
import os
from collections.abc import MutableMapping

PULSE_VARIABLE = "_HEADWAY_PULSE_FD"
PULSE_INTERVAL_S = 0.25


class Pulse:
    """Written to by a process's main loop; does nothing without a descriptor."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._next = float("-inf")

    def beat(self, now: float) -> None:
        """The loop runs; ``now`` in seconds, monotonic."""
        if self._fd is not None and now >= self._next:
            self._next = now + PULSE_INTERVAL_S
            with contextlib.suppress(OSError):  # full: nobody has listened for long; closed: nobody listens any more
                os.write(self._fd, b".")


def pulse_of(environment: MutableMapping[str, str]) -> Pulse:
    """The pulse that the starter asked for. The variable is removed: it is not meant for this process's children."""
    fd = environment.pop(PULSE_VARIABLE, "")
    return Pulse(int(fd) if fd.isascii() and fd.isdigit() else None)
