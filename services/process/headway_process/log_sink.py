"""Writes log lines to a file descriptor on a thread of its own, so that no log delays serving.

Owns: the waiting lines, and the count of dropped ones. Must not know: how a line is made.

A write to a full disk, an unread pipe or a stopped terminal may fail or hang; here only this thread hangs. It writes to
the descriptor, because a text stream has a lock that would also block other writers and the interpreter's exit.
"""

import collections
import io
import os
import threading
import time

MAX_LINES = 4096
MAX_CHARACTERS = 1 << 22
_RETRY_S = 0.01
_PAUSE_AFTER_FAILURE_S = 0.1


class LogSink(io.TextIOBase):
    """A text stream onto descriptor ``fd`` whose ``write`` takes microseconds and never fails.

    Args:
        fd: where the lines go.
        notice: the line that reports a number of dropped lines.
        max_lines: how many may wait.
    """

    def __init__(self, fd: int, *, notice: str = "{} log lines were dropped\n", max_lines: int = MAX_LINES) -> None:
        self.num_dropped = 0
        self._fd = fd
        self._notice = notice
        self._max_lines = max_lines
        self._lines: collections.deque[str] = collections.deque()
        self._num_characters = 0
        self._num_untold = 0
        self._is_writing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Queue a line, or count it as dropped."""
        with self._changed:
            is_full = len(self._lines) >= self._max_lines or self._num_characters + len(text) > MAX_CHARACTERS
            if is_full:
                self._drop(1)
            else:
                self._lines.append(text)
                self._num_characters += len(text)
                self._changed.notify_all()
        return len(text)

    def drain(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` until all lines are written; return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._lines and not self._is_writing, timeout_s)

    def _drop(self, num_lines: int) -> None:
        self.num_dropped += num_lines
        self._num_untold += num_lines

    def _work(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines)
                num_untold, self._num_untold = self._num_untold, 0
                lines = list(self._lines)
                self._lines.clear()
                self._num_characters = 0
                self._is_writing = True
            if num_untold:
                lines.insert(0, self._notice.format(num_untold))
            if not self._put("".join(lines).encode(errors="replace")):
                with self._changed:
                    self._drop(len(lines) - bool(num_untold))
                    self._num_untold += num_untold
                time.sleep(_PAUSE_AFTER_FAILURE_S)

    def _put(self, data: bytes) -> bool:
        """Write all of ``data``; return False if that fails."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:
                time.sleep(_RETRY_S)
            except OSError:
                return False
        return True


def notice_of(log_format: str) -> str:
    """The notice of dropped lines in a log format, "json" or any other."""
    return (
        '{{"event": "log lines were dropped", "lines": {}}}\n'
        if log_format == "json"
        else "{} log lines were dropped\n"
    )
