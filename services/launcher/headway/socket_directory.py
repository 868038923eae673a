"""The private directory of a launcher's sockets, and the removal of those that killed launchers left.

Owns: where it is, who may enter it, and how one tells that nobody uses it any more.
Must not know: what the sockets are for.

A launcher holds a lock on a file in its directory. The kernel lets go of it however the launcher ends, so a directory whose
lock can be had belongs to nobody.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from headway_process.addresses import MAX_IPC_PATH_BYTES

_PREFIX = "headway-"
_UNFINISHED_PREFIX = ".headway-"
_LOCK_NAME = "lock"
_LONGEST_NAME = f"/{_PREFIX}12345678/ingress"


@contextlib.contextmanager
def socket_directory() -> Iterator[Path]:
    """Make a directory that only this user can enter, and remove it at the end; first remove what others have left.

    The path of a Unix socket is at most 107 bytes, so a long TMPDIR is passed over for the system's own.
    """
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent + _LONGEST_NAME)) > MAX_IPC_PATH_BYTES:
        parent = "/tmp"  # noqa: S108  # mkdtemp below makes a fresh private directory in it
    remove_abandoned(Path(parent))
    # It gets its name only when it is locked, or another launcher could take it for abandoned.
    unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED_PREFIX, dir=parent))
    lock = os.open(unfinished / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        directory = unfinished.rename(unfinished.with_name(unfinished.name[1:]))
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(lock)


def remove_abandoned(parent: Path) -> list[Path]:
    """Remove this user's socket directories in ``parent`` whose launcher is gone; return them."""
    removed = []
    for directory in sorted(parent.glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError):
            if directory.is_symlink() or directory.stat().st_uid != os.getuid():
                continue
            lock = os.open(directory / _LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
                removed.append(directory)
            finally:
                os.close(lock)
    return removed
