"""Rows that cannot run, for example because the model lacks a token: they fail alone.

Owns: their errors. Must not know: the model, sampling.
"""

from collections.abc import Mapping

import msgspec
import numpy as np

from headway_executor.backend import NewRow
from headway_proto.columns import Int32Array
from headway_proto.step import ERRORED_ROW, RowError


class Refusals:
    """The refused rows of one backend."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._messages: dict[int, str] = {}

    def admit(self, row: int, token_ids: Int32Array) -> Int32Array:
        """Return the row's tokens, or harmless ones."""
        self._messages.pop(row, None)
        outside = (token_ids < 0) | (token_ids >= self._vocab_size)
        if not outside.any():
            return token_ids
        first = int(token_ids[outside][0])
        self._messages[row] = f"token id {first} is not allowed; allowed: 0 to {self._vocab_size - 1}"
        return np.where(outside, np.int32(0), token_ids)

    def admitted(self, new_rows: tuple[NewRow, ...]) -> tuple[NewRow, ...]:
        """The same, of whole rows."""
        return tuple([msgspec.structs.replace(new, token_ids=self.admit(new.row, new.token_ids)) for new in new_rows])

    def add(self, messages: Mapping[int, str]) -> None:
        """Refuse rows for other reasons."""
        self._messages |= messages

    def forget(self, rows: Int32Array) -> None:
        """Forget ``rows``."""
        if self._messages:
            for row in rows.tolist():
                self._messages.pop(row, None)

    def among(self, rows: Int32Array) -> dict[int, str]:
        """The refused rows among ``rows``, with reasons."""
        if not self._messages:
            return {}
        return {row: self._messages[row] for row in rows.tolist() if row in self._messages}


def with_refusals(
    rows: Int32Array, drawn: Int32Array, errors: tuple[RowError, ...], refused: dict[int, str]
) -> tuple[Int32Array, tuple[RowError, ...]]:
    """Put the refusals into a step's tokens and errors."""
    if not refused:
        return drawn, errors
    messages = {error.row: error.message for error in errors} | refused
    return (
        np.where(np.isin(rows, list(refused)), np.int32(ERRORED_ROW), drawn),
        tuple(RowError(row, message) for row, message in sorted(messages.items())),
    )
