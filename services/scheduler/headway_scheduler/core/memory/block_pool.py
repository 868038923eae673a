"""The KV blocks: reference counts, free lists, and fences.

Owns: which blocks are free, which cached ones are evicted. Must not know: requests, rows.

At count 0 a block is *fenced* while a step in flight may still write it, then *free*. Free blocks without content form
a stack, which is used first. Free cached blocks queue for eviction, and a prefix hit takes them back.

Eviction is segmented LRU (Karedla, Love and Wherry, "Caching Strategies to Improve Disk System Performance", IEEE
Computer 27(3), 1994; compare 2Q, Johnson and Shasha, VLDB 1994): blocks that no request has found again go first, so
prompts that never come back cannot push out those that do. Reused blocks may be only a share of the evictable blocks
(running requests may leave few of the pool); the least recently used beyond it become ordinary until their next hit.
Pinned blocks go last. They count as free, so pins neither deadlock the pool nor delay a request.

Blocks released behind a fence are counted later, all at once.
"""

from collections import deque

import numpy as np

from headway_scheduler.core.memory.eviction_queues import EvictionQueues
from headway_scheduler.core.memory.prefix_cache import NUM_WORTHS, ONCE, PINNED, REUSED, PrefixCache
from headway_scheduler.core.state.counters import SchedulerCounters
from headway_scheduler.core.state.indices import ONE, ZERO, BlockIndices, are_all, is_any, joined

_EVICTION_SHARE = 64
"""One batch evicts the pool's blocks divided by this number; one block at a time would cost more."""

_PROTECTED_QUARTERS = 3
"""Reused blocks may be this many quarters of the evictable blocks that are not pinned."""


