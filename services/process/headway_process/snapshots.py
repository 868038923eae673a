"""Hands figures from a busy loop to another thread.

Owns: the hand-over. Must not know: the figures.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

ANSWER_TIMEOUT_S = 2.0

Snapshot = TypeVar("Snapshot")


class Snapshots(Generic[Snapshot]):
    """One thread asks; the loop answers."""

    def __init__(self) -> None:
        self.wanted = False
        """Whether a thread waits, for the loop."""
        self.wake: Callable[[], None] = lambda: None
        """Called by the asking thread."""
        self._asking = threading.Lock()
        self._answered = threading.Event()
        self._answer: Snapshot | None = None

    def ask(self) -> Snapshot:
        """Get a new snapshot.

        Raises:
            TimeoutError: the loop does not answer.
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
        """Answer, in the loop."""
        self.wanted = False
        self._answer = snapshot
        self._answered.set()
