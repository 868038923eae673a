"""Standard streams that were closed by whoever started the command: they lead nowhere.

Python has no object for such a stream, and the next file to be opened would take its number: a child would write into it.
"""

import os
import sys

_LAST = 2


def open_closed() -> None:
    """Open those that are closed."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= _LAST:
        os.set_inheritable(number, True)
    os.close(number)
    # Python ends with them.
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
