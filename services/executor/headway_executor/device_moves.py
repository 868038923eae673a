"""Moves of KV blocks beside the steps of a CUDA device.

Owns: the pinned blocks in main memory, the stream that swaps run on, the events that order it against the steps, and the
times that moves take.
Must not know: rows' tokens, attention, or when a block is swapped. What waits for what is decided in ``move_fences``.

A backend calls, for each step and on one thread:

1. ``move``, where the step moves blocks: the swaps are given to a stream of their own, the copies to the steps' stream;
2. ``before_step``, before it gives the step's first work to the steps' stream;
3. ``after_step``, behind its last work, also when the step has failed: part of it may run;
4. ``move_time_us``, once the step's result is there; this one from any thread.

Nothing here waits for the device but opening, measuring and closing. Nothing is given to the device by ``before_step``
or ``after_step`` but a wait where one is needed, and an event; both stand outside a captured graph.
"""

from collections import deque
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from headway_executor.backend import StepBatch
from headway_executor.host_pool import allocate_blocks
from headway_executor.move_fences import NOTHING, MoveFences, RowBlocks
from headway_proto.columns import Int32Array

_HIGH_PRIORITY = -1
_TIMED_BLOCKS = 16
_TIMED_ROUNDS = 3
_MOST_WATCHED = 8
"""Steps whose marks are kept without a look at them; more than are ever in flight."""

_MOST_UNASKED = 32
"""Steps whose times are kept for who asks; more than are ever in flight."""

# Its constructors have no types.
_untyped_cuda: Any = torch.cuda


class Mark(Protocol):
    """A place in a queue, such as a CUDA event."""

    def query(self) -> bool:
        """Whether everything before it is over. Does not wait."""
        ...

    def synchronize(self) -> None:
        """Wait until everything before it is over."""
        ...

    def elapsed_time(self, later: Any, /) -> float:
        """Milliseconds between two marks that are over; both timed."""
        ...


class MoveQueues(Protocol):
    """The two queues of a device, and the moves that can be given to them. Pairs: int32, shape ``[2, n]``."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the device."""
        ...

    @property
    def num_host_blocks(self) -> int:
        """Blocks in main memory."""
        ...

    def mark_steps(self, *, timed: bool = False) -> Mark:
        """A mark behind all that was given to the step queue."""
        ...

    def mark_swaps(self) -> Mark:
        """A timed mark behind all that was given to the swap queue."""
        ...

    def steps_wait(self, mark: Mark) -> None:
        """What is given to the step queue from now on begins after ``mark``."""
        ...

    def swaps_wait(self, mark: Mark) -> None:
        """What is given to the swap queue from now on begins after ``mark``."""
        ...

    def swap_out(self, pairs: Int32Array) -> None:
        """Give (block, host block) to the swap queue."""
        ...

    def swap_in(self, pairs: Int32Array) -> None:
        """Give (host block, block) to the swap queue."""
        ...

    def copy(self, pairs: Int32Array) -> None:
        """Give (source, destination) to the step queue."""
        ...

    def synchronize(self) -> None:
        """Wait until both queues are empty."""
        ...


