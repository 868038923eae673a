"""The host pools of the simulated world, and the way of blocks from one to another executor, which may harm them.

Owns: pools that outlive their processes, and what goes wrong with a pull. Must not know: the scheduler, or which requests
blocks belong to.

Records and their check are the product's. Only time and transports are simulated.
"""

import random
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from headway_executor.batch.diff_checks import Pull
from headway_executor.block_store.puller import FetchedBlocks, _check
from headway_executor.block_store.records import BlockRecords
from headway_executor.block_store.transport import RECORD, PulledBlocks
from headway_proto.columns import Int32Array

if TYPE_CHECKING:
    from simulation.fault_executor import ExecutorProcess
    from simulation.fault_world import FaultWorld

PATIENCE_S = 0.5
_PAUSE_S = 0.02
_HARMS = ("lost", "late", "damaged", "another")


class FaultPool:
    """One pool in shared memory; ``holder``: the process that writes it. Each position of a block is a 64-bit number."""

    def __init__(self, name: str, num_blocks: int, block_size: int) -> None:
        self.name = name
        self.block_size = block_size
        self.records = np.zeros(num_blocks, dtype=RECORD)
        self.blocks = np.zeros((num_blocks, block_size * 8), dtype=np.uint8)
        self.older_records, self.older_blocks = self.records.copy(), self.blocks.copy()
        """What each block held before the newest write."""
        self.holder: ExecutorProcess | None = None
        self.wrong_epochs: set[int] = set()
        """In these an executor with a wrong table wrote blocks, and no digest has told yet: nobody can know."""

    def keep_older(self, host_blocks: Int32Array) -> None:
        """These blocks are about to be written."""
        self.older_records[host_blocks] = self.records[host_blocks]
        self.older_blocks[host_blocks] = self.blocks[host_blocks]

    def contents(self, host_block: int) -> list[int]:
        numbers: list[int] = self.blocks[host_block].view(np.uint64).tolist()
        return numbers

    def write(self, host_block: int, contents: list[int]) -> None:
        self.blocks[host_block] = np.array(contents, dtype=np.uint64).view(np.uint8)


class FaultPools:
    """All pools of a world. ``harm``: the share of pulls that something happens to."""

    def __init__(self, world: "FaultWorld") -> None:
        self._world = world
        self._rng = random.Random(f"pulls {world.schedule.seed}")
        self._older_rng = random.Random(f"older {world.schedule.seed}")
        self.by_name: dict[str, FaultPool] = {}
        self.num_harmed = 0
        self.moot_epochs: set[int] = set()
        """They are over at the scheduler because of wrong blocks, and what their last steps still find is of no use."""

    def hold(self, executor: "ExecutorProcess", slot: int, num_blocks: int, block_size: int) -> FaultPool:
        """The pool that a dead process of this place left, or a new one."""
        for pool in self.by_name.values():
            is_free = pool.holder is None or pool.holder.is_dead
            is_alike = len(pool.records) == num_blocks and pool.block_size == block_size
            if is_free and pool.name.startswith(f"pool-{slot}-") and is_alike:
                if self._world.schedule.settings.loses_pools:
                    del self.by_name[pool.name]
                    break
                pool.holder = executor
                return pool
        pool = FaultPool(f"pool-{slot}-{executor.life}", num_blocks, block_size)
        pool.holder = executor
        self.by_name[pool.name] = pool
        return pool

    @property
    def may_be_wrong(self) -> bool:
        """Whether any pool holds what nobody can know to be wrong."""
        return any(pool.wrong_epochs for pool in self.by_name.values())

    def told(self, epoch: int) -> None:
        """A digest has told that an executor's table was wrong: from now on what it wrote must not be used."""
        for pool in self.by_name.values():
            pool.wrong_epochs.discard(epoch)

    def read(self, pull: Pull, block_size: int) -> PulledBlocks | None:
        """Private copies, as they arrive; None if the pool cannot be read, for example with blocks of another size."""
        pool, host_blocks = self.by_name.get(pull.pool), pull.blocks[0]
        harm = self._harm()
        if (
            pool is None
            or pool.block_size != block_size
            or harm == "lost"
            or (len(host_blocks) and host_blocks.max() >= len(pool.records))
        ):
            return None
        records, blocks = pool.records[host_blocks], pool.blocks[host_blocks]
        victim = self._rng.randrange(len(host_blocks)) if harm else 0
        if harm == "late" and self._older_rng.random() < 0.5:
            place = host_blocks[victim]
            records[victim], blocks[victim] = pool.older_records[place], pool.older_blocks[place]
        elif harm == "late":
            records[victim] = np.zeros(1, dtype=RECORD)[0]
        elif harm == "damaged":
            blocks[victim, self._rng.randrange(blocks.shape[1])] ^= 1 << self._rng.randrange(8)
        elif harm == "another":
            other = self._rng.randrange(len(pool.records))
            if self._rng.random() < 0.5:
                blocks[victim] = pool.blocks[other]
            else:
                records[victim], blocks[victim] = pool.records[other], pool.blocks[other]
        return PulledBlocks(records, blocks)

    def _harm(self) -> str:
        if self._rng.random() >= self._world.schedule.settings.harm_of_pulls:
            return ""
        self.num_harmed += 1
        return self._rng.choice(_HARMS)


class FaultStore:
    """The ``Store`` of one executor's step cycle."""

    def __init__(self, executor: "ExecutorProcess", pool: FaultPool) -> None:
        self._executor = executor
        self._pools = executor.world.pools
        self._pool = pool
        self._records = BlockRecords(pool.records, pool.blocks)

    def begin_write(self, host_blocks: Int32Array) -> int:
        self._pool.keep_older(host_blocks)
        return self._records.begin(host_blocks)

    def end_write(self, write: int, host_blocks: Int32Array, *, epoch: int, step: int) -> None:
        self._records.end(write, host_blocks, epoch=epoch, step=step)

    def forget(self) -> None:
        self._records.forget()

    def fetch(self, pulls: tuple[Pull, ...]) -> Future[FetchedBlocks]:
        future: Future[FetchedBlocks] = Future()
        targets = np.concatenate([pull.blocks[2] for pull in pulls])
        parts, first = [], 0
        for pull in pulls:
            parts.append((pull, np.arange(first, first + pull.blocks.shape[1])))
            first += pull.blocks.shape[1]
        right: dict[int, np.ndarray] = {}
        self._attempt(future, targets, parts, right, self._executor.world.now + PATIENCE_S)
        return future

    def _attempt(
        self,
        future: Future[FetchedBlocks],
        targets: Int32Array,
        parts: list[tuple[Pull, np.ndarray]],
        right: dict[int, np.ndarray],
        deadline: float,
    ) -> None:
        """Bring what is there; ask again soon for what is older. ``right``: contents by place."""
        world, late = self._executor.world, []
        for pull, places in parts:
            pulled = self._pools.read(pull, self._pool.block_size)
            if pulled is None:
                continue
            is_right, is_older = _check(pulled, pull)
            right |= {int(places[each]): pulled.blocks[each] for each in is_right.nonzero()[0]}
            if is_older.any():
                late.append((pull._replace(blocks=pull.blocks[:, is_older]), places[is_older]))
        if late and world.now < deadline:
            world.at(world.now + _PAUSE_S, lambda: self._attempt(future, targets, late, right, deadline))
            return
        found = sorted(right)
        contents = np.stack([right[place] for place in found]) if found else np.empty((0, 0), dtype=np.uint8)
        missing = [place for place in range(len(targets)) if place not in right]
        future.set_result(FetchedBlocks(contents, targets[found], targets[missing], (), 0.0))
