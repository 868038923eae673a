"""When blocks that leave a device, or come to it, are where they are needed. Must not know: requests, or what steps cost.

A hand-off copies each block three times, as the executor does (``headway_executor.block_store``):

- *Export*: from the device to its host pool, from the end of its step on, beside later steps.
- *Pull*: from that pool over a link to the other executor. It begins when its step begins there, or once the last block
  is exported. A link carries one pull at a time in each direction. Later steps wait behind the one that pulls; earlier
  ones go on. What takes longer than the executor's patience is given up, and its rows are computed again.
- *Load*: from there to the other device, before the step.

Exports and loads of a device share one copy engine, in the order in which they are given, as they share one stream in
``headway_executor.memory.device_moves``. *Direct* transfers know only the link: a transport between the memories of
devices, such as RDMA, which the executor does not have yet.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway_executor.batch.diff_checks import Pull
from headway_executor.block_store.puller import PATIENCE_S, FetchedBlocks
from headway_proto.columns import Int32Array

_NO_CONTENTS = np.empty((0, 0), dtype=np.uint8)


class TransferCosts(NamedTuple):
    """Seconds. ``host_block_s``: a block between a device and its host, 0 if transfers are direct.

    ``link_block_s``: a block between two executors, after ``latency_s`` for each pull.
    """

    host_block_s: float
    link_block_s: float
    latency_s: float


class VirtualPool:
    """An executor's host blocks. ``written_s``: since when each may be read, ``[num_blocks]``."""

    def __init__(self, num_blocks: int) -> None:
        self.written_s: NDArray[np.float64] = np.zeros(num_blocks)
        self.sends_until_s = 0.0


class Fetch(NamedTuple):
    """The pulls of a step: on the host by ``arrived_s``, on the device by ``ready_s``."""

    arrived_s: float
    ready_s: float
    blocks: FetchedBlocks


class VirtualTransfers:
    """Of one executor. ``pools``: those of all, by name; its own, of ``num_host_blocks``, is added. Times in seconds."""

    def __init__(self, costs: TransferCosts, pools: dict[str, VirtualPool], name: str, num_host_blocks: int) -> None:
        self._costs = costs
        self._pools = pools
        self._own = pools[name] = VirtualPool(num_host_blocks)
        self._receives_until_s = 0.0
        self._arrived_s = 0.0
        self._copies_until_s = 0.0

    def export(self, host_blocks: Int32Array, end_s: float) -> None:
        """Copy blocks behind a step that ends at ``end_s``."""
        self._own.written_s[host_blocks] = self._copy(len(host_blocks), end_s)

    def written(self, host_blocks: Int32Array, at_s: float) -> None:
        """A step has swapped out these blocks."""
        self._own.written_s[host_blocks] = at_s

    def fetch(self, pulls: Sequence[Pull], now: float) -> Fetch:
        """Bring the blocks of a step that is sent now."""
        begin_s = at_s = max(now, self._arrived_s)  # not before the step in front has its own
        latest_s = begin_s + PATIENCE_S
        found: list[Int32Array] = []
        missing: list[Int32Array] = []
        for pull in pulls:
            pool, (host_blocks, _, blocks) = self._pools[pull.pool], pull.blocks
            start_s = max(at_s, float(pool.written_s[host_blocks].max()), pool.sends_until_s, self._receives_until_s)
            end_s = start_s + self._costs.latency_s + len(host_blocks) * self._costs.link_block_s
            at_s = min(end_s, latest_s)
            (found if end_s <= latest_s else missing).append(blocks)
            if start_s < latest_s:
                pool.sends_until_s = self._receives_until_s = at_s
        self._arrived_s = at_s
        fetched = FetchedBlocks(_NO_CONTENTS, _joined(found), _joined(missing), (), at_s - begin_s)
        return Fetch(at_s, self._copy(len(fetched.blocks), at_s), fetched)

    def _copy(self, num_blocks: int, start_s: float) -> float:
        if not self._costs.host_block_s or not num_blocks:
            return start_s
        self._copies_until_s = max(start_s, self._copies_until_s) + num_blocks * self._costs.host_block_s
        return self._copies_until_s


def _joined(parts: list[Int32Array]) -> Int32Array:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
