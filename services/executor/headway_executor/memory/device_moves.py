"""Moves of KV blocks beside the steps of a CUDA device.

Owns: pinned blocks, the swap stream, its events. Must not know: tokens, attention. ``move_fences`` decides what waits
for what.

For each step, a backend calls on one thread:

1. ``move`` and ``load``, if blocks move: swaps go to their own stream, copies to the steps' stream;
2. ``before_step``, before its first launch;
3. ``after_step``, behind its last launch, also if it failed: part of it may run;
4. ``move_time_us``, once its result is there, from any thread.

Only opening, measuring and closing wait for the device.
"""

import copy
from collections import deque
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from headway_executor.backend import StepBatch
from headway_executor.memory.host_pool import HostBytes, allocate_blocks, as_blocks, in_one_go, parts_of
from headway_executor.memory.move_fences import NOTHING, MoveFences, RowBlocks
from headway_proto.columns import Int32Array

_HIGH_PRIORITY = -1
_TIMED_BLOCKS = 16
_TIMED_ROUNDS = 3
_MOST_WATCHED = 8
"""Steps whose marks are kept unchecked; more than are ever in flight."""

_MOST_UNASKED = 32
"""Steps whose times are kept; more than are ever in flight."""

# Its constructors have no types.
_untyped_cuda: Any = torch.cuda


class Mark(Protocol):
    """A CUDA event in a queue."""

    def query(self) -> bool:
        """Whether the queue has passed it; never wait."""
        ...

    def synchronize(self) -> None:
        """Wait until the queue has passed it."""
        ...

    def elapsed_time(self, later: Any, /) -> float:
        """Milliseconds between two passed, timed marks."""
        ...


class MoveQueues(Protocol):
    """The step queue and the swap queue. Pairs: int32, ``[2, n]``."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the device."""
        ...

    @property
    def num_host_blocks(self) -> int:
        """Blocks in main memory."""
        ...

    def mark_steps(self, *, timed: bool = False) -> Mark:
        """Mark the end of the step queue."""
        ...

    def mark_swaps(self) -> Mark:
        """Mark the end of the swap queue, timed."""
        ...

    def steps_wait(self, mark: Mark) -> None:
        """Make later steps wait for ``mark``."""
        ...

    def swaps_wait(self, mark: Mark) -> None:
        """Make later swaps wait for ``mark``."""
        ...

    def swap_out(self, pairs: Int32Array) -> None:
        """Swap (block, host block)."""
        ...

    def swap_in(self, pairs: Int32Array) -> None:
        """Swap (host block, block)."""
        ...

    def load(self, contents: HostBytes, blocks: Int32Array) -> None:
        """Fill blocks, int32, ``[n]``, behind the swaps."""
        ...

    def copy(self, pairs: Int32Array) -> None:
        """Copy (source, destination), behind the steps."""
        ...

    def synchronize(self) -> None:
        """Wait until both queues are empty."""
        ...

    def scratch(self, num_blocks: int) -> "MoveQueues":
        """The same queues with other host blocks, to measure with."""
        ...


