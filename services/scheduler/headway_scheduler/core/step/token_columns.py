"""The tokens of a step: their places in the table of rows, and their receivers, as columns.

Owns: these columns. Must not know: how a request ends.
"""

import numpy as np

from headway_proto.columns import EMPTY_COLUMN, Int32Array
from headway_scheduler.core.memory.row_table import RowTable
from headway_scheduler.core.state.indices import NO_ROWS, ONE, ONE_PLACE, RowIndices
from headway_scheduler.core.state.request import Request


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
    """The rows that sampled last, and where their tokens went.

    While they stay the same, every place and index is one more with each token. Only rows that have changed are looked up,
    which takes twice as long.
    """

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows
        self._sampling_rows: RowIndices | None = None
        self._owners = self._handles = self._indices = self._counts = EMPTY_COLUMN
        self._places = NO_ROWS

    def forget(self) -> None:
        """Some row may have got tokens in another way."""
        self._sampling_rows = None

    def append(self, sampling_rows: RowIndices, token_ids: Int32Array) -> TokenColumns:
        """Append a token to each of these rows; the same array as before means that nothing else has changed."""
        rows = self._rows
        if self._sampling_rows is not sampling_rows:
            self._look_up(sampling_rows)
        else:
            if not len(self._counts):
                self._counts = np.zeros(rows.end, dtype=np.int32)
                self._counts[sampling_rows] = ONE
            self._places += ONE_PLACE
            self._indices = self._indices + ONE
            num_tokens = rows.num_tokens[: len(self._counts)]
            num_tokens += self._counts
        rows.append_tokens(self._places, token_ids)
        return TokenColumns(self._owners, self._handles, self._indices, token_ids)

    def _look_up(self, sampling_rows: RowIndices) -> None:
        rows = self._rows
        num_tokens = rows.num_tokens[sampling_rows]
        rows.num_tokens[sampling_rows] = num_tokens + ONE
        self._sampling_rows = sampling_rows
        self._owners, self._handles = rows.owner[sampling_rows], rows.handle[sampling_rows]
        self._indices = num_tokens - rows.num_prompt_tokens[sampling_rows]
        self._places = rows.places_of(sampling_rows, num_tokens)
        self._counts = EMPTY_COLUMN
