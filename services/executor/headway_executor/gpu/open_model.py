"""A model that is open on a device: its steps one behind the other, and the moves of its blocks.

Owns: when a step's results are built, and how long it took. Must not know: what is launched for a step, how a model is
opened, epochs.
"""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from headway_executor.backend import ReadAdapter, StepBatch, StepResult
from headway_executor.gpu.block_mover import BlockMover
from headway_executor.gpu.device_parts import DeviceParts
from headway_executor.gpu.readback import Readback
from headway_executor.gpu.runtime import Mark
from headway_executor.gpu.step_log import StepLog
from headway_executor.memory.device_moves import Mark as MovesMark
from headway_executor.memory.host_pool import HostBytes
from headway_executor.models.adapters import ModelAdapters
from headway_proto.adapters import LoadedAdapter
from headway_proto.columns import EMPTY_COLUMN, Int32Array


class StepLauncher(Protocol):
    """What is launched for a step."""

    def run(self, batch: StepBatch) -> Callable[[], StepResult]:
        """Launch it; the returned function builds the result once the device is done."""
        ...

    def forget_blocks(self, blocks: Int32Array) -> None:
        """Other contents come to these blocks."""
        ...

    def close(self) -> None:
        """End its threads."""
        ...


class OpenModel:
    """Runs the steps of ``parts``, whose pools are open; ``mover`` has the moves of their blocks."""

    def __init__(self, parts: DeviceParts, mover: BlockMover, steps: StepLauncher) -> None:
        config = parts.config
        self.parts = parts
        self.mover = mover
        self._steps = steps
        self._readback = Readback(parts.runtime) if parts.runtime.is_cuda else None
        self._swap_ends: Readback | None = None
        self._last_ended: Mark | None = None
        file = config.options.get("step_log", "") if config.place.rank == 0 else ""
        self._step_log = StepLog(Path(file)) if file else None

    def execute(self, batch: StepBatch) -> StepResult | Future[StepResult]:
        """See ``ExecutorBackend.execute``."""
        num_tokens, most_tokens = int(batch.num_scheduled_tokens.sum()), self.parts.config.max_num_batched_tokens
        if num_tokens > most_tokens:
            raise ValueError(f"a step of {num_tokens} tokens; this backend was opened for {most_tokens}")
        self.mover.before_step(batch)
        started = self.parts.runtime.mark()
        try:
            build = self._steps.run(batch)
        finally:
            number = self.mover.after_step()
        ended, before = self.parts.runtime.mark(), self._last_ended
        self._last_ended = ended

        def timed() -> StepResult:
            device_time_us = ended.microseconds_since(started)
            if self._step_log is not None:
                idle_us = None if before is None else started.microseconds_since(before)
                self._step_log.add(batch, device_time_us=device_time_us, idle_us=idle_us)
            return msgspec.structs.replace(
                build(), device_time_us=device_time_us, move_time_us=self.mover.move_time_us(number)
            )

        return timed() if self._readback is None else self._readback.when_reached(ended, timed)

    def _when_moved(self, swapped_out: MovesMark | None) -> Future[None] | None:
        """The future of a swap-out; a thread of its own waits, because what follows must not delay results."""
        if swapped_out is None:
            return None
        if self._swap_ends is None:
            self._swap_ends = Readback(self.parts.runtime)
        return self._swap_ends.when_reached(self.parts.runtime.mark(), swapped_out.synchronize)

    @property
    def adapters(self) -> ModelAdapters:
        """Those of its rows."""
        return self.parts.adapters.adapters

    def load_adapter(self, read: ReadAdapter) -> LoadedAdapter:
        """See ``AdapterBackend.load_adapter``. Before the first one, steps of rows with adapters are recorded; by ranks that
        gather meanwhile only before the first such step, which has the same place among the steps of all.
        """
        adapters = self.adapters
        if self.parts.mates is None:
            # Behind the steps that are launched, and before the next one sends its own.
            self.parts.record_adapted()
        return adapters.load(read)

    def close(self) -> None:
        """Give back threads, files and pinned memory; call it once."""
        self._steps.close()
        self.mover.close()
        if self._swap_ends is not None:
            self._swap_ends.close()
        if self._readback is not None:
            self._readback.close()
        if self._step_log is not None:
            self._step_log.close()

    def move(self, *, copies: Int32Array, swap_out: Int32Array, swap_in: Int32Array) -> Future[None] | None:
        """See ``ExecutorBackend.move_blocks``."""
        self._steps.forget_blocks(np.concatenate((copies[1], swap_in[1])))
        return self._when_moved(self.mover.move(copies=copies, swap_out=swap_out, swap_in=swap_in))

    def load(self, contents: HostBytes, blocks: Int32Array) -> None:
        """See ``ExecutorBackend.load_blocks``."""
        self._steps.forget_blocks(blocks)
        self.mover.load(contents, blocks)


def nothing_drawn() -> StepResult:
    """The result of a step without rows that draw."""
    return StepResult(sampled_token_ids=EMPTY_COLUMN)
