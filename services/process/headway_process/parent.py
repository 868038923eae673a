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
    """Ask the kernel to send SIGTERM when the parent ends. Return False if it has ended already.

    Only Linux does so; elsewhere nothing happens. The kernel means the parent's *thread*: a parent that starts processes
    from short-lived threads must not use this.
    """
    if sys.platform != "linux":
        return True
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    return os.getppid() == parent


def launcher_is_gone(environment: Mapping[str, str]) -> bool:
    """Whether the launcher that started this process has ended already.

    ``end_with_parent`` is called only after Python has started and the modules are loaded. Before that, the child has to
    check that its parent is still the one that started it.
    """
    launcher = environment.get(LAUNCHER_VARIABLE)
    return launcher is not None and launcher != str(os.getppid())
