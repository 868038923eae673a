"""A rank's part of a model together with its ways to the other ranks.

Owns: what goes from stage to stage. Must not know: layers, how ranks meet.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headway_executor.models.part import ModelPart
from headway_executor.ranks.channel import Channel
from headway_executor.ranks.group import RankGroup


@dataclass(frozen=True, slots=True)
class Stage:
    """``before`` and ``behind`` lead to the neighbouring stages; None where there is none."""

    part: ModelPart
    group: RankGroup | None = None
    before: Channel | None = None
    behind: Channel | None = None

    def receive(self, num_tokens: int, dtype: torch.dtype) -> Tensor | None:
        """Return the own columns of the hidden state, ``[tokens, own_hidden]``, or None in the first stage."""
        if self.before is None:
            return None
        hidden = torch.empty(num_tokens, len(self.part.own_hidden), dtype=dtype)
        self.before.receive(hidden)
        return hidden

    def pass_on(self, own_hidden: Tensor) -> None:
        """Send the own columns of the hidden state to the next stage."""
        assert self.behind is not None
        self.behind.send(own_hidden.contiguous())


def stage_of(part: ModelPart, group: RankGroup | None, *, dtype: torch.dtype, most_tokens: int) -> Stage:
    """Connect a part with its neighbours. A step of more than ``most_tokens`` goes in several messages."""
    if group is None:
        return Stage(part)
    before, behind = group.stage_channels(max(1, most_tokens * len(part.own_hidden)) * dtype.itemsize)
    return Stage(part, group, before, behind)
