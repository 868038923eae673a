"""The KV blocks: how many hold each, which are free, and which still wait for a step in flight.

Owns: reference counts, the two free lists, and fences. Content is the prefix cache's affair.
Must not know: requests, rows, or steps beyond their number.

Life of a block: allocated (count 1), shared by prefix hits (count up), released (count down). At count 0 it is *fenced*
while a step in flight may still write it, then *free*: a block that holds nothing reusable goes onto a stack, a cached
one to the end of the eviction queue, from which a prefix hit can still take it back. Blocks without content are handed
out first, then the least recently used cached ones are evicted, a small share of the pool at a time.

All lists are columns and all operations work on slices of them, so releasing a long request costs a few array
operations. What is released behind a fence is only noted, and counted when something depends on it: until then it
is not free anyway, and one operation over all that left during a step costs little more than over one request.
"""

from collections import deque

import numpy as np

from headway_scheduler.core.indices import BlockIndices
from headway_scheduler.core.prefix_cache import PrefixCache

_NOT_QUEUED = -1
_EVICTION_SHARE = 64
"""Blocks are evicted in batches of this share of the pool: evicting them one by one costs more."""


class BlockPool:
    """A fixed number of equal blocks, numbered from 0."""

    def __init__(self, num_blocks: int, cache: PrefixCache) -> None:
        self._cache = cache
        self.num_blocks = num_blocks
        self._eviction_batch = max(1, num_blocks // _EVICTION_SHARE)
        self._ref_count = np.zeros(num_blocks, dtype=np.int32)
        # Stack of free blocks without content; the top is at _plain_top, the bottom at the end, so that taking some is a
        # copy of a slice. Low numbers are handed out first.
        self._plain = np.arange(num_blocks)
        self._plain_top = 0
        # Eviction queue of free cached blocks: entry i is current only while _queue_place[block] == i.
        self._queue = np.empty(2 * num_blocks + 1, dtype=np.intp)
        self._queue_head = 0
        self._queue_tail = 0
        self._queue_place = np.full(num_blocks, _NOT_QUEUED, dtype=np.int64)
        self._num_queued = 0
        # Blocks behind each fence, oldest fence first, in the order of release.
        self._fences: deque[tuple[int, list[BlockIndices]]] = deque()
        self._num_fenced = 0
        # Tables released behind one fence, the newest, whose references are still counted.
        self._uncounted: list[BlockIndices] = []
        self._uncounted_fence = -1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return self.num_blocks - self._plain_top + self._num_queued

    @property
    def num_fenced(self) -> int:
        """Blocks that nobody holds and that a step in flight may still write."""
        self._count_released()
        return self._num_fenced

    def allocate(self, count: int) -> BlockIndices:
        """Take ``count`` free blocks, shape ``[count]``, each with one reference. ``count`` must be at most ``num_free``."""
        assert count <= self.num_free
        blocks = self._plain[self._plain_top : self._plain_top + count].copy()
        self._plain_top += len(blocks)
        if len(blocks) < count:
            blocks = np.concatenate((blocks, self._take_evicted(count - len(blocks))))
        self._ref_count[blocks] = 1
        return blocks

    def release(self, blocks: BlockIndices, fence_step: int | None) -> None:
        """Drop one reference of each block (a block occurs at most once).

        Blocks without a reference become free when ``complete_step(fence_step)`` is called; at once if it is None.
        The last blocks of a chain are evicted before the first, because nobody can use them without the first.
        """
        if fence_step is None:
            self._count_released()
            self._make_free(self._drop_references(blocks)[::-1])
            return
        if fence_step != self._uncounted_fence:
            self._count_released()
            self._uncounted_fence = fence_step
        self._uncounted.append(blocks)

    def complete_step(self, step: int) -> None:
        """Lift the fences of all steps up to ``step``."""
        self._count_released()
        while self._fences and self._fences[0][0] <= step:
            parts = self._fences.popleft()[1]
            blocks = parts[0] if len(parts) == 1 else np.concatenate(parts)
            self._num_fenced -= len(blocks)
            self._make_free(blocks)

    def share(self, blocks: BlockIndices) -> None:
        """Add a reference to each of these cached blocks, taking back free and fenced ones."""
        self._count_released()
        queued = self._queue_place[blocks] != _NOT_QUEUED
        num_queued = int(np.count_nonzero(queued))
        num_fenced = int(np.count_nonzero(self._ref_count[blocks] == 0)) - num_queued
        self._ref_count[blocks] += 1
        self._queue_place[blocks] = _NOT_QUEUED
        self._num_queued -= num_queued
        if num_fenced:
            self._num_fenced -= num_fenced
            self._fences = deque(
                (step, [part[self._ref_count[part] == 0] for part in parts]) for step, parts in self._fences
            )

    def num_free_among(self, blocks: BlockIndices) -> int:
        """How many of these cached blocks count towards ``num_free``."""
        return int(np.count_nonzero(self._queue_place[blocks] != _NOT_QUEUED))

    def num_held_once(self, blocks: BlockIndices) -> int:
        """How many of these blocks only one table has: those that become free when it is given up."""
        return int(np.count_nonzero(self._ref_count[blocks] == 1))

    def check(self, held: BlockIndices) -> None:
        """Assert conservation: every block is held, fenced or free, and ``held`` (with repetition) are the references."""
        self._count_released()
        assert np.array_equal(np.bincount(held, minlength=self.num_blocks), self._ref_count)
        assert np.count_nonzero(self._ref_count) + self.num_fenced + self.num_free == self.num_blocks

    def _count_released(self) -> None:
        """Drop the references of the tables released since the last time; put what nobody holds behind the fence."""
        if not self._uncounted:
            return
        blocks = np.concatenate([table[::-1] for table in self._uncounted])
        if np.count_nonzero(self._ref_count[blocks] - 1):
            # Some are shared, perhaps between these tables: one is unused when the last table that has it is dropped.
            blocks = np.concatenate([self._drop_references(table)[::-1] for table in self._uncounted])
        else:
            self._ref_count[blocks] = 0
        self._uncounted.clear()
        self._num_fenced += len(blocks)
        if self._fences and self._fences[-1][0] == self._uncounted_fence:
            self._fences[-1][1].append(blocks)
        else:
            self._fences.append((self._uncounted_fence, [blocks]))

    def _drop_references(self, blocks: BlockIndices) -> BlockIndices:
        """Drop one reference of each block; return those that have none left."""
        references = self._ref_count[blocks] - 1
        self._ref_count[blocks] = references
        return blocks[references == 0] if np.count_nonzero(references) else blocks

    def _make_free(self, blocks: BlockIndices) -> None:
        if not len(blocks):
            return
        cached = self._cache.holds(blocks)
        num_cached = np.count_nonzero(cached)
        if num_cached == len(blocks):
            self._enqueue(blocks)
            return
        if num_cached:
            self._enqueue(blocks[cached])
            blocks = blocks[~cached]
        self._plain[self._plain_top - len(blocks) : self._plain_top] = blocks[::-1]
        self._plain_top -= len(blocks)

    def _enqueue(self, blocks: BlockIndices) -> None:
        if self._queue_tail + len(blocks) > len(self._queue):
            self._compact_queue()
        tail = self._queue_tail
        self._queue[tail : tail + len(blocks)] = blocks
        self._queue_place[blocks] = np.arange(tail, tail + len(blocks))
        self._queue_tail += len(blocks)
        self._num_queued += len(blocks)

    def _compact_queue(self) -> None:
        places = np.arange(self._queue_head, self._queue_tail)
        entries = self._queue[self._queue_head : self._queue_tail]
        current = entries[self._queue_place[entries] == places]
        self._queue[: len(current)] = current
        self._queue_place[current] = np.arange(len(current))
        self._queue_head, self._queue_tail = 0, len(current)

    def _take_evicted(self, count: int) -> BlockIndices:
        """Evict whole batches, at least ``count`` blocks; return ``count``, the rest go onto the (empty) stack."""
        batches = -(-count // self._eviction_batch)
        evicted = self._evict(min(batches * self._eviction_batch, self._num_queued))
        self._plain_top = self.num_blocks - (len(evicted) - count)
        self._plain[self._plain_top :] = evicted[count:]
        return evicted[:count]

    def _evict(self, count: int) -> BlockIndices:
        evicted: list[BlockIndices] = []
        while count:
            head = self._queue_head
            entries = self._queue[head : min(head + count, self._queue_tail)]
            self._queue_head += len(entries)
            current = entries[self._queue_place[entries] == np.arange(head, head + len(entries))]
            count -= len(current)
            evicted.append(current)
        blocks = np.concatenate(evicted)
        self._queue_place[blocks] = _NOT_QUEUED
        self._num_queued -= len(blocks)
        self._cache.forget(blocks)
        return blocks
