"""The books of one host pool: what is free, kept, lent, and which step wrote each block.

Owns: these books, for as long as the pool lives, which may be longer than an executor's process and many epochs. Must
not know: requests, or when a copy pays.

A *lease* keeps blocks for a request that this core no longer has, or that goes on in a later epoch. It ends when the
blocks are returned (``return_lease``).
"""

from typing import NamedTuple

import numpy as np

from headway_proto.columns import Int32Array
from headway_scheduler.core.memory.host_pool import HostPool
from headway_scheduler.core.memory.host_prefixes import HostPrefixes
from headway_scheduler.core.state.indices import BlockIndices
from headway_scheduler.core.state.limits import ExecutorCapacity
from headway_scheduler.core.state.stored_blocks import StoredBlocks

_UNWRITTEN = -1


class Writing(NamedTuple):
    """Blocks that one epoch wrote: ``steps`` (int32) of ``host_blocks``, and their ``places`` among those asked for."""

    epoch: int
    steps: Int32Array
    host_blocks: BlockIndices
    places: BlockIndices


class HostBooks:
    """``keeps_prefixes``: the pool is also the second tier of the prefix cache."""

    def __init__(self, capacity: ExecutorCapacity, *, keeps_prefixes: bool) -> None:
        num_blocks = capacity.num_host_blocks
        self.name, self.addresses = capacity.host_pool, capacity.block_addresses
        self.sources: frozenset[int] = frozenset()
        """Other executors' epochs, from whose blocks those of this executor may have been computed."""
        self._running: frozenset[int] | None = None
        self.prefixes = HostPrefixes(num_blocks, capacity.block_size) if keeps_prefixes else None
        self.pool: HostPool | HostPrefixes = self.prefixes or HostPool(num_blocks)
        self._block_size = capacity.block_size
        self._epoch_of = np.full(num_blocks, _UNWRITTEN, dtype=np.int64)
        self._step_of = np.zeros(num_blocks, dtype=np.int32)
        self._is_leased = np.zeros(num_blocks, dtype=np.bool_)

    def use(self, stored: StoredBlocks) -> None:
        """This executor pulls these blocks. Of their sources, those that have ended do not count."""
        self.sources |= stored.sources if self._running is None else stored.sources & self._running

    def forget_ended_sources(self, epochs: frozenset[int]) -> None:
        """Only ``epochs`` still run, so only these may yet be found to be in another state."""
        self._running = epochs
        self.sources &= epochs

    @property
    def num_leased(self) -> int:
        """Blocks that are leased."""
        return int(np.count_nonzero(self._is_leased))

    def num_blocks_of(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self._block_size)

    def still_hold(self, capacity: ExecutorCapacity) -> bool:
        """Whether the executor that now joins has the same pool, with all that was written into it."""
        is_same = self.name == capacity.host_pool and self._block_size == capacity.block_size
        return bool(self.name) and is_same and len(self._epoch_of) == capacity.num_host_blocks

    def begin_epoch(self, capacity: ExecutorCapacity, *, has_unsent_copies: bool) -> None:
        """The pool goes on under a new epoch. ``has_unsent_copies``: of prefixes, which now never come."""
        self.addresses = capacity.block_addresses
        if self.prefixes is not None:
            self.prefixes.complete_step()
            if has_unsent_copies:
                self.prefixes.drop()
        self.pool.complete_plan()

    def allocate(self, count: int) -> BlockIndices:
        """Take ``count`` free blocks that are about to be written."""
        blocks = self.pool.allocate(count)
        self._epoch_of[blocks] = _UNWRITTEN
        return blocks

    def keep_prefix(self, token_bytes: bytes, num_blocks: int, scope: str) -> tuple[int, BlockIndices]:
        """As ``HostPrefixes.keep``."""
        assert self.prefixes is not None
        num_known, blocks = self.prefixes.keep(token_bytes, num_blocks, scope)
        self._epoch_of[blocks] = _UNWRITTEN
        return num_known, blocks

    def record_writes(self, blocks: BlockIndices, epoch: int, step: int) -> None:
        """A step that is sent now writes these blocks."""
        self._epoch_of[blocks] = epoch
        self._step_of[blocks] = step

    def writings(self, blocks: BlockIndices, epoch: int) -> list[Writing]:
        """Those of ``blocks`` that earlier epochs than ``epoch`` wrote, by epoch; the others are this epoch's."""
        epochs = self._epoch_of[blocks]
        is_older = (epochs != epoch) & (epochs != _UNWRITTEN)
        found = []
        for older in np.unique(epochs[is_older]).tolist():
            places = (epochs == older).nonzero()[0]
            found.append(Writing(older, self._step_of[blocks[places]], blocks[places], places))
        return found

    def lease(self, blocks: BlockIndices, num_tokens: int) -> StoredBlocks | None:
        """Lend blocks that one step has written; None if nobody else can read this pool, or they are not written yet.

        They are still allocated in either case.
        """
        epoch = int(self._epoch_of[blocks[0]])
        if not self.name or epoch == _UNWRITTEN:
            return None
        self._is_leased[blocks] = True
        step, sources = int(self._step_of[blocks[0]]), self.sources | {epoch}
        return StoredBlocks(self.name, self.addresses, epoch, step, blocks, num_tokens, sources)

    def is_leased_here(self, stored: StoredBlocks) -> bool:
        """Whether this lease is in these books. Other books of the pool may have lent the same blocks."""
        if stored.pool != self.name or not self._is_leased[stored.host_blocks].all():
            return False
        is_own = (self._epoch_of[stored.host_blocks] == stored.epoch) & (
            self._step_of[stored.host_blocks] == stored.step
        )
        return bool(is_own.all())

    def end_lease(self, stored: StoredBlocks) -> None:
        """From now on the blocks belong to a request of this core again."""
        self._is_leased[stored.host_blocks] = False

    def return_lease(self, stored: StoredBlocks) -> bool:
        """Free the blocks; False if the lease is not in these books: the pool is another by now."""
        if not self.is_leased_here(stored):
            return False
        self.end_lease(stored)
        self.pool.release(stored.host_blocks)
        return True
