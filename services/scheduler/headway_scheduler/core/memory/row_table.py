"""The columns of running requests: one entry per row of the step wire.

Owns: rows, token ids, block tables, counters. Must not know: why a row changes.
"""

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway_proto.columns import Int32Array
from headway_proto.step import NO_LANE
from headway_scheduler.core.memory.memory_forecast import horizons
from headway_scheduler.core.state.indices import ONE_PLACE, BlockIndices, RowIndices
from headway_scheduler.core.state.request import Request
from headway_scheduler.core.state.speculation_record import SpeculationRecord

_HUGE_PAGE_BYTES = 1 << 21
_LEAST_HUGE_BYTES = 1 << 22
"""NumPy asks Linux for huge pages from so many bytes on."""


class RowTable:
    """The lowest free row is taken first, so that columns stay dense.

    ``token_ids`` is ``[max_rows, max_model_len]``, ``block_table`` ``[max_rows, max_blocks_per_row]``. Other columns
    are ``[max_rows]``:

    - ``num_tokens``: prompt and received output; ``num_computed_tokens``: after all scheduled steps.
    - ``last_position``: of the last token allowed.
    - ``lane``, a list: whose steps it decodes in; ``NO_LANE`` in its prompt.
    - ``itl_slo_ms``: the objective on gaps, 0 for none; ``token_time``: of the newest token. Only ``GapGuard`` needs these.
    - ``order_key``: lower is served first; ``priority``: higher is less urgent.
    - ``tenant``: index in the order's books; ``curve``: of output lengths.
    - ``speculates_from``: may speculate from so many computed tokens on; ``is_proven``: it pays.
    """

    def __init__(self, max_rows: int, max_model_len: int, block_size: int) -> None:
        self.max_rows = max_rows
        self.block_size = block_size
        self._free_rows = list(range(max_rows))
        self.requests: list[Request | None] = [None] * max_rows
        self.num_live = 0
        self.end = 0
        """One past the highest row that was ever live: array operations stop here."""
        self.num_tokens = np.zeros(max_rows, dtype=np.int32)
        self.num_computed_tokens = np.zeros(max_rows, dtype=np.int32)
        self.num_blocks = np.zeros(max_rows, dtype=np.intp)
        self.owner = np.zeros(max_rows, dtype=np.int32)
        self.handle = np.zeros(max_rows, dtype=np.int32)
        self.num_prompt_tokens = np.zeros(max_rows, dtype=np.int32)
        self.last_position = np.zeros(max_rows, dtype=np.int32)
        self.lane = [NO_LANE] * max_rows
        self.order_key = np.full(max_rows, -1, dtype=np.int64)
        self.priority = np.zeros(max_rows, dtype=np.int32)
        self.itl_slo_ms = np.zeros(max_rows, dtype=np.int32)
        self.token_time = np.zeros(max_rows, dtype=np.float64)
        self.tenant = np.zeros(max_rows, dtype=np.intp)
        self.curve = np.zeros(max_rows, dtype=np.int64)
        self.speculates_from = np.zeros(max_rows, dtype=np.int32)
        self.is_proven = np.zeros(max_rows, dtype=np.bool_)
        self.horizons = horizons(block_size, max_model_len)
        """The steps ahead of the memory forecast."""
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = _in_huge_pages(max_rows, max_model_len, np.dtype(np.int32))
        self.block_table = _in_huge_pages(max_rows, max_blocks, np.dtype(np.intp))
        # One flat index costs less than a pair. ``_first_token``, ``_first_block``: where each row begins.
        self._flat_token_ids = self.token_ids.reshape(-1)
        self._flat_block_table = self.block_table.reshape(-1)
        self._first_token = np.arange(max_rows) * max_model_len
        self._first_block = np.arange(max_rows) * max_blocks

    def take(self, request: Request, blocks: BlockIndices) -> int:
        """Give ``request`` the lowest free row, with ``blocks`` as its table."""
        row = heapq.heappop(self._free_rows)
        num_tokens, num_blocks = len(request.token_ids), len(blocks)
        new = request.new
        self.requests[row] = request
        self.num_live += 1
        if row >= self.end:
            self.end = row + 1
        self.token_ids[row, :num_tokens] = request.token_ids
        self.block_table[row, :num_blocks] = blocks
        self.num_tokens[row] = num_tokens
        self.num_blocks[row] = num_blocks
        self.last_position[row] = request.limit - 1
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.owner[row] = new.origin.owner
        self.handle[row] = new.origin.handle
        self.order_key[row] = request.order_key
        self.priority[row] = new.priority
        self.curve[row] = request.curve
        request.row = row
        request.num_admitted_tokens = num_tokens
        return row

    def record_speculation(self, row: int, record: SpeculationRecord) -> None:
        """Copy ``record`` into the columns."""
        self.speculates_from[row] = record.resumes_at
        self.is_proven[row] = record.is_proven

    def give_back(self, row: int) -> None:
        """Free a row; its request has copied what it needs."""
        self.request_in(row).row = -1
        self.requests[row] = None
        self.num_live -= 1
        self.lane[row] = NO_LANE
        self.order_key[row] = -1
        heapq.heappush(self._free_rows, row)

    def request_in(self, row: int) -> Request:
        """The request of a live row."""
        request = self.requests[row]
        assert request is not None
        return request

    def live_rows(self) -> RowIndices:
        """All live rows, ascending."""
        return (self.order_key[: self.end] >= 0).nonzero()[0]

    def append_blocks(self, row: int, blocks: BlockIndices) -> None:
        """Extend one row's block table."""
        start = self.num_blocks[row]
        self.block_table[row, start : start + len(blocks)] = blocks
        self.num_blocks[row] += len(blocks)

    def append_one_block_each(self, rows: RowIndices, blocks: BlockIndices) -> None:
        """Extend several block tables by one block each."""
        num_blocks = self.num_blocks[rows]
        self._flat_block_table[self._first_block[rows] + num_blocks] = blocks
        self.num_blocks[rows] = num_blocks + ONE_PLACE

    def blocks_of(self, row: int) -> BlockIndices:
        """A copy of one row's block table."""
        return self.block_table[row, : self.num_blocks[row]].copy()

    def tokens_of(self, row: int) -> Int32Array:
        """A copy of one row's tokens."""
        return self.token_ids[row, : self.num_tokens[row]].copy()

    def num_tokens_of(self, request: Request) -> int:
        """The tokens of a live request."""
        return len(request.token_ids) if request.row < 0 else int(self.num_tokens[request.row])

    def places_of(self, rows: RowIndices, positions: Int32Array) -> NDArray[np.intp]:
        """Where the tokens at these positions, one of each row, are in the flat table of tokens."""
        places: NDArray[np.intp] = self._first_token[rows] + positions
        return places

    def append_tokens(self, places: NDArray[np.intp], num_since: int, token_ids: Int32Array) -> None:
        """Write the next token of some rows, one each, ``num_since`` behind these places.

        The caller adds them to ``num_tokens``.
        """
        self._flat_token_ids[num_since:][places] = token_ids


def _in_huge_pages(num_rows: int, num_columns: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """An uninitialised table whose untouched pages cost no memory.

    A step writes to each row, far from the others. To find that many small pages takes the processor longer than to write.
    """
    num_bytes = num_rows * num_columns * dtype.itemsize
    whole = max(-(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES, _LEAST_HUGE_BYTES)
    return np.empty(whole, dtype=np.uint8)[:num_bytes].view(dtype).reshape(num_rows, num_columns)
