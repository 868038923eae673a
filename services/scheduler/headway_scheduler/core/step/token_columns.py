"""The receivers of a step's tokens, as columns.

Owns: these columns. Must not know: when a request ends.

Lookups are kept while the sampling rows are the same array.
"""

from typing import NamedTuple

import numpy as np

from headway_proto.columns import EMPTY_COLUMN, Int32Array
from headway_scheduler.core.memory.row_table import RowTable
from headway_scheduler.core.state.indices import NO_ROWS, RowIndices
from headway_scheduler.core.state.request import Request


class TokenColumns(NamedTuple):
    """One entry per new token; ``indices`` count output tokens."""

    owners: Int32Array
    handles: Int32Array
    indices: Int32Array
    token_ids: Int32Array

    def with_further(self, entries: list[tuple[int, int, int, int]]) -> "TokenColumns":
        """Append (owner, handle, output index, token id) entries."""
        columns = np.asarray(entries, dtype=np.int32).T
        return TokenColumns(*(np.concatenate(pair) for pair in zip(self, columns, strict=True)))

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


class SamplingOrigins:
    """What is constant for the rows that sampled last."""

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows
        self._sampling_rows: RowIndices = NO_ROWS
        self._owners = self._handles = self._num_prompt_tokens = EMPTY_COLUMN
        self.last_position = EMPTY_COLUMN
        self.first_token = np.empty(0, dtype=np.int64)

    def look_up(self, sampling_rows: RowIndices) -> None:
        """Look up these rows unless they are the last ones."""
        if self._sampling_rows is sampling_rows:
            return
        rows = self._rows
        self._sampling_rows = sampling_rows
        self._owners, self._handles = rows.owner[sampling_rows], rows.handle[sampling_rows]
        self._num_prompt_tokens = rows.num_prompt_tokens[sampling_rows]
        self.last_position = rows.last_position[sampling_rows]
        self.first_token = rows.first_token[sampling_rows]

    def columns(self, positions: Int32Array, token_ids: Int32Array) -> TokenColumns:
        """The columns of the tokens at ``positions``."""
        return TokenColumns(self._owners, self._handles, positions - self._num_prompt_tokens, token_ids)
