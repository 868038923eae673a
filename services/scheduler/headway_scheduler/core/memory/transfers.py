"""The next step's copies to and from host pools beyond swaps: exports, and pulls.

Owns: these copies, and the leases that have ended. Must not know: which request leaves, or where it goes on.
"""

import numpy as np

from headway_proto.columns import encode_columns
from headway_proto.step import BlockPull
from headway_scheduler.core.memory.host_books import HostBooks
from headway_scheduler.core.state.indices import BlockIndices
from headway_scheduler.core.state.request import Request
from headway_scheduler.core.state.step_plan import Exported, Fetched, StepTransfers
from headway_scheduler.core.state.stored_blocks import StoredBlocks

_Pool = tuple[str, tuple[str, ...], int]
"""A pool's name, its addresses, and the epoch that wrote the blocks."""

_Column = tuple[BlockIndices, BlockIndices, BlockIndices]
"""Host blocks, the steps that wrote them, device blocks."""


class Transfers:
    """``ended``: the leases, in any books, that nobody needs any more."""

    def __init__(self, books: HostBooks, epoch: int, ended: list[StoredBlocks]) -> None:
        self._books = books
        self._epoch = epoch
        self._ended = ended
        self._exports: list[tuple[BlockIndices, BlockIndices]] = []
        self._pulls: dict[_Pool, list[_Column]] = {}
        self._exported: list[Exported] = []
        self._fetched: list[Fetched] = []

    def export(self, request: Request, row: int, blocks: BlockIndices, num_tokens: int) -> Exported | None:
        """Let the next step copy ``blocks`` of a row to the host once it has run; None if that cannot be."""
        books = self._books
        if not books.name or not 0 < len(blocks) <= books.pool.num_free:
            return None
        host_blocks = books.allocate(len(blocks))
        self._exports.append((blocks, host_blocks))
        exported = Exported(request, row, host_blocks, num_tokens)
        self._exported.append(exported)
        return exported

    def leave_without_blocks(self, request: Request, row: int) -> None:
        """The row leaves with the next step's answer, and what it computed is lost."""
        self._exported.append(Exported(request, row, None, 0))

    def fetch(self, request: Request, table: BlockIndices, num_shared: int) -> BlockIndices | None:
        """Bring a request's stored blocks into its ``table``, except ``num_shared`` cached ones.

        Returns the host blocks instead if they are this epoch's own: swapping them in is enough.
        """
        stored = request.stored
        assert stored is not None
        request.stored = None
        if stored.epoch == self._epoch and self._books.is_leased_here(stored):
            self._books.end_lease(stored)
            return stored.host_blocks
        host_blocks = stored.host_blocks[num_shared : self._books.num_blocks_of(stored.num_tokens)]
        if not len(host_blocks):
            self._ended.append(stored)
            return None
        steps = np.full(len(host_blocks), stored.step)
        device_blocks = table[num_shared : num_shared + len(host_blocks)]
        self._pull((stored.pool, stored.addresses, stored.epoch), (host_blocks, steps, device_blocks))
        self._books.use(stored)
        self._fetched.append(Fetched(request, request.row, stored))
        return None

    def restore(self, request: Request, host_blocks: BlockIndices, blocks: BlockIndices) -> BlockIndices:
        """Pull those of ``host_blocks`` that an earlier epoch wrote; return the places of the others."""
        is_here = np.ones(len(host_blocks), dtype=np.bool_)
        for writing in self._books.writings(host_blocks, self._epoch):
            is_here[writing.places] = False
            pool = self._books.name, self._books.addresses, writing.epoch
            self._pull(pool, (writing.host_blocks, writing.steps.astype(np.intp), blocks[writing.places]))
        if not is_here.all():
            self._fetched.append(Fetched(request, request.row, None))
        return is_here.nonzero()[0]

    def end(self, stored: StoredBlocks) -> None:
        """Nobody needs this lease any more."""
        self._ended.append(stored)

    def drop_export(self, exported: Exported) -> None:
        """Free the host blocks of a row that is not to leave after all, or that has ended."""
        if exported.host_blocks is not None:
            self._books.pool.release(exported.host_blocks)

    def lease(self, exported: Exported) -> StoredBlocks | None:
        """The copy is made: lend it."""
        return None if exported.host_blocks is None else self._books.lease(exported.host_blocks, exported.num_tokens)

    def take(self, step: int) -> tuple[bytes, tuple[BlockPull, ...], StepTransfers | None]:
        """The column group of exports, the pulls, and what the answer is to confirm."""
        if not self._exported and not self._fetched:
            return b"", (), None
        exports, pulls = b"", tuple([_message_of(pool, columns) for pool, columns in self._pulls.items()])
        if self._exports:
            blocks, host_blocks = (np.concatenate(column) for column in zip(*self._exports, strict=True))
            self._books.record_writes(host_blocks, self._epoch, step)
            exports = encode_columns((blocks, host_blocks))
        transfers = StepTransfers(self._exported, self._fetched)
        self._exports, self._pulls, self._exported, self._fetched = [], {}, [], []
        return exports, pulls, transfers

    def _pull(self, pool: _Pool, column: _Column) -> None:
        self._pulls.setdefault(pool, []).append(column)


def _message_of(pool: _Pool, columns: list[_Column]) -> BlockPull:
    name, addresses, epoch = pool
    joined = tuple([np.concatenate(column) for column in zip(*columns, strict=True)])
    return BlockPull(name, addresses, epoch, encode_columns(joined))
