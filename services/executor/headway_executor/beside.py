"""Calls on threads of their own, beside a loop that goes on.

Owns: the threads. Must not know: what is called.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")


class Nicer:
    """Begins calls, each on a thread that is so much nicer than its caller."""

    def __init__(self, name: str, niceness: int) -> None:
        self._name = name
        self._niceness = niceness
        self._last: Future[Any] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the last call goes on. Python aborts if it ends while another thread is in torch."""
        return self._last is not None and not self._last.done()

    def __call__(self, call: Callable[[], _T]) -> "Future[_T]":
        """As ``begun``."""
        future = begun(call, name=self._name, niceness=self._niceness)
        self._last = future
        return future


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
