"""The tokens that rank 0 draws, for devices that compute every layer with it.

Owns: their way from device to device. Must not know: sampling, layers.

Nothing goes through the host, so each rank launches its next step while this one runs. Devices of other stages get tokens
through main memory: they have nothing to do with the step that draws them.
"""

from torch import Tensor

from headway_executor.gpu.device_parts import DeviceParts
from headway_executor.gpu.stage_mates import DeviceMates
from headway_kernels.gpu.rows import store_sampled


class TokensAmongMates:
    """Of the step in the columns of ``parts``."""

    def __init__(self, parts: DeviceParts, mates: DeviceMates) -> None:
        self._parts = parts
        self._mates = mates

    def share(self, num_drawn: int) -> Tensor:
        """Store what rank 0 has drawn and stored, and return it; call it on all ranks behind the launch of the step, and there of
        the draws.
        """
        columns, store = self._parts.upload.views, self._parts.rows.token_store
        rows, positions = columns.sampled_row[:num_drawn], columns.sampled_position[:num_drawn]
        tokens = store[rows.long(), positions.long()]
        self._mates.share(tokens)
        store_sampled(tokens, rows, positions, store)
        return tokens
