"""The ranks of one executor, joined.

Owns: who shares memory with whom, and what else goes which way. Must not know: models, steps, sockets.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from headway_executor.backend import BackendConfigError
from headway_executor.link_keys import LinkKeys
from headway_executor.rank_place import RankPlace
from headway_executor.ranks.channel import Channel, MessageChannel, SharedChannel
from headway_executor.ranks.exchange import Meeting
from headway_executor.ranks.gloo import GlooMeeting
from headway_executor.ranks.shared_memory import OwnMemory, SharedMemory, can_share
from headway_executor.ranks.stage_mates import (
    Alone,
    ColumnMates,
    Cut,
    MessageColumns,
    MessageRows,
    SharedColumns,
    SharedRows,
)
from headway_kernels.cpu.decoder import StageMates, WideRows
from headway_kernels.cpu.library import CpuLibrary
from headway_kernels.cpu.meeting import POST_BYTES, MeetingPlace

JOIN_SECONDS = 120.0
_HIDDEN_TAG = 1
_TAGS_OF_FIRST = {"drawn": 2, "proposals": 3}
_HIDDEN_SLOTS = 4
"""Passes that a stage may be ahead of the next one."""


class RankGroup:
    """This rank among the others. All ranks make the same calls in the same order.

    On one host, ``library`` meets in shared memory; without it, or without such memory, all goes over gloo. With
    ``is_switched``, all goes through a switch in rank 0, also from other hosts, with ``keys``.

    Raises:
        BackendConfigError: the rendezvous cannot be used, or the others did not come.
    """

    def __init__(
        self,
        place: RankPlace,
        library: CpuLibrary | None,
        *,
        is_switched: bool = False,
        keys: LinkKeys | None = None,
        join_seconds: float = JOIN_SECONDS,
    ) -> None:
        self.place = place
        self._on_host = None if is_switched else GlooMeeting(place, join_seconds)
        self._meeting: Meeting = self._on_host or _switched(place, keys, join_seconds)
        self._ranks = self._meeting.all_ranks()
        shares = self.least([int(library is not None and not is_switched and can_share())])[0]
        self._library = library if shares else None
        self._kept: list[SharedMemory] = []
        """Others find this memory only as long as it is open here."""
        self._mates: list[SharedMemory] = []
        self._meeting_place: MeetingPlace | None = None
        self.columns: ColumnMates = Alone()
        """The ranks of this stage, for a model of torch operators."""
        if place.tensor_parallel == 1:
            return
        if self._library is None:
            self.columns = MessageColumns(self._meeting.stage())
            return
        self._mates = [self._memory(f"stage {place.stage} {name}", 0, place.tensor_rank) for name in "abc"]
        posts = self._mates[0].bytes(place.tensor_parallel * POST_BYTES)
        self._meeting_place = MeetingPlace(self._library, posts, rank=place.tensor_rank, size=place.tensor_parallel)
        self.columns = SharedColumns(self._meeting_place, self._mates[1:], place.tensor_rank, place.tensor_parallel)

    @property
    def is_shared(self) -> bool:
        """Whether the ranks share memory."""
        return self._library is not None

    @property
    def meeting_place(self) -> MeetingPlace | None:
        """Where the ranks of this stage meet, if they share memory."""
        return self._meeting_place

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The least of each number over all ranks."""
        return [-most for most in self.most([-number for number in numbers])]

    def most(self, numbers: Sequence[int]) -> list[int]:
        """The largest of each number over all ranks."""
        return [int(number) for number in self._ranks.most(torch.tensor(numbers, dtype=torch.int64))]

    def rows(self, library: CpuLibrary, cuts: WideRows[Cut]) -> StageMates:
        """The ranks of this stage, for a model on the CPU kernels."""
        if isinstance(self.columns, MessageColumns):
            return MessageRows(self.columns, self.place.tensor_rank, cuts)
        if self._meeting_place is not None:
            return SharedRows(self._meeting_place, self._mates[1])
        return SharedRows(
            MeetingPlace(library, torch.zeros(POST_BYTES, dtype=torch.uint8), rank=0, size=1), OwnMemory()
        )

    def devices_of_stage(self) -> Any:
        """See ``GlooMeeting.devices_of_stage``. Raises ``BackendConfigError``: ranks may be on other hosts, or lack NCCL."""
        refused = f"tensor_parallel {self.place.tensor_parallel} is not allowed with device 'cuda'"
        if self._on_host is None:
            raise BackendConfigError(f"{refused} and rank_transport zmq; allowed: 1, or ranks of one host")
        if not torch.distributed.is_nccl_available():
            raise BackendConfigError(f"{refused}; this PyTorch is built without NCCL, so allowed: 1")
        return self._on_host.devices_of_stage()

    def stage_channels(self, slot_bytes: int) -> tuple[Channel | None, Channel | None]:
        """From the stage before, and to the stage behind; messages of at most ``slot_bytes`` go in one piece."""
        return self._link(self.place.stage - 1, slot_bytes), self._link(self.place.stage, slot_bytes)

    def channel_of_first(self, about: Literal["drawn", "proposals"], *, num_slots: int, slot_bytes: int) -> Channel:
        """From rank 0, which draws tokens, to all others, with room for ``num_slots`` messages."""
        place = self.place
        if self._library is None:
            others = range(1, place.size) if place.rank == 0 else (0,)
            return MessageChannel(self._ranks, others, _TAGS_OF_FIRST[about])
        memory = self._memory(about, 0, place.rank)
        reader = None if place.rank == 0 else place.rank - 1
        return SharedChannel(
            self._library,
            memory,
            num_readers=place.size - 1,
            num_slots=num_slots,
            slot_bytes=slot_bytes,
            reader=reader,
        )

    def close(self) -> None:
        """Let go of everything shared. May be called twice."""
        self._kept.clear()
        self._mates.clear()
        self._meeting_place = None
        self._meeting.close()

    def _link(self, first: int, slot_bytes: int) -> Channel | None:
        """The channel from stage ``first`` to the next one, if there are both."""
        place = self.place
        if not 0 <= first < place.pipeline_parallel - 1:
            return None
        is_writer = place.stage == first
        if self._library is None:
            other = place.rank_of(first + 1 if is_writer else first, place.tensor_rank)
            return MessageChannel(self._ranks, (other,), _HIDDEN_TAG)
        memory = self._memory(f"hidden {first} {place.tensor_rank}", 0, 0 if is_writer else 1)
        reader = None if is_writer else 0
        return SharedChannel(
            self._library, memory, num_readers=1, num_slots=_HIDDEN_SLOTS, slot_bytes=slot_bytes, reader=reader
        )

    def _memory(self, name: str, maker: int, number: int) -> SharedMemory:
        """Memory that number ``maker`` of those who share it makes. Raises ``BackendConfigError``: it cannot be had."""
        assert self._on_host is not None
        try:
            if number != maker:
                return SharedMemory.found(self._on_host.told(name))
            made = SharedMemory.made()
        except (OSError, ValueError) as error:
            raise BackendConfigError(
                f"backend_options rank_transport 'shared' is not allowed here; this process may not open the memory of "
                f"another rank ({error}); allowed: gloo, zmq"
            ) from error
        self._kept.append(made)
        self._on_host.tell(name, made.whereabouts)
        return made


def _switched(place: RankPlace, keys: LinkKeys | None, join_seconds: float) -> Meeting:
    """Of a group alone: one rank opens a model where there is no ZeroMQ."""
    from headway_executor.ranks.switched import SwitchedMeeting

    return SwitchedMeeting(place, keys, join_seconds)