class CudaQueues:
    """The queues of the pool ``layers`` (``[num_layers, num_blocks, *block]``, contiguous, on a CUDA device).

    ``compute_stream`` is where the steps run. ``num_host_blocks`` blocks are pinned.

    Raises:
        BackendConfigError: the main memory for them cannot be had.
    """

    def __init__(self, layers: Tensor, *, num_host_blocks: int, compute_stream: torch.cuda.Stream) -> None:
        self._layers = layers
        self._host = allocate_blocks((num_host_blocks, layers.shape[0], *layers.shape[2:]), layers.dtype, layers.device)
        self._steps = compute_stream
        # Before the steps: what is swapped in, a step waits for; and swaps take little of the device.
        self._swaps: torch.cuda.Stream = _untyped_cuda.Stream(layers.device, priority=_HIGH_PRIORITY)
        self._swaps.wait_stream(torch.cuda.current_stream(layers.device))  # which may still fill the pool with zeros

    @property
    def num_blocks(self) -> int:
        """See ``MoveQueues``."""
        return self._layers.shape[1]

    @property
    def num_host_blocks(self) -> int:
        """See ``MoveQueues``."""
        return len(self._host)

    def mark_steps(self, *, timed: bool = False) -> Mark:
        """See ``MoveQueues``."""
        return cast(Mark, self._steps.record_event(_untyped_cuda.Event(enable_timing=timed)))

    def mark_swaps(self) -> Mark:
        """See ``MoveQueues``."""
        return cast(Mark, self._swaps.record_event(_untyped_cuda.Event(enable_timing=True)))

    def steps_wait(self, mark: Mark) -> None:
        """See ``MoveQueues``."""
        self._steps.wait_event(cast(torch.cuda.Event, mark))

    def swaps_wait(self, mark: Mark) -> None:
        """See ``MoveQueues``."""
        self._swaps.wait_event(cast(torch.cuda.Event, mark))

    def swap_out(self, pairs: Int32Array) -> None:
        """See ``MoveQueues``."""
        from headway_kernels.gpu import block_moves

        with torch.cuda.stream(self._swaps):
            block_moves.swap_out(self._layers, self._host, self._column(pairs))

    def swap_in(self, pairs: Int32Array) -> None:
        """See ``MoveQueues``."""
        from headway_kernels.gpu import block_moves

        with torch.cuda.stream(self._swaps):
            block_moves.swap_in(self._layers, self._host, self._column(pairs))

    def copy(self, pairs: Int32Array) -> None:
        """See ``MoveQueues``."""
        from headway_kernels.gpu import block_moves

        with torch.cuda.stream(self._steps):
            block_moves.copy_blocks(self._layers, self._column(pairs))

    def synchronize(self) -> None:
        """See ``MoveQueues``."""
        self._steps.synchronize()
        self._swaps.synchronize()

    def _column(self, pairs: Int32Array) -> Tensor:
        """On the device, for the current stream: torch keeps both memories from reuse until that stream is past them.

        From pinned memory, since from any other the copy might wait for the stream.
        """
        own = np.array(pairs, dtype=np.int32, order="C")
        return torch.from_numpy(own).pin_memory().to(self._layers.device, non_blocking=True)


class _TimedMove(NamedTuple):
    """Moves between two marks."""

    start: Mark
    end: Mark
    num_blocks: int


