"""The rows on the device: token ids and block tables, edited by each diff.

Owns: both stores, their edits. Must not know: sampling, the model.

``store_sampled`` puts a drawn token where the next step reads it.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_executor.backend import NewRow
from headway_executor.gpu.runtime import Runtime, UploadRing
from headway_kernels.gpu.rows import apply_edits, store_sampled
from headway_proto.columns import Int32Array

_SLOT_SIZE = 1 << 16


class DeviceRows:
    """``token_store`` int32, ``[max_num_rows, max_model_len + 1]``; ``block_tables`` int32, ``[max_num_rows, blocks]``.

    Old values lie beyond a row's tokens and blocks.
    """

    def __init__(self, runtime: Runtime, *, max_num_rows: int, max_model_len: int, block_size: int) -> None:
        max_num_blocks = -(-max_model_len // block_size) + 1
        self.block_size = block_size
        self.token_store = torch.zeros((max_num_rows, max_model_len + 1), dtype=torch.int32, device=runtime.device)
        self.block_tables = torch.zeros((max_num_rows, max_num_blocks), dtype=torch.int32, device=runtime.device)
        self._num_blocks = np.zeros(max_num_rows, dtype=np.int32)
        self._runtime = runtime
        self._uploads = UploadRing(runtime, _SLOT_SIZE)
        self._received = torch.empty(_SLOT_SIZE, dtype=torch.int32, device=runtime.device)

    def apply(self, new_rows: tuple[NewRow, ...], new_blocks: NDArray[np.int32]) -> None:
        """Store new rows and new blocks (``[2, n]``: row, block)."""
        num_edits, num_rows = new_blocks.shape[1], len(new_rows)
        if not num_edits and not num_rows:
            return
        token_ids = [new.token_ids for new in new_rows]
        starts = np.zeros(num_rows + 1, dtype=np.int32)
        np.cumsum([len(ids) for ids in token_ids], out=starts[1:])
        numbers = np.array([new.row for new in new_rows], dtype=np.int32)
        self._num_blocks[numbers] = 0
        places = self._places(new_blocks[0])
        parts = (new_blocks[0], places, new_blocks[1], numbers, starts, *token_ids)
        sizes = [num_edits, num_edits, num_edits, num_rows, num_rows + 1, int(starts[-1])]
        columns = torch.split(self._upload(parts, sum(sizes)), sizes)
        apply_edits(
            self.token_store,
            self.block_tables,
            edit_rows=columns[0],
            edit_places=columns[1],
            edit_blocks=columns[2],
            token_rows=columns[3],
            token_starts=columns[4],
            tokens=columns[5],
        )

    def write(self, rows: Int32Array, positions: Int32Array, tokens: Int32Array) -> None:
        """Store tokens that were drawn elsewhere; all ``[n]``."""
        columns = self._upload((tokens, rows, positions), 3 * len(tokens))
        drawn, numbers, places = columns.view(3, len(tokens))
        store_sampled(drawn, numbers, places, self.token_store)

    def _places(self, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        if (rows[1:] > rows[:-1]).all():
            places = self._num_blocks[rows]
        else:
            order = np.argsort(rows, kind="stable")
            in_order = rows[order]
            places = np.empty_like(rows)
            places[order] = self._num_blocks[in_order] + np.arange(len(rows)) - np.searchsorted(in_order, in_order)
        # A row may occur twice: its last block is written last.
        self._num_blocks[rows] = places + 1
        return places

    def _upload(self, parts: tuple[NDArray[np.int32], ...], size: int) -> Tensor:
        if size > self._uploads.size:
            # Rare: the prompts have more tokens than a slot. torch keeps pinned memory until the copy is over.
            sent = self._runtime.host_tensor((size,), torch.int32)
            np.concatenate(parts, out=sent.numpy())
            return sent.to(self._runtime.device, non_blocking=True)
        np.concatenate(parts, out=self._uploads.next_slot()[:size])
        self._uploads.send(self._received, size)
        return self._received[:size]
