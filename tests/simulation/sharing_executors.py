"""Simulated executors of one host: they read blocks out of each other's host pools, by the product's step cycle.

Owns: pools that outlive their executors, pulls that find nothing, and how long steps take. Must not know: the scheduler, roles, or streams.
"""

from collections import deque
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway_executor.backend import BackendConfig, StepBatch, StepResult
from headway_executor.backends.simulated import SimulatedBackend
from headway_executor.batch.diff_checks import Pull
from headway_executor.block_store.puller import FetchedBlocks, _check
from headway_executor.block_store.records import BlockRecords
from headway_executor.block_store.transport import RECORD, PulledBlocks
from headway_executor.step.loop import StepCycle
from headway_proto.columns import Int32Array
from headway_proto.step import SHARED_MEMORY
from simulation.world import SimulatedExecutor


class Silent:
    """A log that nobody reads."""

    def info(self, *arguments: object, **named: object) -> None: ...

    warning = error = info


class PacedBackend:
    """A simulated backend whose steps take ``row_s`` seconds for each row, one after another."""

    def __init__(self, backend: SimulatedBackend, row_s: float) -> None:
        self._backend = backend
        self._row_s = row_s
        self._now = 0.0
        self._results: deque[tuple[float, Future[StepResult], StepResult]] = deque()
        """By the time at which they are there."""

    def execute(self, batch: StepBatch) -> StepResult | Future[StepResult]:
        result = self._backend.execute(batch)
        if not self._row_s:
            return result
        begins = max(self._now, self._results[-1][0]) if self._results else self._now
        future: Future[StepResult] = Future()
        self._results.append((begins + self._row_s * len(batch.rows), future, result))
        return future

    def tick(self, now: float) -> None:
        self._now = now
        while self._results and self._results[0][0] <= now:
            _, future, result = self._results.popleft()
            future.set_result(result)

    def move_blocks(self, **moves: Int32Array) -> None:
        self._backend.move_blocks(**moves)

    def load_blocks(self, contents: NDArray[np.uint8], blocks: Int32Array) -> None:
        self._backend.load_blocks(contents, blocks)


class HostPools:
    """All pools of a host, by name; the next executor of a number takes its pool over."""

    def __init__(self, row_s: float = 0.0) -> None:
        self.row_s = row_s
        self.memory: dict[str, tuple[NDArray[np.void], NDArray[np.uint8]]] = {}
        self.num_pulled_blocks = 0
        self.are_readable = True
        """While this is False, no pull finds anything."""

    def executor(self, number: int, life: int, config: BackendConfig) -> SimulatedExecutor:
        """What a ``World`` makes its executors with."""
        return SharingExecutor(self, f"pool-{number}", life, config)

    def read(self, pull: Pull) -> tuple[NDArray[np.uint8], Int32Array, Int32Array]:
        """Contents and device blocks that are right, and the other device blocks."""
        if not self.are_readable or pull.pool not in self.memory:
            return np.empty((0, 0), dtype=np.uint8), pull.blocks[2][:0], pull.blocks[2]
        records, blocks = self.memory[pull.pool]
        found = PulledBlocks(records[pull.blocks[0]], blocks[pull.blocks[0]])
        right, _ = _check(found, pull)
        self.num_pulled_blocks += int(right.sum())
        return found.blocks[right], pull.blocks[2][right], pull.blocks[2][~right]


class SharingExecutor(SimulatedExecutor):
    """One life of an executor process with a host pool; it is its own ``Store``."""

    def __init__(self, pools: HostPools, pool: str, incarnation: int, config: BackendConfig) -> None:
        def host_memory(num_blocks: int, block_bytes: int, layout: str) -> NDArray[np.uint8]:
            del layout
            if pool not in pools.memory:
                pools.memory[pool] = np.zeros(num_blocks, RECORD), np.zeros((num_blocks, block_bytes), np.uint8)
            return pools.memory[pool][1]

        super().__init__(incarnation, msgspec.structs.replace(config, host_memory=host_memory))
        shared = {"host_pool": pool, "block_addresses": (f"{SHARED_MEMORY}:{pool}",)}
        self.info = self.link._info = msgspec.structs.replace(self.info, **shared)
        self._pools = pools
        self._records = BlockRecords(*pools.memory[pool])
        self._paced = PacedBackend(self.backend, pools.row_s)
        silent: Any = Silent()
        paced: Any = self._paced
        self.cycle = StepCycle(
            link=self.link, state=self.state, backend=paced, log=silent, wake=lambda: None, store=self
        )

    def receive(self, data: bytes, now: float) -> None:
        self.outbox += self.cycle.receive(data, now)

    def tick(self, now: float) -> None:
        self._paced.tick(now)
        self.outbox += self.cycle.tick(now)
        while self.cycle.next_deadline <= now:
            self.outbox += self.cycle.tick(now)

    def begin_write(self, host_blocks: Int32Array) -> int:
        return self._records.begin(host_blocks)

    def end_write(self, write: int, host_blocks: Int32Array, *, epoch: int, step: int) -> None:
        self._records.end(write, host_blocks, epoch=epoch, step=step)

    def forget(self) -> None:
        self._records.forget()

    def fetch(self, pulls: tuple[Pull, ...]) -> Future[FetchedBlocks]:
        parts = [self._pools.read(pull) for pull in pulls]
        contents, blocks, missing = zip(*parts, strict=True)
        filled = [each for each in contents if len(each)]
        future: Future[FetchedBlocks] = Future()
        future.set_result(
            FetchedBlocks(
                np.concatenate(filled) if filled else np.empty((0, 0), dtype=np.uint8),
                np.concatenate(blocks),
                np.concatenate(missing),
                (),
                0.0,
            )
        )
        return future
