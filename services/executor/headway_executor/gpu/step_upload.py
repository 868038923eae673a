"""The columns of a step on their way to the device.

Owns: the columns on the device, and the host memory that they are sent from. Must not know: what reads the columns.
"""

import torch

from headway_executor.backend import StepBatch
from headway_executor.gpu.runtime import Runtime, UploadRing
from headway_executor.gpu.step_columns import StepColumns, StepShape


class StepUpload:
    """The columns of up to ``max_num_rows`` rows; ``views`` are those on the device."""

    def __init__(self, runtime: Runtime, max_num_rows: int) -> None:
        self._layout = StepColumns(max_num_rows)
        self._ring = UploadRing(runtime, self._layout.size)
        self._columns = torch.zeros(self._layout.size, dtype=torch.int32, device=runtime.device)
        self.views = self._layout.views(self._columns)

    def send(self, batch: StepBatch, shape: StepShape, num_padded_rows: int) -> None:
        """Send the columns of ``batch``, padded to ``num_padded_rows`` rows, on the current stream."""
        self._layout.fill(self._ring.next_slot(), batch, shape, num_padded_rows)
        self._ring.send(self._columns, self._layout.size)

    def clear(self) -> None:
        """Make the columns those of a step without tokens."""
        self._columns.zero_()