class DeviceMoves:
    """The moves of one pool; see the module for the order of calls."""

    def __init__(self, queues: MoveQueues) -> None:
        self._queues = queues
        self._fences = MoveFences(queues.num_blocks)
        self._rows = RowBlocks()
        self._work: deque[tuple[int, Mark]] = deque()
        self._swaps: deque[tuple[int, Mark]] = deque()
        self._coming: list[_TimedMove] = []
        self._timed: dict[int, list[_TimedMove]] = {}
        self._swap_us = 0.0

    @classmethod
    def of_pool(cls, layers: Tensor, *, num_host_blocks: int, compute_stream: torch.cuda.Stream) -> "DeviceMoves":
        """For a pool on a CUDA device, whose steps run on ``compute_stream``; see ``CudaQueues``.

        Raises:
            BackendConfigError: the main memory for the host blocks cannot be had.
        """
        return cls(CudaQueues(layers, num_host_blocks=num_host_blocks, compute_stream=compute_stream))

    @property
    def num_host_blocks(self) -> int:
        """How many blocks can be swapped out."""
        return self._queues.num_host_blocks

    def move(self, *, copies: Int32Array, swap_out: Int32Array, swap_in: Int32Array) -> None:
        """Give the moves of the next step to the device: out, in, then copy. Each int32, shape ``[2, n]``."""
        self._note_what_ended()
        if swap_out.shape[1]:
            self._swaps_after(self._fences.swap_out(swap_out[0]))
            start = self._queues.mark_swaps()
            self._queues.swap_out(swap_out)
            self._mark_swap(start, swap_out.shape[1])
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

    def before_step(self, batch: StepBatch) -> None:
        """Let the steps' stream wait for those moves that the step must not overtake."""
        # A row that is new holds nothing, whatever became of the step that was to end it.
        ended = dict.fromkeys(batch.finished_rows.tolist()) | dict.fromkeys(new.row for new in batch.new_rows)
        if ended:
            self._fences.rows_ended(self._rows.release(ended))
        if batch.new_blocks.shape[1]:
            self._rows.append(batch.new_blocks)
        if self._swaps:
            self._note_what_ended()
        self._steps_after(self._fences.step(batch.new_blocks[1]))

    def after_step(self) -> int:
        """The step has been given to the device; return its number, for ``move_time_us``."""
        number = self._fences.step_given()
        self._work.append((number, self._queues.mark_steps()))
        if len(self._work) > _MOST_WATCHED:
            self._note_what_ended()
        if self._coming:
            self._timed[number], self._coming = self._coming, []
            # Of steps that failed, nobody asks. A copy, since another thread may be asking.
            for forgotten in sorted(self._timed.copy())[:-_MOST_UNASKED]:
                self._timed.pop(forgotten, None)
        return number

    def move_time_us(self, number: int) -> int:
        """Microseconds that the moves of that step took on the device; 0 where it had none. Ask once, after the step.

        They ran beside steps as far as they could, so a step has not become so much longer. A swap-out may outlast its
        step, and nothing waits for it here: then it counts with what it was measured to take when the device was opened.
        """
        moves = self._timed.pop(number, ())
        return round(sum(self._time_us(move) for move in moves))

    def measure_swap_us(self) -> float:
        """Microseconds that one block takes one way; 0.0 without host blocks. Before the first step; blocks stay as they are.

        The best of a few rounds over a few blocks, after one that has compiled the kernels.
        """
        blocks = np.arange(min(_TIMED_BLOCKS, self._queues.num_blocks, self._queues.num_host_blocks), dtype=np.int32)
        if not len(blocks):
            return 0.0
        pairs = np.stack((blocks, blocks))
        times_ms = []
        for _ in range(1 + _TIMED_ROUNDS):
            self._queues.synchronize()
            start = self._queues.mark_swaps()
            self._queues.swap_out(pairs)
            self._queues.swap_in(pairs)
            end = self._queues.mark_swaps()
            end.synchronize()
            times_ms.append(start.elapsed_time(end))
        self._swap_us = min(times_ms[1:]) * 1e3 / (2 * len(blocks))
        return self._swap_us

    def close(self) -> None:
        """Wait until nothing reads or writes the host blocks any more: torch does not know that the device does."""
        self._queues.synchronize()

    def _mark_swap(self, start: Mark, num_blocks: int) -> None:
        end = self._queues.mark_swaps()
        self._swaps.append((self._fences.num_swaps, end))
        self._coming.append(_TimedMove(start, end, num_blocks))

    def _swaps_after(self, work: int) -> None:
        if work != NOTHING:
            self._queues.swaps_wait(_mark_of(self._work, work) or self._queues.mark_steps())

    def _steps_after(self, swap: int) -> None:
        if swap != NOTHING:
            self._queues.steps_wait(_mark_of(self._swaps, swap) or self._queues.mark_swaps())

    def _note_what_ended(self) -> None:
        """Look, without waiting, at how far both queues are."""
        self._fences.work_ended(_drop_ended(self._work))
        self._fences.swap_ended(_drop_ended(self._swaps))

    def _time_us(self, move: _TimedMove) -> float:
        return move.start.elapsed_time(move.end) * 1e3 if move.end.query() else move.num_blocks * self._swap_us


def _mark_of(marks: deque[tuple[int, Mark]], number: int) -> Mark | None:
    """The first mark at or behind that number; None where what has the number failed before it was marked."""
    return next((mark for marked, mark in marks if marked >= number), None)


def _drop_ended(marks: deque[tuple[int, Mark]]) -> int:
    """Forget the marks that are over, which come first; return the number of the last of them, or 0."""
    ended = 0
    while marks and marks[0][1].query():
        ended, _ = marks.popleft()
    return ended
