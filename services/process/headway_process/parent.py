"""Ends a child process with its parent.

Owns: how a child learns that its parent ended. Must not know: what it does then.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

LAUNCHER_VARIABLE = "_HEADWAY_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGTERM) -> bool:
    """Ask the kernel for this signal when the parent ends (Linux only). Return False if it has ended.

    The kernel means the parent's *thread*, so no short-lived thread may start such a child.
    """
    if sys.platform != "linux":
        return True
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    return os.getppid() == parent


def launcher_is_gone(environment: Mapping[str, str]) -> bool:
    """Whether the launcher ended while Python started."""
    launcher = environment.get(LAUNCHER_VARIABLE)
    return launcher is not None and launcher != str(os.getppid())
