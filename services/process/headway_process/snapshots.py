"""How another thread gets at the figures of a loop that it must not disturb: it asks, and the loop answers by the way.

Owns: the hand-over. Must not know: what is handed over.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

ANSWER_TIMEOUT_S = 2.0

Snapshot = TypeVar("Snapshot")


class Snapshots(Generic[Snapshot]):
    """One thread asks, the process's loop answers when it next comes by."""

    def __init__(self) -> None:
        self.wanted = False
        """Whether somebody waits: for the loop to look at."""
        self.wake: Callable[[], None] = lambda: None
        """Makes the loop come by; called from the thread that asks."""
        self._asking = threading.Lock()
        self._answered = threading.Event()
        self._answer: Snapshot | None = None

    def ask(self) -> Snapshot:
        """A snapshot of now.

        Raises:
            TimeoutError: the loop does not come by.
        """
        with self._asking:
            self._answered.clear()
            self.wanted = True
            self.wake()
            if not self._answered.wait(ANSWER_TIMEOUT_S):
                self.wanted = False
                raise TimeoutError("the process does not answer")
            assert self._answer is not None
            return self._answer

    def give(self, snapshot: Snapshot) -> None:
        """Answer who waits; to be called by the loop."""
        self.wanted = False
        self._answer = snapshot
        self._answered.set()
