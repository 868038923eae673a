"""What has come into the prefix cache and gone from it, in order, for those who balance load by what is cached where.

Owns: the entries, their numbers, and the bound on how many are kept.
Must not know: how blocks are found, who reads, or how often.

Nothing is noted until somebody reads. Who reads for the first time, or comes too late for what it has not read, makes all
that is cached be noted again behind a *clearing*; others then read that too, which changes nothing for them. A log whose last
reader has fallen too far behind is given up.
"""

from collections import deque
from collections.abc import Iterable

import msgspec


class CacheEntry(msgspec.Struct, frozen=True):
    """``num_blocks`` consecutive nodes from ``first_node`` on were stored or removed; without any, all are gone.

    Stored ones hold ``token_bytes`` (int32) behind ``parent_node`` (0: they begin prompts of ``scope``); removed ones have none.
    """

    first_node: int = 0
    num_blocks: int = 0
    parent_node: int = 0
    token_bytes: bytes = b""
    scope: str = ""


CLEARING = CacheEntry()


class CacheLog:
    """The latest entries, of at most ``most_blocks`` blocks; entries are numbered from 0."""

    def __init__(self, most_blocks: int) -> None:
        self._most_blocks = most_blocks
        self._entries: deque[CacheEntry] = deque()
        self._num_blocks = 0
        self._first_index = 0
        self._read_index = 0
        self.is_on = False

    @property
    def end_index(self) -> int:
        """The number of the next entry."""
        return self._first_index + len(self._entries)

    def covers(self, index: int) -> bool:
        """Whether everything from entry ``index`` on is here."""
        return self.is_on and self._first_index <= index <= self.end_index

    def restart(self, cached: Iterable[CacheEntry]) -> int:
        """Note all that is cached, after a clearing; return the number of the clearing."""
        self.is_on = True
        index = self._read_index = self.end_index
        self._append(CLEARING)
        for entry in cached:
            self._append(entry)
        return index

    def record(self, entry: CacheEntry) -> None:
        """Note a change; call only while ``is_on``."""
        self._append(entry)
        while self._num_blocks > self._most_blocks:
            self._num_blocks -= _weight(self._entries.popleft())
            self._first_index += 1
        if self._first_index > self._read_index:
            self._first_index = self.end_index
            self._entries.clear()
            self._num_blocks = 0
            self.is_on = False

    def read(self, index: int, most_blocks: int) -> tuple[tuple[CacheEntry, ...], int]:
        """Entries from ``index`` on, of about ``most_blocks`` blocks, and the number of the next one to read."""
        taken: list[CacheEntry] = []
        num_blocks = 0
        for place in range(index - self._first_index, len(self._entries)):
            taken.append(self._entries[place])
            num_blocks += _weight(taken[-1])
            if num_blocks >= most_blocks:
                break
        self._read_index = index + len(taken)
        return tuple(taken), self._read_index

    def _append(self, entry: CacheEntry) -> None:
        self._entries.append(entry)
        self._num_blocks += _weight(entry)


def _weight(entry: CacheEntry) -> int:
    return 1 + entry.num_blocks
