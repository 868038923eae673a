"""The processes that rank 0 starts for the other ranks.

Owns: their start and end. Must not know: frames. They are in rank 0's process group, so whoever kills that kills them;
and the kernel kills them when rank 0 ends in any way.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple

from headway_process.parent import LAUNCHER_VARIABLE
from headway_process.pulse import PULSE_VARIABLE

_POLL_S = 0.01


class Ended(NamedTuple):
    """``code`` is negative for a signal."""

    rank: int
    code: int

    @property
    def in_words(self) -> str:
        """For log lines."""
        how = f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"
        return f"rank {self.rank} ended ({how})"


class Children:
    """Ranks with this process's command line; ``variables`` by rank are added to its environment."""

    def __init__(self, variables: Mapping[int, Mapping[str, str]]) -> None:
        command = [sys.executable, *sys.orig_argv[1:]]
        without = {PULSE_VARIABLE}
        environment = {name: value for name, value in os.environ.items() if name not in without}
        self._processes = {
            rank: subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                env={**environment, **own, LAUNCHER_VARIABLE: str(os.getpid())},
            )
            for rank, own in variables.items()
        }

    def ended(self) -> Ended | None:
        """Return one that has ended."""
        for rank, process in self._processes.items():
            code = process.poll()
            if code is not None:
                return Ended(rank, code)
        return None

    def terminate(self) -> None:
        """Ask them to end."""
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> None:
        """Wait until all have ended, or for so long."""
        deadline = time.monotonic() + timeout_s
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(_POLL_S, deadline - time.monotonic()))

    def kill(self) -> None:
        """Kill those that are left, also stopped ones."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
