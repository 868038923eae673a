"""Reading a checkpoint's files into the page cache while Python still imports torch.

Owns: which files, and when that does not pay. Must not know: what is in them.
"""

import contextlib
import os
from pathlib import Path
from threading import Thread

_SHARE_OF_MEMORY = 0.5
"""Larger checkpoints would push out of the cache what is needed first."""


def read_ahead(directory: Path) -> Thread | None:
    """Begin to read the weights of a checkpoint; None if there are none, or too many for the memory."""
    files = sorted(directory.glob("*.safetensors"))
    try:
        num_bytes = sum(path.stat().st_size for path in files)
    except OSError:
        return None
    if not files or num_bytes > _SHARE_OF_MEMORY * _memory_bytes():
        return None
    thread = Thread(target=_read, args=(files,), name="reading-ahead", daemon=True)
    thread.start()
    return thread


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read(files: list[Path]) -> None:
    """One long call for each file: this thread shall not ask for the interpreter's lock again and again."""
    with contextlib.suppress(OSError), Path(os.devnull).open("wb") as nowhere:  # loading says what is wrong
        for path in files:
            with path.open("rb") as file:
                place = 0
                while count := os.sendfile(nowhere.fileno(), file.fileno(), place, path.stat().st_size - place):
                    place += count