class _CudaQueues:
    """The pool ``layers`` is ``[num_layers, num_blocks, *block]``, contiguous."""

    def __init__(
        self,
        layers: Tensor,
        *,
        num_host_blocks: int,
        compute_stream: torch.cuda.Stream,
        memory: HostBytes | None = None,
    ) -> None:
        self._layers = layers
        shape = (num_host_blocks, layers.shape[0], *layers.shape[2:])
        self._host = (
            allocate_blocks(shape, layers.dtype, layers.device)
            if memory is None
            else as_blocks(memory, shape, layers.dtype)
        )
        self._steps = compute_stream
        # A step waits for its swap-in, and swaps take little of the device: so they have priority.
        self._swaps: torch.cuda.Stream = _untyped_cuda.Stream(layers.device, priority=_HIGH_PRIORITY)
        self._swaps.wait_stream(torch.cuda.current_stream(layers.device))  # It may still fill the pool with zeros.

    @property
    def num_blocks(self) -> int:
        return self._layers.shape[1]

    @property
    def num_host_blocks(self) -> int:
        return len(self._host)

    def mark_steps(self, *, timed: bool = False) -> Mark:
        return cast(Mark, self._steps.record_event(_untyped_cuda.Event(enable_timing=timed)))

    def mark_swaps(self) -> Mark:
        return cast(Mark, self._swaps.record_event(_untyped_cuda.Event(enable_timing=True, blocking=True)))

    def steps_wait(self, mark: Mark) -> None:
        self._steps.wait_event(cast(torch.cuda.Event, mark))

    def swaps_wait(self, mark: Mark) -> None:
        self._swaps.wait_event(cast(torch.cuda.Event, mark))

    def swap_out(self, pairs: Int32Array) -> None:
        from headway_kernels.gpu import block_moves

        with torch.cuda.stream(self._swaps):
            block_moves.swap_out(self._layers, self._host, self._column(pairs))

    def swap_in(self, pairs: Int32Array) -> None:
        from headway_kernels.gpu import block_moves

        with torch.cuda.stream(self._swaps):
            block_moves.swap_in(self._layers, self._host, self._column(pairs))

    def load(self, contents: HostBytes, blocks: Int32Array) -> None:
        layers = self._layers
        others = as_blocks(contents, (len(blocks), *self._host.shape[1:]), layers.dtype)
        with torch.cuda.stream(self._swaps):
            index = torch.from_numpy(blocks.astype(np.int64)).pin_memory().to(layers.device, non_blocking=True)
            for part in parts_of(len(blocks), in_one_go(others)):
                staged = others[part].pin_memory().to(layers.device, non_blocking=True)
                layers.index_copy_(1, index[part], staged.transpose(0, 1))

    def copy(self, pairs: Int32Array) -> None:
        from headway_kernels.gpu import block_moves

        with torch.cuda.stream(self._steps):
            block_moves.copy_blocks(self._layers, self._column(pairs))

    def synchronize(self) -> None:
        self._steps.synchronize()
        self._swaps.synchronize()

    def scratch(self, num_blocks: int) -> MoveQueues:
        other = copy.copy(self)
        other._host = allocate_blocks((num_blocks, *self._host.shape[1:]), self._host.dtype, self._layers.device)  # noqa: SLF001
        return other

    def _column(self, pairs: Int32Array) -> Tensor:
        """From unpinned memory, the copy might wait."""
        own = np.array(pairs, dtype=np.int32, order="C")
        return torch.from_numpy(own).pin_memory().to(self._layers.device, non_blocking=True)


class _TimedMove(NamedTuple):
    start: Mark
    end: Mark
    num_blocks: int


