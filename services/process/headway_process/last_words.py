"""The line in which a process says why it cannot work.

Owns: its destination. Must not know: what went wrong. Others still log to the terminal, so the starter prints the file
``LAST_WORDS_VARIABLE`` when all have ended. Without it: standard error.
"""

import contextlib
import os
import sys
from pathlib import Path

LAST_WORDS_VARIABLE = "_HEADWAY_LAST_WORDS"


def write_last_line(line: str) -> None:
    """Leave one line for the starter."""
    file = os.environ.get(LAST_WORDS_VARIABLE)
    if file:
        with contextlib.suppress(OSError):
            Path(file).write_text(f"{line}\n", encoding="utf-8", errors="backslashreplace")
            return
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line}\n")
