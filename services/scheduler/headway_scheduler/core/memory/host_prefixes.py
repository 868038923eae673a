"""Host blocks that also keep prefixes: the second tier of the prefix cache.

Owns: which host blocks are free, and which prefix each holds. Must not know: requests, or when copying pays.

A prefix is copied when a request gives up its row, from its first block on, so that each kept block can be reached.
Requests that are swapped out come first: their blocks take the place of the prefixes that were used longest ago
(segmented LRU, as ``block_pool``). What a step reads or writes stays held until that step is sent: so no host block is
written twice in a step, and none is written that the step reads (``headway_proto.step``, rules 1 and 5).
"""

import numpy as np

from headway_scheduler.core.memory.block_pool import BlockPool
from headway_scheduler.core.memory.prefix_cache import PrefixCache
from headway_scheduler.core.state.counters import SchedulerCounters
from headway_scheduler.core.state.indices import BlockIndices


class HostPrefixes:
    """``num_blocks`` host blocks of ``block_size`` tokens, numbered from 0."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self._block_bytes = block_size * 4
        self._cache = PrefixCache(num_blocks, block_size)
        self._pool = BlockPool(num_blocks, self._cache, SchedulerCounters())
        self._held: list[BlockIndices] = []
        """Blocks that the next step moves; each list entry has a reference."""

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now; prefixes in them are given up."""
        return self._pool.num_free

    @property
    def num_released(self) -> int:
        """Blocks that come free when the next step is sent."""
        return len(np.unique(np.concatenate(self._held))) if self._held else 0

    def allocate(self, count: int) -> BlockIndices:
        """Take ``count`` (at most ``num_free``) blocks, shape ``[count]``."""
        return self._pool.allocate(count)

    def release(self, blocks: BlockIndices) -> None:
        """Give blocks back once the next step is sent."""
        if len(blocks):
            self._held.append(blocks)

    def complete_plan(self) -> None:
        """Nothing: blocks are held until ``complete_step``."""

    def complete_step(self) -> None:
        """The moves were sent: later steps may write what they read."""
        for blocks in self._held:
            self._pool.release(blocks, None)
        self._held.clear()

    def find(self, token_bytes: bytes, most_blocks: int, scope: str) -> BlockIndices:
        """The host blocks of the longest prefix that is kept, shape ``[n]``."""
        return self._cache.find(token_bytes, most_blocks, scope)[0]

    def hold(self, blocks: BlockIndices) -> None:
        """Keep these cached blocks until the next step is sent; they were used now."""
        self._cache.record_reuse(blocks)
        self._pool.share(blocks)
        self._held.append(blocks)

    def keep(self, token_bytes: bytes, num_blocks: int, scope: str) -> tuple[int, BlockIndices]:
        """Make room for a prefix of ``num_blocks`` blocks.

        Returns how many of them are kept already, and the host blocks for those behind, as many as there is room for.
        """
        known, node = self._cache.find(token_bytes, num_blocks, scope)
        num_known = len(known)
        if num_known:
            self._pool.share(known)
            self._held.append(known)
        blocks = self._pool.allocate(min(num_blocks - num_known, self._pool.num_free))
        if len(blocks):
            end = num_known + len(blocks)
            part = token_bytes[num_known * self._block_bytes : end * self._block_bytes]
            self._cache.register(node, part, blocks, scope)
            self._held.append(blocks)
        return num_known, blocks

    def drop(self) -> None:
        """Forget every prefix that no step is about to move."""
        self._pool.drop_cached()
