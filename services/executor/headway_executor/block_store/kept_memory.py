"""Memory for private copies of blocks that is used again, so that its pages stay.

Owns: when it may be used again. Must not know: what is copied.

The allocator gives a few MiB back to the kernel as soon as nobody holds them. To get their pages again takes twice as long as
to fill them: 1 ms for 3 MiB.
"""

import mmap
import threading
import weakref

import numpy as np
from numpy.typing import NDArray

from headway_executor.block_store.transport import Bytes

MOST_BYTES = 4 << 20
"""For larger arrays NumPy asks for huge pages, of which few are needed."""


class KeptMemory:
    """Memory of one array at a time. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: mmap.mmap | None = None
        self._given: weakref.ref[NDArray[np.uint8]] | None = None

    def blocks(self, num_blocks: int, block_bytes: int) -> Bytes:
        """Return uint8, ``[num_blocks, block_bytes]``, with any contents: new memory while somebody has the last array."""
        size = num_blocks * block_bytes
        with self._lock:
            is_free = self._given is None or self._given() is None
            if not is_free or not 0 < size <= MOST_BYTES:
                return np.empty((num_blocks, block_bytes), dtype=np.uint8)
            if self._memory is None:
                # Whole pages: the kernel takes half as long again to copy to an address that is not aligned. Private ones:
                # a kernel that looks for idle pages unmaps shared ones.
                self._memory = mmap.mmap(-1, MOST_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # Views of this array keep it alive, not the memory behind it alone: a memoryview is no array.
            array = np.frombuffer(memoryview(self._memory), np.uint8, size)
            self._given = weakref.ref(array)
            return array.reshape(num_blocks, block_bytes)
