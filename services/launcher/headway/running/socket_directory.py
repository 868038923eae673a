"""The private directory of a launcher's sockets.

A launcher locks a file in its directory; the kernel releases the lock when the launcher ends in any way.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from headway.flags.settings import ConfigurationError
from headway_process.addresses import MAX_IPC_PATH_BYTES

_PREFIX = "headway-"
_UNFINISHED_PREFIX = ".headway-"
_LOCK_NAME = "lock"
_LONGEST_NAME = f"/{_PREFIX}12345678/ingress"


@contextlib.contextmanager
def socket_directory() -> Iterator[Path]:
    """Make a directory that only this user can enter, and remove it at the end.

    A Unix socket's path has at most 107 bytes, so the system's own directory replaces a long TMPDIR.

    Raises:
        ConfigurationError: no directory can be written to.
    """
    try:
        parent = tempfile.gettempdir()
    except OSError:
        raise ConfigurationError(
            "TMPDIR: no temporary directory can be written to; allowed: one that can, such as a tmpfs at /tmp"
        ) from None
    if len(os.fsencode(parent + _LONGEST_NAME)) > MAX_IPC_PATH_BYTES:
        parent = "/tmp"  # noqa: S108  # mkdtemp below makes a fresh private directory in it
    remove_abandoned(Path(parent))
    # It gets its name only when locked. Otherwise another launcher could take it for abandoned.
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
    """Remove this user's directories whose launcher has ended."""
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
