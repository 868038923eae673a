"""A call on a thread of its own, beside a loop that goes on.

Owns: the thread. Must not know: what is called.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


def begun(call: Callable[[], _T], *, name: str, niceness: int = 0) -> "Future[_T]":
    """Begin a call on a thread that is so much nicer than this one, and cannot keep the process from ending."""
    future: Future[_T] = Future()

    def run() -> None:
        if niceness:
            _be_nicer(niceness)
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 (whoever asks for the result gets every error)
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _be_nicer(niceness: int) -> None:
    """Of this thread alone, as Linux has it; elsewhere it stays as it is."""
    thread = threading.get_native_id()
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)