class BlockPool:
    """``num_blocks`` equal blocks, numbered from 0."""

    def __init__(self, num_blocks: int, cache: PrefixCache, counters: SchedulerCounters) -> None:
        self._cache = cache
        self._counters = counters
        self.num_blocks = num_blocks
        self._eviction_batch = max(1, num_blocks // _EVICTION_SHARE)
        self._ref_count = np.zeros(num_blocks, dtype=np.int32)
        # Stack of free blocks without content. Its top is at _plain_top, its bottom at the end: low numbers go first.
        self._plain = np.arange(num_blocks)
        self._plain_top = 0
        # Free cached blocks, by worth.
        self._evictable = EvictionQueues(num_blocks, NUM_WORTHS)
        # (step, blocks in the order of release) of each fence, oldest first.
        self._fences: deque[tuple[int, list[BlockIndices]]] = deque()
        self._num_fenced = 0
        # Tables released behind the newest fence, whose references are not dropped yet.
        self._uncounted: list[BlockIndices] = []
        self._uncounted_fence = -1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return self.num_blocks - self._plain_top + self._evictable.num_queued

    @property
    def num_fenced(self) -> int:
        """Unreferenced blocks that a step in flight may still write."""
        self._count_released()
        return self._num_fenced

    def allocate(self, count: int) -> BlockIndices:
        """Take ``count`` (at most ``num_free``) blocks, shape ``[count]``."""
        assert count <= self.num_free
        blocks = self._plain[self._plain_top : self._plain_top + count].copy()
        self._plain_top += len(blocks)
        if len(blocks) < count:
            blocks = np.concatenate((blocks, self._take_evicted(count - len(blocks))))
        self._ref_count[blocks] = ONE
        return blocks

    def release(self, blocks: BlockIndices, fence_step: int | None) -> None:
        """Drop one reference of each of these distinct blocks.

        Unreferenced blocks become free with ``complete_step(fence_step)``, or now if that is None. Ends of chains are
        evicted first: they are useless without the beginning.
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
            blocks = joined(self._fences.popleft()[1])
            self._num_fenced -= len(blocks)
            self._make_free(blocks)

    def share(self, blocks: BlockIndices) -> None:
        """Add a reference to each of these cached blocks."""
        self._count_released()
        references = self._ref_count[blocks]
        num_unused = len(blocks) - int(np.count_nonzero(references))
        self._ref_count[blocks] = references + ONE
        num_fenced = num_unused - self._evictable.take_out(blocks) if num_unused else 0
        if num_fenced:
            self._num_fenced -= num_fenced
            self._fences = deque(
                (step, [part[self._ref_count[part] == 0] for part in parts]) for step, parts in self._fences
            )

    def allocate_behind(self, shared: BlockIndices, count: int) -> BlockIndices:
        """A table of ``count`` blocks that begins with ``shared``."""
        if not len(shared):
            return self.allocate(count)
        self.share(shared)
        return np.concatenate((shared, self.allocate(count - len(shared))))

    def num_free_among(self, blocks: BlockIndices) -> int:
        """How many of these cached blocks are free."""
        return self._evictable.num_among(blocks)

    def reorder(self, blocks: BlockIndices) -> None:
        """Requeue free ones of these cached blocks by their new worth."""
        free = self._evictable.among(blocks)
        if len(free):
            self._evictable.take_out(free)
            self._enqueue(free)

    def drop_cached(self) -> int:
        """Evict all free cached blocks; return how many."""
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
        """How many of these blocks have one reference."""
        return int(np.count_nonzero(self._ref_count[blocks] == 1))

    def check(self, held: BlockIndices) -> None:
        """Assert that ``held`` are all references and no block is lost."""
        self._count_released()
        assert np.array_equal(np.bincount(held, minlength=self.num_blocks), self._ref_count)
        assert np.count_nonzero(self._ref_count) + self.num_fenced + self.num_free == self.num_blocks
        free = self._evictable.among(np.arange(self.num_blocks))
        by_worth = np.bincount(self._cache.worth_of(free), minlength=NUM_WORTHS)
        assert by_worth.tolist() == self._evictable.lengths

    def _count_released(self) -> None:
        """Drop the references of the uncounted tables."""
        if not self._uncounted:
            return
        blocks = joined([table[::-1] for table in self._uncounted])
        if is_any(self._ref_count[blocks] != ONE):
            # Some blocks are shared, perhaps between these tables: each is unused after its last table.
            blocks = joined([self._drop_references(table)[::-1] for table in self._uncounted])
        else:
            self._ref_count[blocks] = 0
        self._uncounted.clear()
        self._num_fenced += len(blocks)
        if self._fences and self._fences[-1][0] == self._uncounted_fence:
            self._fences[-1][1].append(blocks)
        else:
            self._fences.append((self._uncounted_fence, [blocks]))

    def _drop_references(self, blocks: BlockIndices) -> BlockIndices:
        references = self._ref_count[blocks] - ONE
        self._ref_count[blocks] = references
        is_unused = references == ZERO
        return blocks if are_all(is_unused) else blocks[is_unused]

    def _make_free(self, blocks: BlockIndices) -> None:
        if not len(blocks):
            return
        is_cached = self._cache.holds(blocks)
        if are_all(is_cached):
            self._enqueue(blocks)
            return
        if is_any(is_cached):
            self._enqueue(blocks[is_cached])
            blocks = blocks[~is_cached]
        self._plain[self._plain_top - len(blocks) : self._plain_top] = blocks[::-1]
        self._plain_top -= len(blocks)

    def _enqueue(self, blocks: BlockIndices) -> None:
        worth = self._cache.worth_of(blocks)
        if worth.tobytes().count(ONCE) == len(worth):
            self._evictable.append(ONCE, blocks)
            return
        for level in range(NUM_WORTHS):
            of_level = blocks[worth == level]
            if len(of_level):
                self._evictable.append(level, of_level)

    def _take_evicted(self, count: int) -> BlockIndices:
        """Evict whole batches; return ``count`` blocks, stack the rest."""
        batches = -(-count // self._eviction_batch)
        evicted = self._evict(batches * self._eviction_batch, count)
        self._plain_top = self.num_blocks - (len(evicted) - count)
        self._plain[self._plain_top :] = evicted[count:]
        return evicted[:count]

    def _evict(self, wanted: int, needed: int) -> BlockIndices:
        """Evict ``wanted`` blocks, least worth first, pinned ones only for ``needed``."""
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
        """Make reused blocks beyond their share ordinary."""
        queues = self._evictable
        most = (queues.lengths[ONCE] + queues.lengths[REUSED]) * _PROTECTED_QUARTERS // 4
        excess = queues.lengths[REUSED] - most
        if excess > 0:
            blocks = queues.take_oldest(REUSED, excess)
            self._cache.forget_reuse(blocks)
            queues.append(ONCE, blocks)
