"""The host blocks into which KV blocks are swapped out.

Owns: which are free. Must not know: requests.

A step's swap-outs run before its swap-ins (``headway_proto.step``, rule 1), so a block that a step swaps in is free
only for the next.
"""

import numpy as np

from headway_scheduler.core.state.indices import BlockIndices


class HostPool:
    """``num_blocks`` equal blocks, numbered from 0."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = np.arange(num_blocks)
        self._top = 0
        self._released: list[BlockIndices] = []

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return self.num_blocks - self._top

    @property
    def num_released(self) -> int:
        """Blocks that wait for ``complete_plan``."""
        return sum(map(len, self._released))

    def allocate(self, count: int) -> BlockIndices:
        """Take ``count`` (at most ``num_free``) blocks, shape ``[count]``."""
        assert count <= self.num_free
        blocks = self._free[self._top : self._top + count].copy()
        self._top += count
        return blocks

    def release(self, blocks: BlockIndices) -> None:
        """Give blocks back for the next step."""
        self._released.append(blocks)

    def complete_plan(self) -> None:
        """Free the released blocks."""
        if not self._released:
            return
        for blocks in self._released:
            self._free[self._top - len(blocks) : self._top] = blocks
            self._top -= len(blocks)
        self._released.clear()
