"""The ranks of one stage, who compute parts of the same rows: how each gets the columns of the others.

Owns: gathering, adding up. Must not know: layers, processes.

On one host they share memory: each writes its columns there and waits for the others. Elsewhere columns go in messages.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from headway_executor.ranks.exchange import Exchange
from headway_executor.ranks.shared_memory import OwnMemory, SharedMemory
from headway_kernels.cpu.decoder import WideRows
from headway_kernels.cpu.meeting import MeetingPlace

Cut: TypeAlias = tuple[range, ...]
"""The columns of each rank."""

_MEETINGS = (None, 0, 1, None, 2, 3, 4, 5)
"""Which of ``WideRows`` each ``enum meeting`` of the kernels completes."""

_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


class DivergedError(RuntimeError):
    """Ranks began different steps."""


class ColumnMates(Protocol):
    """For models of torch operators."""

    def gather(self, own: Tensor, cut: Cut) -> Tensor:
        """Return all columns of ``own``, ``[rows, own columns]``; a new tensor."""
        ...

    def add_up(self, own: Tensor) -> Tensor:
        """Return the sum over the ranks of ``own``, the same in each; a new tensor."""
        ...


class Alone:
    """``ColumnMates`` of a rank without any."""

    def gather(self, own: Tensor, cut: Cut) -> Tensor:  # noqa: ARG002 - there is one range
        """See ``ColumnMates.gather``."""
        return own

    def add_up(self, own: Tensor) -> Tensor:
        """See ``ColumnMates.add_up``."""
        return own


class SharedColumns:
    """``ColumnMates`` in shared memory.

    Two memories take turns: whoever writes to one has met the others since they read it.
    """

    def __init__(self, place: MeetingPlace, memories: Sequence[SharedMemory], rank: int, size: int) -> None:
        self._place = place
        self._memories = memories
        self._rank = rank
        self._size = size
        self._turn = 0

    def gather(self, own: Tensor, cut: Cut) -> Tensor:
        """See ``ColumnMates.gather``."""
        shared = self._next((len(own), cut[-1].stop), own.dtype)
        shared[:, cut[self._rank].start : cut[self._rank].stop] = own
        self._place.wait_for_all()
        return shared.clone()

    def add_up(self, own: Tensor) -> Tensor:
        """See ``ColumnMates.add_up``."""
        shared = self._next((self._size, *own.shape), own.dtype)
        shared[self._rank] = own
        self._place.wait_for_all()
        return shared.sum(0)

    def _next(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self._turn ^= 1
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self._memories[self._turn].bytes(num_bytes).view(dtype).view(shape)


class MessageColumns:
    """``ColumnMates`` that send messages."""

    def __init__(self, ranks: Exchange) -> None:
        self._ranks = ranks

    def gather(self, own: Tensor, cut: Cut) -> Tensor:
        """See ``ColumnMates.gather``."""
        padded = own.new_zeros(len(own), max(map(len, cut)))
        padded[:, : own.shape[1]] = own
        parts = self._ranks.gather(padded)
        return torch.cat([part[:, : len(columns)] for part, columns in zip(parts, cut, strict=True)], dim=1)

    def add_up(self, own: Tensor) -> Tensor:
        """See ``ColumnMates.add_up``."""
        return self._ranks.add_up(own.contiguous())


class SharedRows:
    """``headway_kernels.cpu.decoder.StageMates`` in shared memory, or of a rank that has a stage for itself."""

    def __init__(self, place: MeetingPlace, memory: SharedMemory | OwnMemory) -> None:
        self._place = place
        self._memory = memory
        self.meet, self.context, self.is_shared = place.meet, place.context, True

    def wide_rows(self, sizes: WideRows[tuple[int, int]]) -> WideRows[Tensor]:
        """See ``StageMates.wide_rows``."""
        return _wide_rows(self._memory.bytes, sizes)

    def check(self) -> None:
        """See ``StageMates.check``."""
        if self._place.differs:
            raise DivergedError("the ranks of this executor began different steps")

    def giving_hidden_states(self) -> "SharedRows":
        """See ``StageMates.giving_hidden_states``."""
        return self


class MessageRows:
    """``headway_kernels.cpu.decoder.StageMates`` that sends messages."""

    def __init__(self, columns: MessageColumns, rank: int, cuts: WideRows[Cut]) -> None:
        self._columns = columns
        self._rank = rank
        self._cuts = cuts
        self._memory = OwnMemory()
        self._rows: WideRows[Tensor] | None = None
        self._error: Exception | None = None
        self._callback = _Callback(self._meet)
        self.meet = int(ctypes.cast(self._callback, ctypes.c_void_p).value or 0)
        self.context, self.is_shared = 0, False

    def wide_rows(self, sizes: WideRows[tuple[int, int]]) -> WideRows[Tensor]:
        """See ``StageMates.wide_rows``."""
        self._rows = _wide_rows(self._memory.bytes, sizes)
        return self._rows

    def check(self) -> None:
        """See ``StageMates.check``."""
        if self._error is not None:
            raise self._error

    def giving_hidden_states(self) -> "MessageRows":
        """See ``StageMates.giving_hidden_states``."""
        return MessageRows(self._columns, self._rank, self._cuts._replace(logits=self._cuts.hidden))

    def _meet(self, context: int | None, about: int, num_rows: int) -> None:  # noqa: ARG002 - this object is it
        which = _MEETINGS[about]
        if which is None or self._error is not None:
            return
        assert self._rows is not None
        own = self._cuts[which][self._rank]
        rows = self._rows[which][:num_rows]
        try:
            gathered = self._columns.gather(rows[:, own.start : own.stop], self._cuts[which])
            rows[:, : gathered.shape[1]] = gathered
        except Exception as error:  # noqa: BLE001 (no exception may pass through C)
            self._error = error


def _wide_rows(memory: Callable[[int], Tensor], sizes: WideRows[tuple[int, int]]) -> WideRows[Tensor]:
    counts = [rows * columns for rows, columns in sizes]
    parts = memory(4 * sum(counts)).view(torch.float32).split_with_sizes(counts)
    return WideRows(*(part.view(size) for part, size in zip(parts, sizes, strict=True)))
