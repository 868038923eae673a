"""The tokens of a step: their places in the table of rows, and their receivers, as columns.

Owns: these columns. Must not know: how a request ends.
"""

from collections.abc import Set as AbstractSet

import numpy as np

from headway_proto.columns import EMPTY_COLUMN, Int32Array
from headway_scheduler.core.memory.row_table import RowTable
from headway_scheduler.core.state.indices import NO_ROWS, ONE, RowIndices
from headway_scheduler.core.state.request import Request

NOBODY: AbstractSet[int] = frozenset()


class TokenColumns:
    """One entry per new token; ``indices`` count output tokens."""

    __slots__ = ("handles", "indices", "owners", "token_ids")

    def __init__(self, owners: Int32Array, handles: Int32Array, indices: Int32Array, token_ids: Int32Array) -> None:
        self.owners = owners
        self.handles = handles
        self.indices = indices
        self.token_ids = token_ids

    def with_further(self, entries: list[tuple[int, int, int, int]]) -> "TokenColumns":
        """Append (owner, handle, output index, token id) entries."""
        owners, handles, indices, token_ids = np.asarray(entries, dtype=np.int32).T
        return TokenColumns(
            np.concatenate((self.owners, owners)),
            np.concatenate((self.handles, handles)),
            np.concatenate((self.indices, indices)),
            np.concatenate((self.token_ids, token_ids)),
        )

    def with_late(self, late: list[tuple[Request, int]]) -> "TokenColumns":
        """Append the newest tokens of requests that lost their row."""
        entries = [
            (
                request.new.origin.owner,
                request.new.origin.handle,
                len(request.token_ids) - 1 - request.new.num_prompt_tokens,
                token_id,
            )
            for request, token_id in late
        ]
        return self.with_further(entries)


class SamplingRows:
    """The rows of the newest step of a lane that was answered, and where their tokens go.

    While steps have the same rows, every place and index is one more with each token, and rows that have gone since the
    step was sent are cut out. Only other rows are looked up.

    ``rows``: those that have not gone; ``stay``: their places among the rows of the step, None for all.
    """

    def __init__(self, table: RowTable) -> None:
        self.rows = NO_ROWS
        self.stay: RowIndices | None = None
        self._table = table
        self._rows_of_step: RowIndices | None = None
        self._gone: AbstractSet[int] = NOBODY
        self._owners = self._handles = self._indices = EMPTY_COLUMN
        self._places = NO_ROWS
        """Where the next token of each row was when it was looked up, and how many have come since."""
        self._num_since = 0
        self._counts = EMPTY_COLUMN
        """Shape [rows up to the last]: 1 for each that gets a token."""

    def forget(self) -> None:
        """Some row may have got tokens in another way."""
        self._rows_of_step = None

    def turn_to(self, rows_of_step: RowIndices, gone: AbstractSet[int]) -> None:
        """The next tokens are for these rows, except those that are gone.

        The same array as before means that nothing else has changed.
        """
        is_known = rows_of_step is self._rows_of_step and (gone is self._gone or self._gone <= gone)
        if is_known:
            self._num_since += 1
            self._indices = self._indices + ONE
        else:
            self._rows_of_step, self._gone = rows_of_step, NOBODY
            self.rows, self.stay = rows_of_step, None
        if len(gone) > len(self._gone):
            kept = self._leave_out(gone)
            if is_known:
                self._owners, self._handles = self._owners[kept], self._handles[kept]
                self._indices, self._places = self._indices[kept], self._places[kept]
        if not is_known:
            self._look_up()

    def append(self, token_ids: Int32Array) -> TokenColumns:
        """Append a token to each of ``rows``."""
        num_tokens = self._table.num_tokens[: len(self._counts)]
        num_tokens += self._counts
        self._table.append_tokens(self._places, self._num_since, token_ids)
        return TokenColumns(self._owners, self._handles, self._indices, token_ids)

    def _leave_out(self, gone: AbstractSet[int]) -> RowIndices:
        """Return the places among ``rows`` of those that stay."""
        is_gone = np.zeros(self._table.max_rows, dtype=np.bool_)
        for row in gone:
            is_gone[row] = True
            if row < len(self._counts):
                self._counts[row] = 0
        kept: RowIndices = (~is_gone[self.rows]).nonzero()[0]
        self.rows = self.rows[kept]
        self.stay = kept if self.stay is None else self.stay[kept]
        self._gone = gone
        return kept

    def _look_up(self) -> None:
        table, rows = self._table, self.rows
        num_tokens = table.num_tokens[rows]
        self._owners, self._handles = table.owner[rows], table.handle[rows]
        self._indices = num_tokens - table.num_prompt_tokens[rows]
        self._places, self._num_since = table.places_of(rows, num_tokens), 0
        self._counts = np.zeros(table.end, dtype=np.int32)
        self._counts[rows] = ONE
