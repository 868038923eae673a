"""The line by which a process tells why it cannot work, and where that line goes.

Owns: how whoever started the process has that line left to it. Must not know: who that is, or what went wrong.

Processes that were started together write their logs to one terminal, and the others go on for a moment. So a process leaves
the line in the file that ``LAST_WORDS_VARIABLE`` names, for its starter to tell when all have ended; without that variable
it tells the line itself.
"""

import contextlib
import os
import sys
from pathlib import Path

LAST_WORDS_VARIABLE = "_HEADWAY_LAST_WORDS"


def tell_last(line: str) -> None:
    """Have one line, without its end, told to whoever started this process."""
    file = os.environ.get(LAST_WORDS_VARIABLE)
    if file:
        with contextlib.suppress(OSError):
            Path(file).write_text(f"{line}\n", encoding="utf-8", errors="backslashreplace")
            return
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line}\n")
