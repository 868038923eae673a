"""The columns of a step on their way to the device.

Owns: their memory on both sides. Must not know: their readers.
"""

import torch

from headway_executor.backend import StepBatch
from headway_executor.gpu.runtime import Runtime, UploadRing
from headway_executor.gpu.step_columns import StepColumns, StepShape


class StepUpload:
    """``views`` are the columns on the device."""

    def __init__(self, runtime: Runtime, max_num_rows: int) -> None:
        self._layout = StepColumns(max_num_rows)
        self._ring = UploadRing(runtime, self._layout.size)
        self._columns = torch.zeros(self._layout.size, dtype=torch.int32, device=runtime.device)
        self.views = self._layout.views(self._columns)

    def send(self, batch: StepBatch, shape: StepShape, num_padded_rows: int) -> None:
        """Send the columns on the current stream."""
        self._layout.fill(self._ring.next_slot(), batch, shape, num_padded_rows)
        self._ring.send(self._columns, self._layout.size)

    def clear(self) -> None:
        """Make the columns those of an empty step."""
        self._columns.zero_()
        self.views.sampled_row.fill_(-1)
