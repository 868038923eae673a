"""Single keys from a terminal, whose mode is always restored."""

import contextlib
import re
import termios
import tty
from collections.abc import Iterator

from headway_lab.top.controls import DOWN, ESCAPE, UP

_ARROWS = {b"A": UP, b"B": DOWN}
# An escape sequence of any kind, so that unknown keys are not taken for letters; or one byte.
_KEY = re.compile(rb"\x1b[\[O][0-9;]*([A-Za-z~])|([\x00-\xff])")


@contextlib.contextmanager
def single_keys(descriptor: int) -> Iterator[None]:
    """Read keys without echo; Ctrl-C still sends its signal. Ctrl-S is a key: it would stop the drawing, and SIGTERM waits."""
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        mode = termios.tcgetattr(descriptor)
        mode[0] &= ~termios.IXON
        termios.tcsetattr(descriptor, termios.TCSANOW, mode)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)


def keys_of(data: bytes) -> list[str]:
    """Return the known keys in these bytes."""
    return [key for match in _KEY.finditer(data) if (key := _name(match))]


def _name(match: re.Match[bytes]) -> str:
    if match[1]:
        return _ARROWS.get(match[1], "")
    return ESCAPE if match[2] == b"\x1b" else match[2].decode("ascii", "replace")
