"""Writes log lines on a separate thread, so that logging never delays serving.

Owns: waiting lines, the count of dropped ones. Must not know: how a line is made.
A write to a full disk, an unread pipe or a stopped terminal may hang, and a text stream's lock would block the
interpreter's exit. So the thread writes to the descriptor.
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
    """A text stream whose ``write`` takes microseconds and never fails.

    Args:
        fd: the lines' destination.
        notice: reports dropped lines.
        max_lines: waiting lines.
    """

    def __init__(self, fd: int, *, notice: str = "{} log lines were dropped\n", max_lines: int = MAX_LINES) -> None:
        self.num_dropped = 0
        self._fd = fd
        self._notice = notice
        self._max_lines = max_lines
        self._lines: collections.deque[str] = collections.deque()
        self._num_characters = 0
        self._num_unreported = 0
        self._is_writing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Queue or drop a line."""
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
        """Return whether all lines are written within ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._lines and not self._is_writing, timeout_s)

    def _drop(self, num_lines: int) -> None:
        self.num_dropped += num_lines
        self._num_unreported += num_lines

    def _work(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines)
                num_unreported, self._num_unreported = self._num_unreported, 0
                lines = list(self._lines)
                self._lines.clear()
                self._num_characters = 0
                self._is_writing = True
            if num_unreported:
                lines.insert(0, self._notice.format(num_unreported))
            if not self._put("".join(lines).encode(errors="replace")):
                with self._changed:
                    self._drop(len(lines) - bool(num_unreported))
                    self._num_unreported += num_unreported
                time.sleep(_PAUSE_AFTER_FAILURE_S)

    def _put(self, data: bytes) -> bool:
        """Return whether all was written."""
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
    """Return the notice in a log format."""
    return (
        '{{"event": "log lines were dropped", "lines": {}}}\n'
        if log_format == "json"
        else "{} log lines were dropped\n"
    )
