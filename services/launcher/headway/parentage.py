"""Whether the launcher that started this process is still there.

Owns: how a launcher makes itself known to its children. Must not know: how a service asks to end with its parent.
"""

import os
from collections.abc import Mapping

LAUNCHER_VARIABLE = "_HEADWAY_LAUNCHER_PID"


def launcher_is_gone(environment: Mapping[str, str]) -> bool:
    """Tell a child whether the launcher that started it has ended already.

    A child asks the kernel to be told of its parent's end, but only after Python has started and its modules are
    loaded. Before it asks, it has to make sure that the parent is still the one that started it.
    """
    launcher = environment.get(LAUNCHER_VARIABLE)
    return launcher is not None and launcher != str(os.getppid())
