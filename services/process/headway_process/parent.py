"""A process and the parent that it ends with.

Owns: how a child learns that its parent has ended. Must not know: what it does then.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

LAUNCHER_VARIABLE = "_HEADWAY_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> bool:
    """Ask the kernel for SIGTERM when the parent ends (Linux only). Return False if it has ended already.

    The kernel means the parent's *thread*: a parent that starts processes from short-lived threads must not use this.
    """
    if sys.platform != "linux":
        return True
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    return os.getppid() == parent


def launcher_is_gone(environment: Mapping[str, str]) -> bool:
    """Whether the launcher that started this process has ended already.

    It may end before ``end_with_parent`` is called, while Python starts and loads modules.
    """
    launcher = environment.get(LAUNCHER_VARIABLE)
    return launcher is not None and launcher != str(os.getppid())
