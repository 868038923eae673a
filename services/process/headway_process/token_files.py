"""Reads a token file whole, or not at all.

Owns: when such a file is complete. Must not know: what is in a line.
A writer may stop at any byte, and a token without its tenant looks like one for all tenants. So the last line must end
with a newline.
"""

import os
import stat
from pathlib import Path


def text_of_token_file(path: Path, most_bytes: int) -> str:
    """Return a complete file's text.

    Raises:
        ValueError: unreadable or incomplete; the message has none of the contents.
    """
    try:
        # O_NONBLOCK: a named pipe without a writer would block.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(most_bytes + 1) if stat.S_ISREG(mode) else b""
    except OSError as error:
        raise ValueError(error.strerror or type(error).__name__) from None
    if not stat.S_ISREG(mode):
        raise ValueError("no regular file")
    refuse_if_anybody_writes(mode)
    if len(content) > most_bytes:
        raise ValueError(f"more than {most_bytes} bytes")
    if b"\0" in content:
        raise ValueError("a zero byte in it, so it may be damaged")
    if content and not content.endswith(b"\n"):
        raise ValueError("the last line has no newline at its end, so the file may be cut short")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None


def refuse_if_anybody_writes(mode: int) -> None:
    """Check a file that says who is let in; ``mode`` as ``stat`` gives it.

    Raises:
        ValueError: every user of this machine may change it.
    """
    if mode & stat.S_IWOTH:
        raise ValueError(f"mode {stat.S_IMODE(mode):04o}, so every user of this machine may change it: chmod o-w")
