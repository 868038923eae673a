"""Rows whose tokens no model can look up: they fail, alone.

Owns: which rows those are, and putting their errors into a step's result.
Must not know: how a model runs, or how tokens are drawn.
"""

import numpy as np

from headway_proto.columns import Int32Array
from headway_proto.step import ERRORED_ROW, RowError


class Refusals:
    """The refused rows of one backend whose token ids are below ``vocab_size``."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._messages: dict[int, str] = {}

    def admit(self, row: int, token_ids: Int32Array) -> Int32Array:
        """The tokens that ``row`` is to run with: its own, or harmless ones where it is refused.

        The embedding has no place for others; its neighbours run on.
        """
        self._messages.pop(row, None)
        outside = (token_ids < 0) | (token_ids >= self._vocab_size)
        if not outside.any():
            return token_ids
        first = int(token_ids[outside][0])
        self._messages[row] = f"token id {first} is not allowed; allowed: 0 to {self._vocab_size - 1}"
        return np.where(outside, np.int32(0), token_ids)

    def forget(self, rows: Int32Array) -> None:
        """``rows`` are somebody else's from now on."""
        if self._messages:
            for row in rows.tolist():
                self._messages.pop(row, None)

    def report(
        self, rows: Int32Array, drawn: Int32Array, errors: tuple[RowError, ...]
    ) -> tuple[Int32Array, tuple[RowError, ...]]:
        """Put the errors of refused rows among ``rows``, which drew ``drawn``, to the others, rows ascending."""
        refused = [row for row in rows.tolist() if row in self._messages] if self._messages else []
        if not refused:
            return drawn, errors
        messages = {error.row: error.message for error in errors} | {row: self._messages[row] for row in refused}
        return (
            np.where(np.isin(rows, refused), np.int32(ERRORED_ROW), drawn),
            tuple(RowError(row, message) for row, message in sorted(messages.items())),
        )
