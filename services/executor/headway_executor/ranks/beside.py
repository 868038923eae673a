"""A call beside the main thread, which meanwhile shows life and listens.

Owns: the thread. Must not know: what is called.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


def begun(call: Callable[[], _T]) -> "Future[_T]":
    """Begin a call. Its thread cannot keep the process from ending."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 (whoever asks for the result gets every error)
            future.set_exception(error)

    threading.Thread(target=run, name="opening", daemon=True).start()
    return future
