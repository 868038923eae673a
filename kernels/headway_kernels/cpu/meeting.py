"""Where processes of one host meet, in memory that they share.

Owns: the C structs of ``meeting.h``, their memory. Must not know: what is shared.
"""

import ctypes

from torch import Tensor

from headway_kernels.cpu.library import CpuLibrary

POST_BYTES = 64
"""Bytes of the counter of one process; at first zeros."""

_ANYTHING = 1


class _PlaceStruct(ctypes.Structure):
    _fields_ = (
        ("posts", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("differs", ctypes.c_int64),
        ("num_meetings", ctypes.c_int64),
        ("waited_ns", ctypes.c_int64),
    )


class MeetingPlace:
    """Process ``rank`` of ``size``; ``posts`` uint8, ``[size * POST_BYTES]``, the same memory in all of them.

    ``meet`` and ``context`` are addresses, for the library.
    """

    def __init__(self, library: CpuLibrary, posts: Tensor, *, rank: int, size: int) -> None:
        self._posts = posts
        self._struct = _PlaceStruct(posts=posts.data_ptr(), rank=rank, size=size)
        self._function = library.functions.headway_meet
        self.meet = int(ctypes.cast(self._function, ctypes.c_void_p).value or 0)
        self.context = ctypes.addressof(self._struct)

    def wait_for_all(self) -> None:
        """Return when all are here; what they wrote before is visible then."""
        self._function(self.context, _ANYTHING, 0)

    @property
    def differs(self) -> bool:
        """Whether another process began a step of other rows."""
        return bool(self._struct.differs)

    @property
    def num_meetings(self) -> int:
        """Meetings so far."""
        return int(self._struct.num_meetings)

    @property
    def waited_ns(self) -> int:
        """Nanoseconds spent in them."""
        return int(self._struct.waited_ns)


class Post:
    """A count that one process writes and others wait for; ``memory`` uint8, ``[POST_BYTES]``."""

    def __init__(self, library: CpuLibrary, memory: Tensor) -> None:
        self._memory = memory
        self._functions = library.functions
        self._address = memory.data_ptr()

    def write(self, count: int) -> None:
        """Let others see the count, and all that was written before it."""
        self._functions.headway_post(self._address, count)

    def wait_for(self, count: int) -> None:
        """Return when the count is reached."""
        self._functions.headway_await(self._address, count)
