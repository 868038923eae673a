"""Memory that processes of one host share, and that ends with the last of them.

Owns: making it, finding another process's, growing it. Must not know: its use.

It has no name in any file system, so a process that is killed leaves nothing behind. Another process of the same user
opens it by way of /proc.
"""

import mmap
import os
import sys
from typing import Self

import torch
from torch import Tensor

_LEAST_BYTES = 1 << 16


def can_share() -> bool:
    """Whether this system has such memory."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


class SharedMemory:
    """Zeros, as many as were asked for so far. Use ``made`` or ``found``."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._mapped = torch.empty(0, dtype=torch.uint8)

    @classmethod
    def made(cls) -> Self:
        """New memory."""
        return cls(os.memfd_create("headway-ranks", os.MFD_CLOEXEC))

    @classmethod
    def found(cls, whereabouts: str) -> Self:
        """The memory of another process. Raises ``OSError``, ``ValueError``: it cannot be had."""
        pid, descriptor = map(int, whereabouts.split())
        return cls(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))

    @property
    def whereabouts(self) -> str:
        """What ``found`` needs, for as long as this object lives."""
        return f"{os.getpid()} {self._descriptor}"

    def bytes(self, count: int) -> Tensor:
        """The first ``count`` bytes, uint8. Memory takes room only where it was written."""
        if count > len(self._mapped):
            size = max(_LEAST_BYTES, 1 << (count - 1).bit_length())
            if os.fstat(self._descriptor).st_size < size:
                os.ftruncate(self._descriptor, size)
            self._mapped = torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.uint8)
        return self._mapped[:count]

    def __del__(self) -> None:
        os.close(self._descriptor)


class OwnMemory:
    """The same for a process that shares with nobody."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def bytes(self, count: int) -> Tensor:
        """The first ``count`` bytes, uint8, at first zeros."""
        if count > len(self._bytes):
            self._bytes = torch.zeros(max(_LEAST_BYTES, 1 << (count - 1).bit_length()), dtype=torch.uint8)
        return self._bytes[:count]
