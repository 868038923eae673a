"""The tokens of a step: their places in the table of rows, and their receivers, as columns.

Owns: these columns. Must not know: how a request ends.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway_proto.columns import EMPTY_COLUMN, Int32Array
from headway_scheduler.core.memory.row_table import RowTable
from headway_scheduler.core.state.indices import NO_ROWS, ONE, ONE_PLACE, RowIndices
from headway_scheduler.core.state.request import Request

NEVER = np.iinfo(np.int32).max


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


class SamplingRows:
    """The rows that sampled last, and where their next tokens go.

    While they stay the same, every place and index is one more with each token. So a lookup, which costs as much as five
    tokens, is only for rows that have changed.
    """

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows
        self._sampling_rows: RowIndices | None = None
        self._owners = self._handles = self._indices = self._num_left = self._counts = EMPTY_COLUMN
        self._places = NO_ROWS
        self._num_appended = 0
        self._first_end = 0

    def forget(self) -> None:
        """Some row may have got tokens in another way."""
        self._sampling_rows = None

    def append(self, sampling_rows: RowIndices, token_ids: Int32Array) -> TokenColumns:
        """Append a token to each of these rows; the same array as before means that nothing has changed."""
        if self._sampling_rows is not sampling_rows:
            self._look_up(sampling_rows)
        self._rows.append_tokens(self._places, self._counts, token_ids)
        columns = TokenColumns(self._owners, self._handles, self._indices, token_ids)
        self._places += ONE_PLACE
        self._indices = self._indices + ONE
        self._num_appended += 1
        return columns

    def ending(self, stops_some: NDArray[np.bool_]) -> list[int]:
        """The places in the newest columns of the tokens after which a row may end.

        Such a token is the last that its row may have, or some row stops at it (``stops_some``, one entry per token).
        """
        num_before = self._num_appended - 1
        if num_before == 1:
            # Not sought at once, since rows often change with every token.
            self._first_end = int(self._num_left.min(initial=NEVER))
        if num_before >= self._first_end:
            stops_some = stops_some | (self._num_left == np.array(num_before, dtype=np.int32))
        ending: list[int] = stops_some.nonzero()[0].tolist()
        return ending

    def _look_up(self, sampling_rows: RowIndices) -> None:
        rows = self._rows
        self._sampling_rows = sampling_rows
        self._owners, self._handles = rows.owner[sampling_rows], rows.handle[sampling_rows]
        num_tokens = rows.num_tokens[sampling_rows]
        self._indices = num_tokens - rows.num_prompt_tokens[sampling_rows]
        self._num_left = rows.last_position[sampling_rows] - num_tokens
        self._places = rows.next_places(sampling_rows)
        self._counts = np.zeros(rows.end, dtype=np.int32)
        self._counts[sampling_rows] = ONE
        self._num_appended = self._first_end = 0
