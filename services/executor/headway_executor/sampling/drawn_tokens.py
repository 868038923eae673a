"""The tokens that rank 0 draws, on their way to the other ranks.

Owns: which of them a rank still waits for. Must not know: sampling, forward passes.

A rank waits for a token only when its row runs again, or when many steps of tokens are unread. So a stage runs the step
of one lane while a later stage draws the tokens of another.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from headway_executor.backend import BackendConfig, StepBatch
from headway_executor.models.forward import Int64Array
from headway_executor.rank_place import RankPlace
from headway_executor.ranks.channel import Channel
from headway_executor.ranks.group import RankGroup
from headway_proto.columns import Int32Array


def drawn_channel(group: RankGroup, config: BackendConfig) -> Channel:
    """The channel for the tokens; whoever draws need not wait for readers, since it has room for one more than they leave."""
    most_of_row = 1 if config.speculation == "off" else 1 + config.num_speculative_tokens
    longest = 4 * (1 + 3 * config.max_num_seqs * most_of_row)
    return group.channel_of_first("drawn", num_slots=_most_unread(config.place) + 1, slot_bytes=longest)


def _most_unread(place: RankPlace) -> int:
    """Steps in flight may be as many as stages."""
    return place.pipeline_parallel + 1


class DrawnTokensOut:
    """Rank 0's side."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def tell(self, numbers: Int64Array, positions: Int64Array, drawn: Int32Array, num_draws: int) -> None:
        """Tell the others the tokens that count, of the ``num_draws`` that a step drew; all ``[n]``."""
        message = torch.zeros(1 + 3 * num_draws, dtype=torch.int32)
        message[0] = len(drawn)
        columns = np.stack((numbers, positions, np.maximum(drawn, 0))).astype(np.int32)
        message[1 : 1 + columns.size] = torch.from_numpy(columns.reshape(-1))
        self._channel.send(message)


class DrawnTokensIn:
    """The side of another rank. ``write`` gets rows, positions and tokens, all int32, ``[n]``."""

    def __init__(
        self, channel: Channel, write: Callable[[Int32Array, Int32Array, Int32Array], None], place: RankPlace
    ) -> None:
        self._channel = channel
        self._most_unread = _most_unread(place)
        self._write = write
        self._awaited: deque[tuple[set[int], int]] = deque()

    def expect(self, rows: Int32Array, num_draws: int) -> None:
        """Note that a step draws tokens of ``rows``."""
        self._awaited.append((set(rows.tolist()), num_draws))

    def take_in(self, batch: StepBatch) -> None:
        """Before a step, write what it needs; forget what was drawn for earlier holders of its new rows."""
        for new in batch.new_rows:
            for rows, _ in self._awaited:
                rows.discard(new.row)
        running = set(batch.rows.tolist())
        needed = [number for number, (rows, _) in enumerate(self._awaited, start=1) if rows & running]
        for _ in range(max(needed[-1] if needed else 0, len(self._awaited) - self._most_unread)):
            self._take_one()

    def _take_one(self) -> None:
        rows, num_draws = self._awaited.popleft()
        message = torch.empty(1 + 3 * num_draws, dtype=torch.int32)
        self._channel.receive(message)
        count, columns = int(message[0]), message[1:].numpy()
        numbers, positions, drawn = columns[: 3 * count].reshape(3, count)
        kept = np.isin(numbers, list(rows))
        self._write(numbers[kept], positions[kept], drawn[kept])