class DeviceMoves:
    """A ``BlockMover``; the module gives the order of calls."""

    def __init__(self, queues: MoveQueues) -> None:
        self._queues = queues
        self._fences = MoveFences(queues.num_blocks)
        self._rows = RowBlocks()
        self._read: set[int] = set()
        """Blocks that were swapped out since the last step."""
        self._work: deque[tuple[int, Mark]] = deque()
        self._swaps: deque[tuple[int, Mark]] = deque()
        self._coming: list[_TimedMove] = []
        self._timed: dict[int, list[_TimedMove]] = {}
        self._swap_us = 0.0

    @classmethod
    def of_pool(
        cls,
        layers: Tensor,
        *,
        num_host_blocks: int,
        compute_stream: torch.cuda.Stream,
        memory: HostBytes | None = None,
    ) -> "DeviceMoves":
        """The moves of a CUDA pool; ``memory``: pinned, for the host blocks.

        Raises:
            BackendConfigError: no memory for host blocks.
        """
        from headway_kernels.gpu import block_moves

        block_moves.compile_moves(layers)
        return cls(_CudaQueues(layers, num_host_blocks=num_host_blocks, compute_stream=compute_stream, memory=memory))

    @property
    def num_host_blocks(self) -> int:
        """See ``BlockMover``."""
        return self._queues.num_host_blocks

    def move(self, *, copies: Int32Array, swap_out: Int32Array, swap_in: Int32Array) -> Mark | None:
        """Queue moves between two steps. Each int32, ``[2, n]``. Return the end of the swap-out."""
        self._check_ended()
        swapped_out: Mark | None = None
        if swap_out.shape[1]:
            self._swaps_after(self._fences.swap_out(swap_out[0]))
            start = self._queues.mark_swaps()
            self._queues.swap_out(swap_out)
            swapped_out = self._mark_swap(start, swap_out.shape[1])
            self._read.update(swap_out[0].tolist())
        if swap_in.shape[1]:
            self._swaps_after(self._fences.swap_in(swap_in[1]))
            start = self._queues.mark_swaps()
            self._queues.swap_in(swap_in)
            self._mark_swap(start, swap_in.shape[1])
        if copies.shape[1]:
            self._steps_after(self._fences.copy(*copies))
            start = self._queues.mark_steps(timed=True)
            self._queues.copy(copies)
            end = self._queues.mark_steps(timed=True)
            self._work.append((self._fences.num_given, end))
            self._coming.append(_TimedMove(start, end, copies.shape[1]))
        return swapped_out

    def load(self, contents: HostBytes, blocks: Int32Array) -> None:
        """Queue contents from elsewhere, uint8, ``[n, block_bytes]``, for ``blocks``, int32, ``[n]``."""
        self._check_ended()
        self._swaps_after(self._fences.swap_in(blocks))
        start = self._queues.mark_swaps()
        self._queues.load(contents, blocks)
        self._mark_swap(start, len(blocks))

    def before_step(self, batch: StepBatch) -> None:
        """Make the step wait for its moves."""
        # A new row holds nothing, even if the step that should have ended the old row failed.
        ended = dict.fromkeys(batch.finished_rows.tolist()) | dict.fromkeys(new.row for new in batch.new_rows)
        if ended:
            self._fences.rows_ended(self._rows.release(ended))
        continued: list[int] = []
        if self._read:
            continued = [block for block in self._rows.newest(batch.rows.tolist()) if block in self._read]
            self._read.clear()
        if batch.new_blocks.shape[1]:
            self._rows.append(batch.new_blocks)
        if self._swaps:
            self._check_ended()
        self._steps_after(self._fences.step(batch.new_blocks[1], np.array(continued, dtype=np.int32)))

    def after_step(self) -> int:
        """See ``BlockMover.after_step``."""
        number = self._fences.step_given()
        self._work.append((number, self._queues.mark_steps()))
        if len(self._work) > _MOST_WATCHED:
            self._check_ended()
        if self._coming:
            self._timed[number], self._coming = self._coming, []
            # Nothing asks for the times of failed steps. Copy first: another thread may read the times now.
            for forgotten in sorted(self._timed.copy())[:-_MOST_UNASKED]:
                self._timed.pop(forgotten, None)
        return number

    def move_time_us(self, number: int) -> int:
        """See ``BlockMover``. A running swap-out counts with the time measured at opening."""
        moves = self._timed.pop(number, ())
        return round(sum(self._time_us(move) for move in moves))

    def measure_swap_us(self) -> float:
        """See ``BlockMover.measure_swap_us``. Call before the first step."""
        blocks = np.arange(min(_TIMED_BLOCKS, self._queues.num_blocks, self._queues.num_host_blocks), dtype=np.int32)
        if not len(blocks):
            return 0.0
        pairs = np.stack((blocks, blocks))
        queues = self._queues.scratch(len(blocks))
        times_ms = []
        for _ in range(1 + _TIMED_ROUNDS):
            queues.synchronize()
            start = queues.mark_swaps()
            queues.swap_out(pairs)
            queues.swap_in(pairs)
            end = queues.mark_swaps()
            end.synchronize()
            times_ms.append(start.elapsed_time(end))
        self._swap_us = min(times_ms[1:]) * 1e3 / (2 * len(blocks))
        return self._swap_us

    def close(self) -> None:
        """Wait for the device: torch does not track its use of host blocks."""
        self._queues.synchronize()

    def _mark_swap(self, start: Mark, num_blocks: int) -> Mark:
        end = self._queues.mark_swaps()
        self._swaps.append((self._fences.num_swaps, end))
        self._coming.append(_TimedMove(start, end, num_blocks))
        return end

    def _swaps_after(self, work: int) -> None:
        if work != NOTHING:
            self._queues.swaps_wait(_mark_of(self._work, work) or self._queues.mark_steps())

    def _steps_after(self, swap: int) -> None:
        if swap != NOTHING:
            self._queues.steps_wait(_mark_of(self._swaps, swap) or self._queues.mark_swaps())

    def _check_ended(self) -> None:
        self._fences.work_ended(_drop_ended(self._work))
        self._fences.swap_ended(_drop_ended(self._swaps))

    def _time_us(self, move: _TimedMove) -> float:
        return move.start.elapsed_time(move.end) * 1e3 if move.end.query() else move.num_blocks * self._swap_us


def _mark_of(marks: deque[tuple[int, Mark]], number: int) -> Mark | None:
    """Return None if that work failed."""
    return next((mark for marked, mark in marks if marked >= number), None)


def _drop_ended(marks: deque[tuple[int, Mark]]) -> int:
    ended = 0
    while marks and marks[0][1].query():
        ended, _ = marks.popleft()
    return ended
