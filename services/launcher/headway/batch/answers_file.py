"""The answers of a batch on disk, in the order of the requests.

Owns: ``FILE.part``, which has the first answers until all are there, and its lock. Must not know: how answers are made.

A death at any moment leaves a number of whole lines and perhaps a torn one, which the next run cuts off.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from headway.batch.lines import BatchLine
from headway.flags.settings import ConfigurationError
from headway_proto.wording import shown

_SYNC_INTERVAL_S = 1.0


class _Answered(msgspec.Struct):
    """What a line of the file must have."""

    custom_id: str


class AnswersFile:
    """Appends answers; ``finish`` gives the file its name.

    Raises:
        ConfigurationError: it is there already, cannot be written, or another run writes it.
    """

    def __init__(self, path: Path) -> None:
        if path.exists():
            raise ConfigurationError(f"{shown(path)} is there already; allowed: a new file")
        self._path = path
        self._part = path.with_name(path.name + ".part")
        try:
            self._file = self._part.open("a+b")
        except OSError as error:
            raise ConfigurationError(f"{shown(self._part)} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ConfigurationError(f"{shown(self._part)} is being written by another run") from None
        self._next_sync = time.monotonic() + _SYNC_INTERVAL_S

    def resume(self, lines: Iterable[BatchLine]) -> int:
        """Return how many of the lines have answers; cut off what a death has torn.

        Raises:
            ConfigurationError: the answers are those of other lines.
        """
        self._file.seek(0)
        num_answered = whole = 0
        expected = iter(lines)
        for content in self._file:
            if not content.endswith(b"\n"):
                break
            line = next(expected, None)
            if line is None or _custom_id(content) != line.custom_id:
                raise ConfigurationError(
                    f"{shown(self._part)} has answers to other requests (its line {num_answered + 1}); "
                    "allowed: answers to this input, or no such file"
                )
            num_answered += 1
            whole += len(content)
        self._file.truncate(whole)
        self._file.seek(0, os.SEEK_END)
        return num_answered

    def append(self, answer: dict[str, Any]) -> None:
        """Write one answer behind the others."""
        self._file.write(msgspec.json.encode(answer) + b"\n")
        self._file.flush()
        if time.monotonic() >= self._next_sync:
            os.fsync(self._file.fileno())
            self._next_sync = time.monotonic() + _SYNC_INTERVAL_S

    def finish(self) -> None:
        """All answers are there."""
        os.fsync(self._file.fileno())
        self._part.rename(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _custom_id(content: bytes) -> str | None:
    with contextlib.suppress(ValueError):
        return msgspec.json.decode(content, type=_Answered).custom_id
    return None
