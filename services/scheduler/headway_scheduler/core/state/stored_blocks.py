"""Blocks in a host pool, beyond the epoch that wrote them or for another executor.

Owns: how such blocks are named. Must not know: who keeps the books of the pool.
"""

from typing import NamedTuple

from headway_proto.step import SHARED_MEMORY
from headway_scheduler.core.state.indices import BlockIndices


class StoredBlocks(NamedTuple):
    """The first ``num_tokens`` tokens of a request, in ``host_blocks`` (``[n]``) of a pool.

    ``pool`` and ``addresses`` as its executor announced them. ``step`` of ``epoch`` wrote all the blocks: a reader
    believes only these. They stay as they are until the lease ends in the books of the executor's core.
    """

    pool: str
    addresses: tuple[str, ...]
    epoch: int
    step: int
    host_blocks: BlockIndices
    num_tokens: int
    sources: frozenset[int] = frozenset()
    """The epochs, of any executors, whose blocks these are or were computed from, as far as their executors still run."""

    @property
    def outlives_process(self) -> bool:
        """Whether others may reach the blocks even if their executor's process is gone."""
        return any(address.startswith(f"{SHARED_MEMORY}:") for address in self.addresses)
