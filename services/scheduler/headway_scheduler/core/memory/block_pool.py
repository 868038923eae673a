"""The KV blocks: how many hold each, which are free, and which still wait for a step in flight.

Owns: reference counts, the free lists, fences, and which cached blocks are evicted. Content is the prefix cache's affair.
Must not know: requests, rows, or steps beyond their number.

Life of a block: allocated (count 1), shared by prefix hits (count up), released (count down). At count 0 it is *fenced*
while a step in flight may still write it, then *free*: a block that holds nothing reusable goes onto a stack, a cached
one to the end of an eviction queue, from which a prefix hit can still take it back. Blocks without content are handed
out first, then cached ones are evicted, a small share of the pool at a time.

Eviction is segmented LRU (Karedla, Love and Wherry, "Caching Strategies to Improve Disk System Performance", IEEE
Computer 27(3), 1994; 2Q of Johnson and Shasha, VLDB 1994, has the same aim): blocks that no request has found again go
first, least recently used first, so that a stream of prompts which never come back cannot push out those that do.
Reused blocks may be at most a share of what can be evicted: beyond it, the least recently used of them join the others
and need another hit to rise again. The share is of these blocks and not of the pool, because running requests may leave
few of them: old favourites would then keep all that is left. Pinned blocks go when there is nothing else, and only as
many as are needed; they are free like all others, so pinning can neither deadlock the pool nor delay a request.

All lists are columns and all operations work on slices of them, so releasing a long request costs a few array
operations. What is released behind a fence is only noted, and counted when something depends on it: until then it
is not free anyway, and one operation over all that left during a step costs little more than over one request.
"""

from collections import deque

import numpy as np

from headway_scheduler.core.memory.eviction_queues import EvictionQueues
from headway_scheduler.core.memory.prefix_cache import NUM_WORTHS, ONCE, PINNED, REUSED, PrefixCache
from headway_scheduler.core.state.counters import SchedulerCounters
from headway_scheduler.core.state.indices import ONE, BlockIndices

_EVICTION_SHARE = 64
"""Blocks are evicted in batches of this share of the pool: evicting them one by one costs more."""

_PROTECTED_QUARTERS = 3
"""Reused blocks may be this many quarters of the blocks that can be evicted and are not pinned."""


