"""The proposals of rank 0 on their way to the other ranks, which have no draft model.

Owns: what a message holds. Must not know: models, how proposals are found.

Both sides know which rows were asked and their limits, so the message has a known size.
"""

import numpy as np
import torch
from torch import Tensor

from headway_executor.backend import BackendConfig, StepBatch
from headway_executor.models.forward import Int64Array
from headway_executor.ranks.channel import Channel
from headway_executor.ranks.group import RankGroup
from headway_executor.sampling.speculation.proposer import Asked, Proposer
from headway_executor.sampling.speculation.verification import proposal_places
from headway_proto.columns import Int32Array


def proposals_channel(group: RankGroup, config: BackendConfig) -> Channel:
    """The channel for proposals. A step with some is answered before the next one, so one message is unread at most."""
    return group.channel_of_first(
        "proposals", num_slots=2, slot_bytes=4 * config.max_num_seqs * (1 + config.num_speculative_tokens)
    )


def tell_proposals(channel: Channel, asked: Asked, counts: Int64Array, proposals: Int32Array) -> None:
    """Send ``counts``, ``[n]``, and ``proposals`` of all rows in order."""
    message = _message(asked)
    message[: len(counts)] = torch.from_numpy(counts)
    message[len(counts) :][: len(proposals)] = torch.from_numpy(proposals)
    if len(message):
        channel.send(message)


def take_proposals(channel: Channel, asked: Asked) -> tuple[Int64Array, Int32Array]:
    """Wait for what was sent for this question: counts int64, ``[n]``, and the proposals of all rows in order, int32."""
    message = _message(asked)
    if len(message):
        channel.receive(message)
    num_rows = len(asked.numbers)
    counts = message[:num_rows].numpy().astype(np.int64)
    proposals: Int32Array = message[num_rows:][: int(counts.sum())].numpy()
    return counts, proposals


def _message(asked: Asked) -> Tensor:
    return torch.zeros(len(asked.numbers) + int(asked.limits.sum()), dtype=torch.int32)


class Telling:
    """A ``Proposer`` that tells the other ranks what ``proposer`` proposes."""

    def __init__(self, proposer: Proposer, channel: Channel) -> None:
        self._proposer = proposer
        self._channel = channel
        self.follow = proposer.follow
        self.forget_blocks = proposer.forget_blocks
        self.settle = proposer.settle

    def propose(self, asked: Asked, token_ids: Tensor) -> Int64Array:
        """See ``Proposer.propose``."""
        counts = self._proposer.propose(asked, token_ids)
        rows, positions = proposal_places(asked, counts)
        tell_proposals(self._channel, asked, counts, token_ids[rows, positions].numpy())
        return counts


class Told:
    """The ``Proposer`` of another rank."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def follow(self, batch: StepBatch) -> None:
        """See ``Proposer.follow``."""

    def forget_blocks(self, blocks: Int32Array) -> None:
        """See ``Proposer.forget_blocks``."""

    def propose(self, asked: Asked, token_ids: Tensor) -> Int64Array:
        """See ``Proposer.propose``."""
        counts, proposals = take_proposals(self._channel, asked)
        rows, positions = proposal_places(asked, counts)
        token_ids[rows, positions] = torch.from_numpy(proposals)
        return counts

    def settle(self, asked: Asked, num_proposed: Int64Array, num_accepted: Int64Array) -> None:
        """See ``Proposer.settle``."""
