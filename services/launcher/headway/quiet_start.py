"""Ctrl-C while the modules of the ``headway`` command are imported ends the process without a traceback.

``headway.__main__`` imports this before its other modules and calls ``end`` behind them; from then on ``main`` answers.
"""

import os
import signal
import threading
from types import FrameType

INTERRUPTED_EXIT_CODE = 130


def begin() -> bool:
    """Return whether Ctrl-C was heard, as it is not in the background of a shell, and is answered here now."""
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_heard or threading.current_thread() is not threading.main_thread():
        return False
    signal.signal(signal.SIGINT, _end_process)
    return True


def end() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again."""
    if HAS_BEGUN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_process(signum: int, frame: FrameType | None) -> None:
    del signum, frame
    os._exit(INTERRUPTED_EXIT_CODE)


HAS_BEGUN = begin()
