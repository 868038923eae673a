"""The simulated executor process: the real cycle, link and mirror over a model of a device.

Owns: how long steps take, and how the device and its memory fail. Must not know: the scheduler, or links.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec

from headway_executor.backend import ModelFilesError, ReadAdapter, StepBatch, StepOutOfMemoryError, StepResult
from headway_executor.batch.batch_state import AppliedStep, BatchState, ImpossibleDiff
from headway_executor.links.step_link import StepLink
from headway_executor.step.adapter_changes import at_once
from headway_executor.step.loop import StepCycle
from headway_proto.adapters import LoadedAdapter
from headway_proto.step import SHARED_MEMORY, BackendInfo, SchedulerOutput
from simulation import fault_invariants as invariants
from simulation.fault_invariants import Violation
from simulation.fault_model import ModelOfBlocks, adapter_of, backend_info
from simulation.fault_process import Process
from simulation.fault_store import FaultStore

if TYPE_CHECKING:
    from simulation.fault_world import FaultWorld


class Silent:
    """A log that nobody reads."""

    def info(self, *arguments: object, **named: object) -> None: ...

    warning = error = info


def incarnation_of(executor: bytes) -> int:
    return 7000 + int(executor.split(b"-")[1])


class WatchedState(BatchState):
    """The executor's mirror, compared with the scheduler's columns after every step."""

    def __init__(self, info: BackendInfo, executor: "ExecutorProcess") -> None:
        super().__init__(info)
        self._executor = executor
        self._next_step = 0

    def begin_epoch(self) -> None:
        super().begin_epoch()
        self._next_step = 0
        self._executor.is_flipped = False

    def apply(self, output: SchedulerOutput) -> AppliedStep:
        executor, world = self._executor, self._executor.world
        with world.watching():
            current = (executor.link.epoch, self._next_step)
            invariants.epoch_fence("a step", (output.epoch, output.step), current)
            self._next_step += 1
            try:
                applied = super().apply(output)
            except ImpossibleDiff as error:
                if not executor.is_flipped:
                    raise Violation("MIRROR", f"impossible diff in step {output.step}: {error}") from error
                raise
            key = (executor.link._scheduler_incarnation, output.epoch, output.step)
            ours, theirs = world.digests.get(key), self.digest()
            if not executor.is_flipped:
                invariants.mirror(f"digest of step {output.step}", ours, theirs)
            elif ours != theirs and output.step % world.schedule.settings.digest_every == 0:
                world.must_reopen.add(key)
            return applied


class ExecutorProcess(Process):
    """The real cycle over a model of a device that takes ``step_s`` a step, one after another."""

    def __init__(self, world: "FaultWorld", life: int, slot: int, shrunk: int = 0) -> None:
        super().__init__(world, life)
        self.slot = slot
        settings = world.schedule.settings
        info = backend_info(settings, shrunk, life)
        self.pool = world.pools.hold(self, slot, info.num_host_blocks, info.block_size)
        if settings.shares_host and info.num_host_blocks:
            info = msgspec.structs.replace(
                info, host_pool=self.pool.name, block_addresses=(f"{SHARED_MEMORY}:{self.pool.name}",)
            )
        self.info = info
        self.link = StepLink(incarnation=incarnation_of(self.name), info=info)
        self.model = ModelOfBlocks(info, self._on_wrong_block, self.pool)
        self.state = WatchedState(info, self)
        store = FaultStore(self, self.pool)
        self.cycle = StepCycle(
            link=self.link,
            state=self.state,
            backend=self,
            log=Silent(),
            wake=self._wake_soon,
            store=store,
            beside=self._beside,
        )
        self.is_flipped = False
        self.num_failing = 0
        self.memory_tokens = 0
        self._num_memory_errors = 0
        self._has_failed = False
        """Whether a step failed before the model had heard of it, and of the rows that ended with it."""
        self._busy_until = 0.0

    @property
    def name(self) -> bytes:
        return b"executor-%d-%d" % (self.life, self.world.links[self.slot].connection)

    def work(self, frames: list[tuple[bytes, bytes]]) -> None:
        now, cycle = self.world.now, self.cycle
        outgoing = cycle.tick(now)
        outgoing += cycle.collect(now)
        for _, data in frames:
            outgoing += cycle.receive(data, now)
        for frame in outgoing:
            self.world.send_up(self.slot, self.name, frame)
        self.wake_at(cycle.next_deadline)

    def _wake_soon(self) -> None:
        """A future that was waited for is done; who waits may be in the middle of a call."""
        self.wake_at(self.world.now)

    def flip(self) -> bool:
        """Memory corruption: a block table says something else from now on. Return whether there was one."""
        rows = self.state.live_rows
        if len(rows) and self.link.running:
            row, tables = int(rows[0]), self.state._tables
            last = int(tables.num_blocks[row]) - 1
            if last >= 0:
                tables.table[row, last] ^= 1
                self.is_flipped = True
                return True
        return False

    # The calls of a backend that the cycle uses.

    def execute(self, batch: StepBatch) -> StepResult | Future[StepResult]:
        total = int(batch.num_scheduled_tokens.sum())
        error: Exception | None = None
        if self.num_failing:
            self.num_failing -= 1
            error = RuntimeError("the step failed")
        elif self.memory_tokens and total > self.memory_tokens:
            error = StepOutOfMemoryError(total, "simulated")
            self._num_memory_errors += 1
            with self.world.watching():
                num_requests = len(self.world.schedule.requests)
                invariants.memory_respected(self._num_memory_errors, self.memory_tokens, num_requests)
        if error is not None and total % 2:
            self._has_failed = True
            raise error
        with self.world.watching():
            result = self.model.run(batch)
            if not self._has_failed:
                invariants.mirror("rows", self.state.live_rows.tolist(), self.model.rows)
        step_s = self.world.schedule.settings.step_s
        if not step_s and error is None:
            return result
        self._busy_until = max(self._busy_until, self.world.now) + step_s
        future: Future[StepResult] = Future()
        self.world.at(self._busy_until, lambda: self._complete(future, result, error))
        return future

    def _complete(self, future: Future[StepResult], result: StepResult, error: Exception | None) -> None:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
        self.wake()

    def move_blocks(self, *, copies: Any, swap_out: Any, swap_in: Any) -> None:
        if self.is_flipped and swap_out.size:
            self.pool.wrong_epochs.add(self.link.epoch)
        self.model.move(copies.tolist(), swap_out.tolist(), swap_in.tolist())

    def load_blocks(self, contents: Any, blocks: Any) -> None:
        self.model.load(contents, blocks)

    def read_adapter(self, name: str, directory: str) -> ReadAdapter:
        if name in self.world.spoiled:
            raise ModelFilesError(f"{directory}: it has gone")
        return ReadAdapter(adapter_of(name), None)

    def load_adapter(self, read: ReadAdapter) -> LoadedAdapter:
        self.model.adapters[read.adapter.identity] = read.adapter
        return read.adapter

    def unload_adapter(self, name: str) -> None:
        self.model.adapters.pop(adapter_of(name).identity, None)

    def _beside(self, call: Callable[[], ReadAdapter]) -> "Future[ReadAdapter]":
        seconds = self.world.schedule.settings.adapter_s
        if not seconds:
            return at_once(call)
        read, future = at_once(call), Future[ReadAdapter]()

        def end() -> None:
            if (error := read.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(read.result())

        self.world.at(self.world.now + seconds, end)
        return future

    def _on_wrong_block(self, what: str) -> None:
        pools = self.world.pools
        if not self.is_flipped and not pools.may_be_wrong and self.link.epoch not in pools.moot_epochs:
            raise Violation("BLOCK-EXCLUSIVITY", what)
