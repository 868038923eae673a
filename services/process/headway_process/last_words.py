"""The line in which a process says why it cannot work.

Owns: where that line goes. Must not know: what went wrong.

Processes that share a terminal go on logging for a moment. So the line goes to the file that ``LAST_WORDS_VARIABLE``
names, and the starter prints it when all have ended; without that variable it goes to standard error.
"""

import contextlib
import os
import sys
from pathlib import Path

LAST_WORDS_VARIABLE = "_HEADWAY_LAST_WORDS"


def write_last_line(line: str) -> None:
    """Leave one line, without its end, to the starter of this process."""
    file = os.environ.get(LAST_WORDS_VARIABLE)
    if file:
        with contextlib.suppress(OSError):
            Path(file).write_text(f"{line}\n", encoding="utf-8", errors="backslashreplace")
            return
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line}\n")
