"""The devices of one stage, which compute parts of the same tokens: how each gets the columns of the others.

Owns: gathering, and the products whose outputs are cut. Must not know: layers, what a product is made of.

Every product is cut by its outputs, and its inputs are gathered before it, as in ``models.part``. So no sum is cut, and the
number of tokens decides nothing but the size of what is gathered.
"""

from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from headway_executor.gpu.linear import DeviceLinear
from headway_executor.models.part import ModelPart
from headway_executor.ranks.group import RankGroup
from headway_executor.ranks.stage_mates import ColumnMates, Cut


class DeviceMates(Protocol):
    """All make the same calls in the same order."""

    def gather(self, own: Tensor, cut: Cut, out: Tensor) -> None:
        """Fill ``out``, ``[tokens, all columns]``, with ``own`` of all, ``[tokens, own columns]``."""
        ...

    def share(self, values: Tensor) -> None:
        """Fill ``values``, ``[n]``, with those of the first."""
        ...


class InMainMemory:
    """``DeviceMates`` of devices whose memory is main memory: Triton's interpreter."""

    def __init__(self, columns: ColumnMates, size: int) -> None:
        self._columns = columns
        self._size = size

    def gather(self, own: Tensor, cut: Cut, out: Tensor) -> None:
        """See ``DeviceMates``."""
        out.copy_(self._columns.gather(own, cut))

    def share(self, values: Tensor) -> None:
        """See ``DeviceMates``."""
        each = len(values)
        cut = tuple(range(first, first + each) for first in range(0, self._size * each, each))
        values.copy_(self._columns.gather(values.view(1, -1), cut)[0, :each])


class OverNccl:
    """``DeviceMates`` of GPUs, each of which gives ``most_numbers`` at most.

    ``ranks``: a torch.distributed.ProcessGroupNCCL. Its operations are on a stream of its own, between those of the steps'
    stream, and can be recorded.
    """

    def __init__(self, ranks: Any, most_numbers: int, dtype: torch.dtype, device: torch.device) -> None:
        self._ranks = ranks
        self._sent = torch.empty(most_numbers, dtype=dtype, device=device)
        self._received = torch.empty(ranks.size() * most_numbers, dtype=dtype, device=device)

    def gather(self, own: Tensor, cut: Cut, out: Tensor) -> None:
        """See ``DeviceMates``."""
        num_tokens, width = len(own), max(map(len, cut))
        if are_even := len(cut) * width == cut[-1].stop:
            sent = own.contiguous()  # It is: what kernels write stands together.
        else:
            sent = self._sent[: num_tokens * width].view(num_tokens, width)
            sent[:, : own.shape[1]].copy_(own)
        received = self._received[: len(cut) * sent.numel()]
        self._ranks._allgather_base(received, sent.view(-1)).wait()  # noqa: SLF001 - torch has no public name for it
        parts = received.view(len(cut), num_tokens, width)
        if are_even:
            out.view(num_tokens, len(cut), width).copy_(parts.transpose(0, 1))
            return
        for columns, part in zip(cut, parts, strict=True):
            out[:, columns.start : columns.stop].copy_(part[:, : len(columns)])

    def share(self, values: Tensor) -> None:
        """See ``DeviceMates``."""
        self._ranks.broadcast([values]).wait()


class BackToHidden:
    """Makes products of layers whose outputs are the hidden state, cut as ``hidden``, for steps of ``max_num_tokens``."""

    def __init__(
        self, mates: DeviceMates, part: ModelPart, max_num_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def space(width: int) -> Tensor:
            return torch.empty(max_num_tokens, width, dtype=dtype, device=device)

        self.mates = mates
        self.hidden = part.hidden
        self.own = part.own_hidden
        self.made = space(len(part.own_hidden))
        """For this rank's columns of the hidden state."""
        self._gathered = cache(space)  # Layers that are alike share memory.

    def product(self, own: DeviceLinear, inputs: Cut) -> "CutLinear":
        """Of ``own``, which has this rank's outputs; each rank has some ``inputs``."""
        return CutLinear(own, self.mates, inputs, self.hidden, self._gathered(inputs[-1].stop), self.made)


class CutLinear:
    """A ``DeviceLinear`` of ``own``, which has some of the outputs and needs all inputs, of which each rank has some.

    ``gathered`` and ``made``: memory for all inputs and for the own outputs, each ``[max tokens, columns]``.
    """

    def __init__(
        self, own: DeviceLinear, mates: DeviceMates, inputs: Cut, outputs: Cut, gathered: Tensor, made: Tensor
    ) -> None:
        self._own = own
        self._mates = mates
        self._inputs = inputs
        self._outputs = outputs
        self._gathered, self._made = gathered, made

    def __call__(self, inputs: Tensor, out: Tensor) -> None:
        """See ``DeviceLinear``; ``inputs`` has the own columns."""
        gathered, made = self._gathered[: len(inputs)], self._made[: len(inputs)]
        self._mates.gather(inputs, self._inputs, gathered)
        self._own(gathered, made)
        self._mates.gather(made, self._outputs, out)


def mates_of(
    group: RankGroup | None, *, most_numbers: int, dtype: torch.dtype, device: torch.device
) -> DeviceMates | None:
    """Who has other parts of this rank's layers; None: nobody. ``most_numbers``: see ``OverNccl``.

    Raises:
        BackendConfigError: see ``RankGroup.devices_of_stage``.
    """
    if group is None or group.place.tensor_parallel == 1:
        return None
    if device.type == "cpu":
        return InMainMemory(group.columns, group.place.tensor_parallel)
    return OverNccl(group.devices_of_stage(), most_numbers, dtype, device)
