"""The answers of a batch on disk, in the order of the requests.

Owns: ``FILE.part``, which has the first answers until all are there, and its lock. Must not know: how answers are made.

A death at any moment leaves a number of whole lines and perhaps a torn one, which the next run cuts off.
"""

import contextlib
import fcntl
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from headway.batch.lines import BatchLine
from headway.flags.settings import ConfigurationError
from headway_proto.wording import shown

_SYNC_INTERVAL_S = 1.0


class _Response(msgspec.Struct):
    status_code: int


class _Answered(msgspec.Struct):
    """What a line of the file must have."""

    id: str
    custom_id: str
    response: _Response


class AnswersLostError(Exception):
    """An answer cannot be written, for example because the disk is full; one line."""


class AnswersFile:
    """Appends answers; ``finish`` gives the file its name.

    Raises:
        ConfigurationError: it is there already, cannot be written, or another run writes it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._require_new()
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
        try:
            self._require_new()  # another run may have finished between the two looks
        except ConfigurationError:
            self._file.close()
            raise
        self._next_sync = time.monotonic() + _SYNC_INTERVAL_S

    def _require_new(self) -> None:
        if self._path.exists():
            raise ConfigurationError(f"{shown(self._path)} is there already; allowed: a new file")

    def resume(self, lines: Iterable[BatchLine]) -> Counter[int]:
        """Return the statuses of the first lines, which have answers; cut off what a death has torn.

        Raises:
            ConfigurationError: the answers are those of other lines.
        """
        self._file.seek(0)
        statuses: Counter[int] = Counter()
        whole = 0
        expected = iter(lines)
        for content in self._file:
            if not content.endswith(b"\n"):
                break
            line, answer = next(expected, None), _answered(content)
            if line is None or answer is None or (answer.id, answer.custom_id) != (line.answer_id, line.custom_id):
                raise ConfigurationError(
                    f"{shown(self._part)} has answers to other requests (its line {statuses.total() + 1}); "
                    "allowed: answers to this input, or no such file"
                )
            statuses[answer.response.status_code] += 1
            whole += len(content)
        self._file.truncate(whole)
        self._file.seek(0, os.SEEK_END)
        return statuses

    def append(self, answer: dict[str, Any]) -> None:
        """Write one answer behind the others.

        Raises:
            AnswersLostError: it is not there whole.
        """
        with self._told():
            self._file.write(msgspec.json.encode(answer) + b"\n")
            self._file.flush()
            if time.monotonic() >= self._next_sync:
                os.fsync(self._file.fileno())
                self._next_sync = time.monotonic() + _SYNC_INTERVAL_S

    def finish(self) -> None:
        """All answers are there. Raises as ``append``."""
        with self._told():
            os.fsync(self._file.fileno())
            self._part.rename(self._path)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise AnswersLostError(f"{shown(self._part)} cannot be written: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # what could not be written before still cannot be
            self._file.close()


def _answered(content: bytes) -> _Answered | None:
    with contextlib.suppress(ValueError):
        return msgspec.json.decode(content, type=_Answered)
    return None
