"""Which of a device's two queues waits for what, so that blocks move beside the steps that compute.

Owns: for every block, who may still use it and which swap still reads it; and the least that each queue must wait for.
Must not know: streams, events, tensors, or why a block moves.

Steps and copies are work of the *step queue*, swaps of the *swap queue*; each queue does its work in order. Both kinds
are numbered from 1, in the order in which they are given; 0 stands for nothing. What is waited for is a number: then all
work of that queue up to it is over.

- A swap-out waits for all work given before: the rows of the last step may have written its blocks.
- A step or a copy waits for the newest swap-out that still reads a block which it is the first to write. Those are a step's
  new blocks and a copy's destinations: a row that holds a block already does not write it any more when it is swapped
  out, since it is full, unless it is that row that has just ended.
- A swap-in waits for the last work that may use its blocks: the newest, where a row holds one of them (it may end with
  the coming step, which is not known yet); else the last before their last row ended.
- A step or a copy waits for every swap-in given before, since its rows may read what came in.

Everything costs as much as what changes: nothing here grows with the rows that run.
"""

from collections.abc import Iterable

import numpy as np

from headway_proto.columns import Int32Array

NOTHING = 0


class MoveFences:
    """The fences of a pool of ``num_blocks``. Blocks are int32, shape ``[n]``."""

    def __init__(self, num_blocks: int) -> None:
        self._num_holders = np.zeros(num_blocks, dtype=np.int32)
        self._last_use = np.zeros(num_blocks, dtype=np.int64)
        """The last work of the step queue that could use a block, where nobody holds it."""
        self._last_read = np.zeros(num_blocks, dtype=np.int64)
        """The last swap-out of a block."""
        self._num_given = 0
        self._last_step = NOTHING
        self._num_swaps = 0
        self._last_swap_in = NOTHING
        self._swaps_follow = NOTHING
        """The work that is over before any further swap begins: waited for, or seen to have ended."""
        self._steps_follow = NOTHING
        """The swap that is over before any further work of the step queue begins."""

    @property
    def num_swaps(self) -> int:
        """The number of the last swap that was given."""
        return self._num_swaps

    @property
    def num_given(self) -> int:
        """The number of the last work that was given to the step queue."""
        return self._num_given

    def swap_out(self, blocks: Int32Array) -> int:
        """A swap is given that reads ``blocks``; return the work that the swap queue must wait for."""
        self._num_swaps += 1
        self._last_read[blocks] = self._num_swaps
        return self._swap_after(self._num_given)

    def swap_in(self, blocks: Int32Array) -> int:
        """A swap is given that writes ``blocks``; return the work that the swap queue must wait for."""
        self._num_swaps += 1
        self._last_swap_in = self._num_swaps
        if self._num_holders[blocks].any():
            return self._swap_after(self._num_given)
        return self._swap_after(int(self._last_use[blocks].max(initial=NOTHING)))

    def copy(self, sources: Int32Array, destinations: Int32Array) -> int:
        """Copies are given to the step queue; return the swap that it must wait for before them."""
        needed = self._swap_needed(destinations)
        self._num_given += 1
        self._last_use[sources] = self._num_given
        self._last_use[destinations] = self._num_given
        return self._step_after(needed)

    def step(self, new_blocks: Int32Array) -> int:
        """A step is about to be given whose rows get ``new_blocks``; return the swap to wait for before it."""
        np.add.at(self._num_holders, new_blocks, 1)
        return self._step_after(self._swap_needed(new_blocks))

    def step_given(self) -> int:
        """The step has been given to its queue; return its number."""
        self._num_given += 1
        self._last_step = self._num_given
        return self._num_given

    def rows_ended(self, blocks: Int32Array) -> None:
        """The rows that held ``blocks``, each as often as one did, do not run any more after the last step given."""
        np.subtract.at(self._num_holders, blocks, 1)
        self._last_use[blocks] = np.maximum(self._last_use[blocks], self._last_step)

    def work_ended(self, number: int) -> None:
        """The work of that number was seen to have ended: nobody need wait for it."""
        self._swaps_follow = max(self._swaps_follow, number)

    def swap_ended(self, number: int) -> None:
        """The swap of that number was seen to have ended."""
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
    """Which blocks each row holds, in no order: a block that two rows share is held twice."""

    def __init__(self) -> None:
        self._held: dict[int, list[int]] = {}

    def append(self, new_blocks: Int32Array) -> None:
        """Rows get blocks: the columns (row, block), shape ``[2, n]``, as in ``StepBatch.new_blocks``."""
        rows, blocks = new_blocks
        # A prompt's blocks stand together: one piece for each row, and not one for each block.
        starts = np.flatnonzero(np.diff(rows, prepend=-1)).tolist()
        for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
            self._held.setdefault(int(rows[start]), []).extend(blocks[start:end].tolist())

    def release(self, rows: Iterable[int]) -> Int32Array:
        """Rows end; return the blocks that they held, int32, shape ``[n]``."""
        blocks: list[int] = []
        for row in rows:
            blocks += self._held.pop(row, ())
        return np.array(blocks, dtype=np.int32)
