"""A sign of life from a child process to whoever started it: a byte in a pipe, now and then.

Owns: how the pipe is found, and how often something is written to it.
Must not know: who listens, or what becomes of a process that is silent.

A process that was stopped, or hangs in a call that never returns, has not ended, so nobody is told. Whoever starts it can
pass the writing end of a pipe (``PULSE_VARIABLE`` holds its number), and see that its main loop still turns.
"""

import contextlib
import os
from collections.abc import MutableMapping

PULSE_VARIABLE = "_HEADWAY_PULSE_FD"
PULSE_INTERVAL_S = 0.25


class Pulse:
    """Written to by the main loop of a process; does nothing without a descriptor."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._next = float("-inf")

    def beat(self, now: float) -> None:
        """The loop turns; ``now`` in seconds, monotonic."""
        if self._fd is not None and now >= self._next:
            self._next = now + PULSE_INTERVAL_S
            with contextlib.suppress(OSError):  # full: nobody has listened for long; closed: nobody listens any more
                os.write(self._fd, b".")


def pulse_of(environment: MutableMapping[str, str]) -> Pulse:
    """The pulse that the starter of this process wants to feel. Taken out, since it is not for this one's own children."""
    fd = environment.pop(PULSE_VARIABLE, "")
    return Pulse(int(fd) if fd.isascii() and fd.isdigit() else None)
