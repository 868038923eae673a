"""Simulated executors of one host: they read blocks out of each other's host pools, by the product's step cycle.

Owns: pools that outlive their executors, and pulls that find nothing. Must not know: the scheduler, roles, or streams.
"""

from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway_executor.backend import BackendConfig
from headway_executor.block_store.puller import FetchedBlocks, _check
from headway_executor.block_store.records import BlockRecords
from headway_executor.block_store.transport import RECORD, PulledBlocks
from headway_executor.diff_checks import Pull
from headway_executor.loop import StepCycle
from headway_proto.columns import Int32Array
from headway_proto.step import SHARED_MEMORY
from simulation.world import SimulatedExecutor


class Silent:
    """A log that nobody reads."""

    def info(self, *arguments: object, **named: object) -> None: ...

    warning = error = info


class HostPools:
    """All pools of a host, by name; the next executor of a number takes its pool over."""

    def __init__(self) -> None:
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
        silent: Any = Silent()
        self.cycle = StepCycle(
            link=self.link, state=self.state, backend=self.backend, log=silent, wake=lambda: None, store=self
        )

    def receive(self, data: bytes, now: float) -> None:
        self.outbox += self.cycle.receive(data, now)

    def tick(self, now: float) -> None:
        self.outbox += self.cycle.tick(now)
        while self.cycle.next_deadline <= now:
            self.outbox += self.cycle.tick(now)

    def begin_write(self, host_blocks: Int32Array) -> int:
        return self._records.begin(host_blocks)

    def end_write(self, write: int, host_blocks: Int32Array, *, epoch: int, step: int) -> None:
        self._records.end(write, host_blocks, epoch=epoch, step=step)

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
