"""Which of a device's two queues waits for what, so that blocks move beside running steps.

Owns: each block's last use and last swap. Must not know: streams, tensors.

Steps and copies are work of the *step queue*, swaps of the *swap queue*; each works in order and counts from 1 (0:
nothing). A wait for a number covers all earlier work of that queue.

- A swap-out waits for all earlier work: the last step may have written its blocks.
- A step or a copy waits for the newest swap-out of a block that it is the first to write: a step's new blocks, a copy's
  destinations. If a row whose blocks were copied for others runs on, it also waits for the block that the row writes.
- A swap-in waits for the last work that may use its blocks: the newest if a row holds one of them, else the last before
  their last row ended.
- A step or a copy waits for every earlier swap-in, since its rows may read those blocks.
"""

from collections.abc import Iterable

import numpy as np

from headway_proto.columns import Int32Array

NOTHING = 0


class MoveFences:
    """Blocks are int32, ``[n]``."""

    def __init__(self, num_blocks: int) -> None:
        self._num_holders = np.zeros(num_blocks, dtype=np.int32)
        self._last_use = np.zeros(num_blocks, dtype=np.int64)
        """The last work of the step queue that could use a block without holders."""
        self._last_read = np.zeros(num_blocks, dtype=np.int64)
        """The last swap-out of a block."""
        self._num_given = 0
        self._last_step = NOTHING
        self._num_swaps = 0
        self._last_swap_in = NOTHING
        self._swaps_follow = NOTHING
        """The last work that later swaps need not wait for: it ended, or they wait already."""
        self._steps_follow = NOTHING
        """The last swap that later work of the step queue need not wait for."""

    @property
    def num_swaps(self) -> int:
        """The last queued swap."""
        return self._num_swaps

    @property
    def num_given(self) -> int:
        """The last queued work of the step queue."""
        return self._num_given

    def swap_out(self, blocks: Int32Array) -> int:
        """Count a swap-out; return the work to wait for."""
        self._num_swaps += 1
        self._last_read[blocks] = self._num_swaps
        return self._swap_after(self._num_given)

    def swap_in(self, blocks: Int32Array) -> int:
        """Count a swap-in; return the work to wait for."""
        self._num_swaps += 1
        self._last_swap_in = self._num_swaps
        if self._num_holders[blocks].any():
            return self._swap_after(self._num_given)
        return self._swap_after(int(self._last_use[blocks].max(initial=NOTHING)))

    def copy(self, sources: Int32Array, destinations: Int32Array) -> int:
        """Count copies; return the swap to wait for."""
        needed = self._swap_needed(destinations)
        self._num_given += 1
        self._last_use[sources] = self._num_given
        self._last_use[destinations] = self._num_given
        return self._step_after(needed)

    def step(self, new_blocks: Int32Array, continued: Int32Array) -> int:
        """Prepare a step, whose rows go on writing ``continued``; return the swap to wait for."""
        np.add.at(self._num_holders, new_blocks, 1)
        return self._step_after(max(self._swap_needed(new_blocks), self._swap_needed(continued)))

    def step_given(self) -> int:
        """Count the queued step; return its number."""
        self._num_given += 1
        self._last_step = self._num_given
        return self._num_given

    def rows_ended(self, blocks: Int32Array) -> None:
        """The holders of ``blocks`` (one entry each) ended with the last queued step."""
        np.subtract.at(self._num_holders, blocks, 1)
        self._last_use[blocks] = np.maximum(self._last_use[blocks], self._last_step)

    def work_ended(self, number: int) -> None:
        """Record that this work has ended."""
        self._swaps_follow = max(self._swaps_follow, number)

    def swap_ended(self, number: int) -> None:
        """Record that this swap has ended."""
        self._steps_follow = max(self._steps_follow, number)

    def _swap_needed(self, written: Int32Array) -> int:
        return max(self._last_swap_in, int(self._last_read[written].max(initial=NOTHING)))

    def _swap_after(self, number: int) -> int:
        if number <= self._swaps_follow:
            return NOTHING
        self._swaps_follow = number
        return number

    def _step_after(self, number: int) -> int:
        if number <= self._steps_follow:
            return NOTHING
        self._steps_follow = number
        return number


class RowBlocks:
    """The blocks of each row."""

    def __init__(self) -> None:
        self._held: dict[int, list[int]] = {}

    def append(self, new_blocks: Int32Array) -> None:
        """Add (row, block) pairs, ``[2, n]``."""
        rows, blocks = new_blocks
        # A prompt's blocks are adjacent, so there is one piece per row, not per block.
        starts = np.flatnonzero(np.diff(rows, prepend=-1)).tolist()
        for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
            self._held.setdefault(int(rows[start]), []).extend(blocks[start:end].tolist())

    def newest(self, rows: Iterable[int]) -> list[int]:
        """The block that each row appended last."""
        return [self._held[row][-1] for row in rows if self._held.get(row)]

    def release(self, rows: Iterable[int]) -> Int32Array:
        """Remove rows; return their blocks, int32, ``[n]``."""
        blocks: list[int] = []
        for row in rows:
            blocks += self._held.pop(row, ())
        return np.array(blocks, dtype=np.int32)
