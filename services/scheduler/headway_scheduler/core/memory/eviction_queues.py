"""Queues of free cached blocks, oldest first, one per level of worth.

Owns: the queues. Must not know: what a block holds.

The queues are segments of one column, so ``_place`` says whether a block is queued, where, and in which queue. Removing
a block forgets its place; its entry is skipped later.
"""

import numpy as np

from headway_scheduler.core.state.indices import BlockIndices, joined

_NOT_QUEUED = np.array(-1, dtype=np.int64)


class EvictionQueues:
    """A block is in at most one queue."""

    def __init__(self, num_blocks: int, num_levels: int) -> None:
        self._segment = 2 * num_blocks + 1
        # Entry i is current only while _place[block] == i.
        self._entries = np.empty(num_levels * self._segment, dtype=np.intp)
        self._place = np.full(num_blocks, _NOT_QUEUED, dtype=np.int64)
        self._heads = [level * self._segment for level in range(num_levels)]
        self._tails = list(self._heads)
        self.lengths = [0] * num_levels
        self.num_queued = 0

    def append(self, level: int, blocks: BlockIndices) -> None:
        """Put blocks that are in no queue into this one."""
        if self._tails[level] + len(blocks) > (level + 1) * self._segment:
            self._compact(level)
        tail = self._tails[level]
        end = tail + len(blocks)
        self._entries[tail:end] = blocks
        self._place[blocks] = np.arange(tail, end)
        self._tails[level] = end
        self.lengths[level] += len(blocks)
        self.num_queued += len(blocks)

    def among(self, blocks: BlockIndices) -> BlockIndices:
        """The queued ones of ``blocks``, in their order."""
        queued: BlockIndices = blocks[self._place[blocks] != _NOT_QUEUED]
        return queued

    def num_among(self, blocks: BlockIndices) -> int:
        """How many of ``blocks`` are queued."""
        return int(np.count_nonzero(self._place[blocks] != _NOT_QUEUED))

    def take_out(self, blocks: BlockIndices) -> int:
        """Remove the queued ones of ``blocks``; return how many."""
        places = self._place[blocks]
        places = places[places != _NOT_QUEUED]
        if len(places):
            self._place[blocks] = _NOT_QUEUED
            self.num_queued -= len(places)
            for level, count in enumerate(np.bincount(places // self._segment).tolist()):
                self.lengths[level] -= count
        return len(places)

    def take_oldest(self, level: int, count: int) -> BlockIndices:
        """Remove the oldest blocks of a queue, shape ``[count]``."""
        assert count <= self.lengths[level]
        self.lengths[level] -= count
        self.num_queued -= count
        parts: list[BlockIndices] = []
        while count:
            head = self._heads[level]
            entries = self._entries[head : min(head + count, self._tails[level])]
            self._heads[level] += len(entries)
            current = entries[self._place[entries] == np.arange(head, head + len(entries))]
            count -= len(current)
            parts.append(current)
        blocks = joined(parts)
        self._place[blocks] = _NOT_QUEUED
        return blocks

    def _compact(self, level: int) -> None:
        start, head, tail = level * self._segment, self._heads[level], self._tails[level]
        entries = self._entries[head:tail]
        current = entries[self._place[entries] == np.arange(head, tail)]
        end = start + len(current)
        self._entries[start:end] = current
        self._place[current] = np.arange(start, end)
        self._heads[level], self._tails[level] = start, end
