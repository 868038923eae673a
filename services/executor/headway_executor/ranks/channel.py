"""Messages from one rank to others, whose sizes both sides know.

Owns: the order of messages, room for those that nobody has read yet. Must not know: their meaning.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from headway_executor.ranks.exchange import Exchange, Sending
from headway_executor.ranks.shared_memory import SharedMemory
from headway_kernels.cpu.library import CpuLibrary
from headway_kernels.cpu.meeting import POST_BYTES, Post

_MOST_UNREAD = 64


class Channel(Protocol):
    """One writer, some readers; each reader gets every message, in order. All tensors contiguous, on the CPU."""

    def send(self, message: Tensor) -> None:
        """Copy a message; wait only while readers are several messages behind."""
        ...

    def receive(self, message: Tensor) -> None:
        """Wait for the next message, and fill ``message``."""
        ...


class SharedChannel:
    """A channel through shared memory. ``reader`` is this reader's number, or None for the writer.

    ``num_slots`` messages may be unread. One longer than ``slot_bytes`` goes in pieces.
    """

    def __init__(
        self,
        library: CpuLibrary,
        memory: SharedMemory,
        *,
        num_readers: int,
        num_slots: int,
        slot_bytes: int,
        reader: int | None,
    ) -> None:
        head = (1 + num_readers) * POST_BYTES
        self._memory = memory.bytes(head + num_slots * slot_bytes)
        posts = [Post(library, self._memory[i * POST_BYTES :][:POST_BYTES]) for i in range(1 + num_readers)]
        self._written, self._read = posts[0], posts[1:]
        self._slots = self._memory[head:].view(num_slots, slot_bytes)
        self._reader = reader
        self._count = 0

    def send(self, message: Tensor) -> None:
        """See ``Channel.send``."""
        assert self._reader is None
        for piece in _pieces(message, self._slots.shape[1]):
            for post in self._read:
                post.wait_for(self._count + 1 - len(self._slots))
            self._slots[self._count % len(self._slots), : len(piece)] = piece
            self._count += 1
            self._written.write(self._count)

    def receive(self, message: Tensor) -> None:
        """See ``Channel.receive``."""
        assert self._reader is not None
        for piece in _pieces(message, self._slots.shape[1]):
            self._written.wait_for(self._count + 1)
            piece.copy_(self._slots[self._count % len(self._slots), : len(piece)])
            self._count += 1
            self._read[self._reader].write(self._count)


class MessageChannel:
    """A channel of messages. ``others``: the readers, or for a reader the writer."""

    def __init__(self, ranks: Exchange, others: Sequence[int], tag: int) -> None:
        self._ranks = ranks
        self._others = others
        self._tag = tag
        self._unread: deque[tuple[Tensor, list[Sending]]] = deque()

    def send(self, message: Tensor) -> None:
        """See ``Channel.send``."""
        kept = message.clone()
        self._unread.append((kept, [self._ranks.send(kept, other, self._tag) for other in self._others]))
        while len(self._unread) > _MOST_UNREAD or (self._unread and _are_done(self._unread[0][1])):
            for work in self._unread.popleft()[1]:
                work.wait()

    def receive(self, message: Tensor) -> None:
        """See ``Channel.receive``."""
        (writer,) = self._others
        self._ranks.receive(message, writer, self._tag)


def _are_done(works: list[Sending]) -> bool:
    return all(work.is_completed() for work in works)


def _pieces(message: Tensor, most_bytes: int) -> Iterator[Tensor]:
    assert message.is_contiguous()
    contents = message.view(-1).view(torch.uint8)
    for start in range(0, len(contents), most_bytes):
        yield contents[start : start + most_bytes]
