"""Blocks of preempted requests on the host, and the moves of the next step.

Owns: unsent moves, costs of moving, and when a prefix is worth a copy. Must not know: which request is next.

A request that ends before the next step cancels its swap-out, so that no step writes a host block twice.
"""

import numpy as np

from headway_proto.columns import encode_columns
from headway_scheduler.core.memory.host_books import HostBooks
from headway_scheduler.core.memory.preemption import PreemptionCosts, PreemptionPolicy
from headway_scheduler.core.memory.transfers import Transfers
from headway_scheduler.core.state.indices import NO_BLOCKS, BlockIndices
from headway_scheduler.core.state.limits import ExecutorCapacity
from headway_scheduler.core.state.request import Request

NO_MOVES = b"", b"", 0

_Moves = list[tuple[BlockIndices, BlockIndices]]


class Swapping:
    """``policy`` says when moving a request pays, ``offload`` when moving a prefix does; None: prefixes stay away."""

    def __init__(
        self,
        books: HostBooks,
        policy: PreemptionPolicy,
        costs: PreemptionCosts,
        transfers: Transfers,
        *,
        epoch: int = 0,
        block_size: int = 1,
        offload: PreemptionPolicy | None = None,
    ) -> None:
        self.costs = costs
        self.books = books
        self.transfers = transfers
        self._epoch = epoch
        self._policy = policy
        self._offload = offload
        self._block_size = block_size
        self.offloads = offload is not None
        """Whether the host keeps prefixes."""
        self._kept: _Moves = []
        """(blocks, host blocks) of prefixes to copy with the next step."""
        self._out: dict[int, tuple[BlockIndices, BlockIndices]] = {}
        """(blocks, host blocks) to swap out with the next step, by the arrival of their request."""
        self._in: _Moves = []

    @property
    def num_host_blocks(self) -> int:
        """All host blocks."""
        return self.books.pool.num_blocks

    @property
    def has_unsent_copies(self) -> bool:
        """Whether prefixes are to be copied with the next step."""
        return bool(self._kept)

    @property
    def num_free_host_blocks(self) -> int:
        """Host blocks that no request needs."""
        return self.books.pool.num_free + self.books.pool.num_released

    def swap_out(self, request: Request, blocks: BlockIndices, num_tokens: int) -> int:
        """Let the next step copy ``blocks`` (``num_tokens`` tokens); return how many it copies.

        It copies none if the host has no room, if recomputing is better, or if the request runs whole.
        """
        may_swap = 0 < len(blocks) <= self.books.pool.num_free and not request.runs_whole_prompt
        if not may_swap or not self._policy.swaps(self.costs, num_tokens, len(blocks)):
            return 0
        request.host_blocks = self.books.allocate(len(blocks))
        request.num_swapped_tokens = num_tokens
        self._out[request.arrival] = blocks, request.host_blocks
        return len(blocks)

    def swap_in(self, request: Request, table: BlockIndices, num_shared: int) -> None:
        """Bring a request's blocks into its ``table``, except ``num_shared`` cached ones."""
        if request.stored is not None:
            own = self.transfers.fetch(request, table, num_shared)
            if own is None:
                request.num_swapped_tokens = 0
                return
            request.host_blocks = own
        host_blocks = request.host_blocks
        if num_shared < len(host_blocks):
            self._in.append((host_blocks[num_shared:], table[num_shared : len(host_blocks)]))
        self._give_up(request)

    def num_kept_tokens(self, request: Request) -> int:
        """The tokens of a request in blocks outside of the device, as far as blocks of this size can have them.

        An executor with larger blocks names fewer than are needed here. None of them can be read, which the executor tells of
        each that it is asked for; so no token may count whose block is not asked for.
        """
        blocks = request.host_blocks if request.stored is None else request.stored.host_blocks
        return min(request.num_swapped_tokens, len(blocks) * self._block_size)

    def forget(self, request: Request) -> None:
        """Release the host blocks of an ended request."""
        if request.stored is not None:
            self.transfers.end(request.stored)
            request.stored = None
        self._out.pop(request.arrival, None)
        self._give_up(request)

    def lend(self, request: Request) -> None:
        """A request leaves this core or this epoch: what the host has of it stays there, if others can read it."""
        if request.stored is not None or not request.num_swapped_tokens:
            return
        is_sent = self._out.pop(request.arrival, None) is None
        # Whose prompt is not reported yet computes it again: the answers that would report it may be lost.
        is_wanted = is_sent and not request.is_owed_prompt_logprobs
        request.stored = self.books.lease(request.host_blocks, request.num_swapped_tokens) if is_wanted else None
        if request.stored is None:
            self._give_up(request)
        else:
            request.host_blocks = NO_BLOCKS

    def offload(self, token_bytes: bytes, blocks: BlockIndices, scope: str) -> int:
        """Let the next step copy a computed prefix, in ``blocks``, to the host; return how many blocks it copies."""
        if self._offload is None or not len(blocks):
            return 0
        if not self._offload.swaps(self.costs, len(blocks) * self._block_size, len(blocks)):
            return 0
        num_known, host_blocks = self.books.keep_prefix(token_bytes, len(blocks), scope)
        if len(host_blocks):
            self._kept.append((blocks[num_known : num_known + len(host_blocks)], host_blocks))
        return len(host_blocks)

    def find_offloaded(self, token_bytes: bytes, num_shared: int, most_blocks: int, scope: str) -> BlockIndices:
        """The host blocks that hold what follows the first ``num_shared`` blocks of a prompt, if bringing them back pays."""
        prefixes = self.books.prefixes
        if prefixes is None or self._offload is None or num_shared >= most_blocks:
            return NO_BLOCKS
        found = prefixes.find(token_bytes, most_blocks, scope)[num_shared:]
        if not len(found):
            return NO_BLOCKS
        pays = self._offload.swaps(self.costs, len(found) * self._block_size, len(found))
        return found if pays else NO_BLOCKS

    def restore(self, request: Request, host_blocks: BlockIndices, blocks: BlockIndices) -> None:
        """Bring a prefix back into ``blocks``, which belong to ``request``, with the next step."""
        assert self.books.prefixes is not None
        self.books.prefixes.hold(host_blocks)
        own = self.transfers.restore(request, host_blocks, blocks)
        if len(own):
            self._in.append((host_blocks[own], blocks[own]))

    def drop_offloaded(self) -> None:
        """Forget the prefixes on the host."""
        if self.books.prefixes is not None:
            self.books.prefixes.drop()

    def take_moves(self, step: int) -> tuple[bytes, bytes, int]:
        """The column groups to swap out and in with this step, and the number of blocks."""
        if self.books.prefixes is not None:
            self.books.prefixes.complete_step()
        if not self._out and not self._in and not self._kept:
            return NO_MOVES
        moves_out, moves_in = [*self._out.values(), *self._kept], self._in
        self._out, self._in, self._kept = {}, [], []
        for _, host_blocks in moves_out:
            self.books.record_writes(host_blocks, self._epoch, step)
        return _pairs(moves_out), _pairs(moves_in), sum(len(blocks) for blocks, _ in moves_out + moves_in)

    def complete_plan(self) -> None:
        """Free the host blocks that the step before reads: from now on others may be written into them."""
        self.books.pool.complete_plan()

    def _give_up(self, request: Request) -> None:
        self.books.pool.release(request.host_blocks)
        request.host_blocks = NO_BLOCKS
        request.num_swapped_tokens = 0


def books_for(capacity: ExecutorCapacity, former: Swapping | None, *, keeps_prefixes: bool) -> HostBooks:
    """The books of the executor's host pool: those of the ``former`` epoch if the pool is the same."""
    if former is None or not former.books.still_hold(capacity):
        return HostBooks(capacity, keeps_prefixes=keeps_prefixes)
    former.books.begin_epoch(capacity, has_unsent_copies=former.has_unsent_copies)
    return former.books


def _pairs(moves: _Moves) -> bytes:
    if not moves:
        return b""
    return encode_columns((np.concatenate([source for source, _ in moves]), np.concatenate([end for _, end in moves])))
