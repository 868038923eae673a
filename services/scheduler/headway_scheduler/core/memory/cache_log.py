"""The changes of the prefix cache, for readers that balance load.

Owns: the latest changes. Must not know: who reads them.

Recording starts with the first read. A reader that is new or too late gets the whole cache behind a *clearing*.
Recording stops when the last reader is too far behind.
"""

from collections import deque
from collections.abc import Iterable

import msgspec


class CacheEntry(msgspec.Struct, frozen=True):
    """``num_blocks`` nodes from ``first_node`` on were stored or removed; 0: the cache was cleared.

    Stored nodes have ``token_bytes`` (int32) and follow ``parent_node``, 0 for prompts of ``scope``.
    """

    first_node: int = 0
    num_blocks: int = 0
    parent_node: int = 0
    token_bytes: bytes = b""
    scope: str = ""


CLEARING = CacheEntry()


class CacheLog:
    """The latest entries, numbered from 0."""

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
        """Whether all entries from ``index`` on are kept."""
        return self.is_on and self._first_index <= index <= self.end_index

    def restart(self, cached: Iterable[CacheEntry]) -> int:
        """Record a clearing and the whole cache; return the clearing's number."""
        self.is_on = True
        index = self._read_index = self.end_index
        self._append(CLEARING)
        for entry in cached:
            self._append(entry)
        return index

    def record(self, entry: CacheEntry) -> None:
        """Record a change; call only while ``is_on``."""
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
        """Entries from ``index`` on, and the next index."""
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
