"""The token ids of all rows in main memory, some steps behind those on the device.

Owns: bringing them up to date. Must not know: who reads them.
"""

from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headway_executor.backend import NewRow, StepBatch
from headway_executor.gpu.runtime import Mark
from headway_proto.columns import Int32Array

_MOST_BEHIND = 16
"""Changes that wait to be made; more than steps are ever in flight."""


class HostTokens:
    """``token_ids`` int32, ``[max_num_rows, max_model_len + 1]``. Used on one thread."""

    def __init__(self, max_num_rows: int, max_model_len: int) -> None:
        self.token_ids: Tensor = torch.zeros((max_num_rows, max_model_len + 1), dtype=torch.int32)
        self._array = self.token_ids.numpy()
        self._changes: deque[Callable[[], None]] = deque()

    def add_rows(self, new_rows: tuple[NewRow, ...]) -> None:
        """Take in the rows of a step, behind all draws of earlier steps."""
        if new_rows:
            self._add(partial(self._store_rows, new_rows))

    def draw(self, batch: StepBatch, drawn: Callable[[], Int32Array], reached: Mark) -> None:
        """Take in the draws of a step, which can be asked for once the device has ``reached`` their copy."""
        sampling = batch.samples != 0
        positions = (batch.num_computed_tokens + batch.num_scheduled_tokens)[sampling]

        def store() -> None:
            reached.wait()
            self._store(batch.rows[sampling], positions, drawn())

        self._add(store)

    def write(self, rows: Int32Array, positions: Int32Array, tokens: Int32Array) -> None:
        """Take in tokens that were drawn elsewhere; all ``[n]``."""
        self._add(partial(self._store, rows, positions, tokens))

    def catch_up(self) -> None:
        """Wait for the draws of all steps so far."""
        while self._changes:
            self._changes.popleft()()

    def _add(self, change: Callable[[], None]) -> None:
        self._changes.append(change)
        if len(self._changes) > _MOST_BEHIND:
            self._changes.popleft()()

    def _store_rows(self, new_rows: tuple[NewRow, ...]) -> None:
        for new in new_rows:
            self._array[new.row, : len(new.token_ids)] = new.token_ids

    def _store(self, rows: Int32Array, positions: Int32Array, tokens: Int32Array) -> None:
        self._array[rows, positions] = np.maximum(tokens, 0)
