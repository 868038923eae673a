"""Blocks of preempted requests on the host, and the moves of the next step.

Owns: host blocks, unsent moves, costs of moving, and when a prefix is worth a copy. Must not know: which request is
next.

A request that ends before the next step cancels its swap-out, so that no step writes a host block twice.
"""

import numpy as np

from headway_proto.columns import encode_columns
from headway_scheduler.core.memory.host_pool import HostPool
from headway_scheduler.core.memory.host_prefixes import HostPrefixes
from headway_scheduler.core.memory.preemption import PreemptionCosts, PreemptionPolicy
from headway_scheduler.core.state.indices import NO_BLOCKS, BlockIndices
from headway_scheduler.core.state.request import Request

NO_MOVES = b"", b"", 0

_Moves = list[tuple[BlockIndices, BlockIndices]]


class Swapping:
    """``policy`` says when moving a request pays, ``offload`` when moving a prefix does; None: prefixes stay away."""

    def __init__(
        self,
        num_host_blocks: int,
        policy: PreemptionPolicy,
        costs: PreemptionCosts,
        *,
        block_size: int = 1,
        offload: PreemptionPolicy | None = None,
    ) -> None:
        self.costs = costs
        self._policy = policy
        self._offload = offload
        self._block_size = block_size
        self.offloads = offload is not None
        """Whether the host keeps prefixes."""
        self._prefixes = None if offload is None else HostPrefixes(num_host_blocks, block_size)
        self._host: HostPool | HostPrefixes = self._prefixes or HostPool(num_host_blocks)
        self._kept: _Moves = []
        """(blocks, host blocks) of prefixes to copy with the next step."""
        self._out: dict[int, tuple[BlockIndices, BlockIndices]] = {}
        """(blocks, host blocks) to swap out with the next step, by the arrival of their request."""
        self._in: _Moves = []

    @property
    def num_host_blocks(self) -> int:
        """All host blocks."""
        return self._host.num_blocks

    @property
    def num_free_host_blocks(self) -> int:
        """Host blocks that no request needs."""
        return self._host.num_free + self._host.num_released

    def swap_out(self, request: Request, blocks: BlockIndices, num_tokens: int) -> int:
        """Let the next step copy ``blocks`` (``num_tokens`` tokens); return how many it copies.

        It copies none if the host has no room or recomputing is better.
        """
        if not 0 < len(blocks) <= self._host.num_free or not self._policy.swaps(self.costs, num_tokens, len(blocks)):
            return 0
        request.host_blocks = self._host.allocate(len(blocks))
        request.num_swapped_tokens = num_tokens
        self._out[request.arrival] = blocks, request.host_blocks
        return len(blocks)

    def swap_in(self, request: Request, table: BlockIndices, num_shared: int) -> None:
        """Bring a request's blocks into its ``table``, except ``num_shared`` cached ones."""
        host_blocks = request.host_blocks
        if num_shared < len(host_blocks):
            self._in.append((host_blocks[num_shared:], table[num_shared : len(host_blocks)]))
        self._give_up(request)

    def forget(self, request: Request) -> None:
        """Release the host blocks of an ended request."""
        self._out.pop(request.arrival, None)
        self._give_up(request)

    def offload(self, token_bytes: bytes, blocks: BlockIndices, scope: str) -> int:
        """Let the next step copy a computed prefix, in ``blocks``, to the host; return how many blocks it copies."""
        prefixes = self._prefixes
        if prefixes is None or self._offload is None or not len(blocks):
            return 0
        if not self._offload.swaps(self.costs, len(blocks) * self._block_size, len(blocks)):
            return 0
        num_known, host_blocks = prefixes.keep(token_bytes, len(blocks), scope)
        if len(host_blocks):
            self._kept.append((blocks[num_known : num_known + len(host_blocks)], host_blocks))
        return len(host_blocks)

    def find_offloaded(self, token_bytes: bytes, num_shared: int, most_blocks: int, scope: str) -> BlockIndices:
        """The host blocks that hold what follows the first ``num_shared`` blocks of a prompt, if bringing them back pays."""
        prefixes = self._prefixes
        if prefixes is None or self._offload is None or num_shared >= most_blocks:
            return NO_BLOCKS
        found = prefixes.find(token_bytes, most_blocks, scope)[num_shared:]
        if not len(found):
            return NO_BLOCKS
        pays = self._offload.swaps(self.costs, len(found) * self._block_size, len(found))
        return found if pays else NO_BLOCKS

    def restore(self, host_blocks: BlockIndices, blocks: BlockIndices) -> None:
        """Bring a prefix back into ``blocks`` with the next step."""
        assert self._prefixes is not None
        self._prefixes.hold(host_blocks)
        self._in.append((host_blocks, blocks))

    def drop_offloaded(self) -> None:
        """Forget the prefixes on the host."""
        if self._prefixes is not None:
            self._prefixes.drop()

    def take_moves(self) -> tuple[bytes, bytes, int]:
        """The column groups to swap out and in now, and the number of blocks."""
        if self._prefixes is not None:
            self._prefixes.complete_step()
        if not self._out and not self._in and not self._kept:
            return NO_MOVES
        moves_out, moves_in = [*self._out.values(), *self._kept], self._in
        self._out, self._in, self._kept = {}, [], []
        return _pairs(moves_out), _pairs(moves_in), sum(len(blocks) for blocks, _ in moves_out + moves_in)

    def complete_plan(self) -> None:
        """Free the host blocks that this step swaps in."""
        self._host.complete_plan()

    def _give_up(self, request: Request) -> None:
        self._host.release(request.host_blocks)
        request.host_blocks = NO_BLOCKS
        request.num_swapped_tokens = 0


def _pairs(moves: _Moves) -> bytes:
    if not moves:
        return b""
    return encode_columns((np.concatenate([source for source, _ in moves]), np.concatenate([end for _, end in moves])))
