"""Where a process's log lines go: to a file descriptor, by a thread of their own, so that no log ever holds up serving.

Owns: the lines that wait, how many may, and the count of those that found no room or could not be written.
Must not know: how a line is made, or what it says.

A disk that is full, a pipe that nobody reads, a terminal that was stopped: a write may fail, or never return. It does so
here on a thread that nobody waits for. The descriptor is written to directly, since a text stream has a lock, and a thread
that hangs inside it would hang whoever else prints, the interpreter at its exit included.
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
        notice: what is written, with the number, once lines that were dropped can be told of.
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
        """Take a line, or count it as dropped."""
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
        """Wait until everything taken is written, ``timeout_s`` seconds at most; whether it is. For the way out."""
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
        """Write all of ``data``, however long it takes; False where it cannot be written."""
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
    """The notice of dropped lines as a line of a log in this format, "json" or any other."""
    return (
        '{{"event": "log lines were dropped", "lines": {}}}\n'
        if log_format == "json"
        else "{} log lines were dropped\n"
    )