class BlockPool:
    """A fixed number of equal blocks, numbered from 0. Evictions are counted in ``counters``."""

    def __init__(self, num_blocks: int, cache: PrefixCache, counters: SchedulerCounters) -> None:
        self._cache = cache
        self._counters = counters
        self.num_blocks = num_blocks
        self._eviction_batch = max(1, num_blocks // _EVICTION_SHARE)
        self._ref_count = np.zeros(num_blocks, dtype=np.int32)
        # Stack of free blocks without content; the top is at _plain_top, the bottom at the end, so that taking some is a
        # copy of a slice. Low numbers are handed out first.
        self._plain = np.arange(num_blocks)
        self._plain_top = 0
        # Free cached blocks, by what they are worth.
        self._evictable = EvictionQueues(num_blocks, NUM_WORTHS)
        # Blocks behind each fence, oldest fence first, in the order of release.
        self._fences: deque[tuple[int, list[BlockIndices]]] = deque()
        self._num_fenced = 0
        # Tables released behind one fence, the newest, whose references are still counted.
        self._uncounted: list[BlockIndices] = []
        self._uncounted_fence = -1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return self.num_blocks - self._plain_top + self._evictable.num_queued

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
        self._ref_count[blocks] = ONE
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
        num_fenced = int(np.count_nonzero(self._ref_count[blocks] == 0)) - self._evictable.take_out(blocks)
        self._ref_count[blocks] += 1
        if num_fenced:
            self._num_fenced -= num_fenced
            self._fences = deque(
                (step, [part[self._ref_count[part] == 0] for part in parts]) for step, parts in self._fences
            )

    def allocate_behind(self, shared: BlockIndices, count: int) -> BlockIndices:
        """A table of ``count`` blocks, which begins with ``shared``."""
        if not len(shared):
            return self.allocate(count)
        self.share(shared)
        return np.concatenate((shared, self.allocate(count - len(shared))))

    def num_free_among(self, blocks: BlockIndices) -> int:
        """How many of these cached blocks count towards ``num_free``."""
        return self._evictable.num_among(blocks)

    def reorder(self, blocks: BlockIndices) -> None:
        """The worth of these cached blocks has changed: those that are free become the most recently used of their kind."""
        free = self._evictable.among(blocks)
        if len(free):
            self._evictable.take_out(free)
            self._enqueue(free)

    def drop_cached(self) -> int:
        """Evict every free cached block, pinned ones too, and return how many; what somebody holds stays cached."""
        dropped = np.concatenate(
            [self._evictable.take_oldest(level, self._evictable.lengths[level]) for level in range(NUM_WORTHS)]
        )
        if len(dropped):
            self._counters.num_evicted_blocks += len(dropped)
            unpinned = self._cache.forget(dropped)
            self._make_free(dropped)
            self.reorder(unpinned)
        return len(dropped)

    def num_held_once(self, blocks: BlockIndices) -> int:
        """How many of these blocks only one table has: those that become free when it is given up."""
        return int(np.count_nonzero(self._ref_count[blocks] == 1))

    def check(self, held: BlockIndices) -> None:
        """Assert conservation: every block is held, fenced or free, and ``held`` (with repetition) are the references."""
        self._count_released()
        assert np.array_equal(np.bincount(held, minlength=self.num_blocks), self._ref_count)
        assert np.count_nonzero(self._ref_count) + self.num_fenced + self.num_free == self.num_blocks
        free = self._evictable.among(np.arange(self.num_blocks))
        by_worth = np.bincount(self._cache.worth_of(free), minlength=NUM_WORTHS)
        assert by_worth.tolist() == self._evictable.lengths

    def _count_released(self) -> None:
        """Drop the references of the tables released since the last time; put what nobody holds behind the fence."""
        if not self._uncounted:
            return
        blocks = np.concatenate([table[::-1] for table in self._uncounted])
        if np.count_nonzero(self._ref_count[blocks] - ONE):
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
        worth = self._cache.worth_of(blocks)
        if not np.count_nonzero(worth):
            self._evictable.append(ONCE, blocks)
            return
        for level in range(NUM_WORTHS):
            self._evictable.append(level, blocks[worth == level])

    def _take_evicted(self, count: int) -> BlockIndices:
        """Evict whole batches, at least ``count`` blocks; return ``count``, the rest go onto the (empty) stack."""
        batches = -(-count // self._eviction_batch)
        evicted = self._evict(batches * self._eviction_batch, count)
        self._plain_top = self.num_blocks - (len(evicted) - count)
        self._plain[self._plain_top :] = evicted[count:]
        return evicted[:count]

    def _evict(self, wanted: int, needed: int) -> BlockIndices:
        """Evict ``wanted`` blocks, least worth first, but no more pinned ones than it takes to have those ``needed``."""
        queues = self._evictable
        self._age_reused()
        num_once = min(wanted, queues.lengths[ONCE])
        blocks = queues.take_oldest(ONCE, num_once)
        if num_once < wanted:
            num_reused = min(wanted - num_once, queues.lengths[REUSED])
            num_pinned = max(0, needed - num_once - num_reused)
            blocks = np.concatenate(
                (blocks, queues.take_oldest(REUSED, num_reused), queues.take_oldest(PINNED, num_pinned))
            )
        self._counters.num_evicted_blocks += len(blocks)
        unpinned = self._cache.forget(blocks)
        if len(unpinned):
            self.reorder(unpinned)
        return blocks

    def _age_reused(self) -> None:
        """Let the least recently used of the reused blocks, those beyond their share, be as if they never had been."""
        queues = self._evictable
        most = (queues.lengths[ONCE] + queues.lengths[REUSED]) * _PROTECTED_QUARTERS // 4
        excess = queues.lengths[REUSED] - most
        if excess > 0:
            blocks = queues.take_oldest(REUSED, excess)
            self._cache.forget_reuse(blocks)
            queues.append(ONCE, blocks)
