"""The progress line of a long run, on stderr."""

import time
from collections.abc import Callable
from typing import TextIO

REDRAW_S = 0.2
BAR_CELLS = 24


class ProgressLine:
    """A bar on a terminal; elsewhere nothing is written."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.perf_counter) -> None:
        self._out = out
        self._clock = clock
        self._is_shown = out.isatty()
        self._next_draw_s = clock() + REDRAW_S

    def show(self, num_done: int, num_all: int, what: str) -> None:
        """Draw, unless it was drawn recently."""
        filled = BAR_CELLS * num_done // max(num_all, 1)
        bar = "#" * filled + "-" * (BAR_CELLS - filled)
        self.note(f"[{bar}] {num_done} of {num_all} {what}")

    def note(self, what: str) -> None:
        """Write it, without a bar, unless something was drawn recently."""
        if not self._is_shown or (now := self._clock()) < self._next_draw_s:
            return
        self._next_draw_s = now + REDRAW_S
        self._out.write(f"\r\x1b[K{what}")
        self._out.flush()

    def erase(self) -> None:
        """Remove the line."""
        if self._is_shown:
            self._out.write("\r\x1b[K")
            self._out.flush()
