"""The blocks that a step moves: swaps with their records, what was pulled, and exports behind it.

Owns: their order, the calls of the backend, which exports are due. Must not know: how blocks are found or brought, frames.
"""

from collections import deque
from concurrent.futures import Future
from typing import NamedTuple

from structlog.typing import FilteringBoundLogger

from headway_executor.backend import ExecutorBackend
from headway_executor.batch.block_moves import BlockMoves
from headway_executor.block_store.puller import FetchedBlocks
from headway_executor.block_store.store import Store
from headway_executor.host.statistics import ExecutorStatistics
from headway_proto.columns import Int32Array


class StepNumber(NamedTuple):
    """What a record says of a block's writer."""

    epoch: int
    step: int


class BlockTransfers:
    """The moves of one executor."""

    def __init__(
        self, backend: ExecutorBackend, store: Store, statistics: ExecutorStatistics, log: FilteringBoundLogger
    ) -> None:
        self._backend = backend
        self._store = store
        self._statistics = statistics
        self._log = log
        self._exports: deque[tuple[StepNumber, Int32Array]] = deque()

    @property
    def are_due(self) -> bool:
        """Whether exports wait for ``export``."""
        return bool(self._exports)

    def before_step(self, number: StepNumber, moves: BlockMoves, fetched: FetchedBlocks | None) -> None:
        """Swap, fill what was pulled, copy. Raises what ``ExecutorBackend.move_blocks`` raises."""
        copies, swap_out, swap_in = moves.copies, moves.swap_out, moves.swap_in
        none = copies[:, :0]
        self._statistics.record_moves(
            copied=copies.shape[1], swapped_out=swap_out.shape[1], swapped_in=swap_in.shape[1]
        )
        has_contents = fetched is not None and len(fetched.blocks) > 0
        first_copies = none if has_contents else copies
        if first_copies.size or swap_out.size or swap_in.size:
            self._move(number, copies=first_copies, swap_out=swap_out, swap_in=swap_in)
        if fetched is not None and has_contents:
            self._backend.load_blocks(fetched.contents, fetched.blocks)
            if copies.size:
                self._move(number, copies=copies, swap_out=none, swap_in=none)

    def after_step(self, number: StepNumber, moves: BlockMoves) -> None:
        """Note the exports: the answer does not wait for them."""
        if moves.exports.size:
            self._exports.append((number, moves.exports))

    def export(self) -> None:
        """Begin what is due; before the next step, and once the answer is sent."""
        while self._exports:
            number, pairs = self._exports.popleft()
            none = pairs[:, :0]
            try:
                self._move(number, copies=none, swap_out=pairs, swap_in=none)
            except Exception as error:  # noqa: BLE001 (the blocks have no record, so nobody believes them)
                self._log.error("blocks could not be exported", **number._asdict(), exc_info=error)
            else:
                self._statistics.record_exports(pairs.shape[1])

    def _move(self, number: StepNumber, *, copies: Int32Array, swap_out: Int32Array, swap_in: Int32Array) -> None:
        host_blocks = swap_out[1]
        write = self._store.begin_write(host_blocks) if host_blocks.size else 0
        done = self._backend.move_blocks(copies=copies, swap_out=swap_out, swap_in=swap_in)
        if not host_blocks.size:
            return
        if done is None:
            self._store.end_write(write, host_blocks, epoch=number.epoch, step=number.step)
            return

        def record(future: Future[None]) -> None:
            """In the thread that copied, before it goes on."""
            if future.exception() is None:
                self._store.end_write(write, host_blocks, epoch=number.epoch, step=number.step)

        done.add_done_callback(record)
