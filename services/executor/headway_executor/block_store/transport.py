"""The seam of transports: how one executor reads another executor's host blocks.

Owns: the four calls and their types. Must not know: any transport, or what a block means.

Transports are in the entry point group ``headway.block_transports``. Whoever needs a block pulls it. A transport only
carries records and bytes; whether they are right is decided by the caller, in one place for all.
"""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headway_proto.columns import Int32Array

Bytes = NDArray[np.uint8]

RECORD = np.dtype([("epoch", "<u8"), ("step", "<u4"), ("checksum", "<u4")])
"""Which step of which epoch wrote a block, and a CRC32 of its place and bytes; all zeros: nobody has."""


class HostMemory(NamedTuple):
    """An executor's own host blocks.

    ``name``: as announced (``BackendInfo.host_pool``). ``path``: the file in shared memory, "" if there is none.
    ``records``: ``RECORD``, ``[num_blocks]``. ``blocks``: uint8, ``[num_blocks, block_bytes]``.
    """

    name: str
    path: str
    records: NDArray[np.void]
    blocks: Bytes


class PulledBlocks(NamedTuple):
    """What a pool held at one moment: private copies, ``[n]`` and ``[n, block_bytes]``. Nothing is checked yet.

    Where no block has a record, the bytes may be anything: they are still being written, or nobody has.
    """

    records: NDArray[np.void]
    blocks: Bytes


class PullError(RuntimeError):
    """The pool cannot be reached, or did not answer in time; one line."""


class BlockTransport(Protocol):
    """Four calls, all from one thread.

    A transport whose attribute ``never_waits`` is true may be asked to ``pull`` from a second thread too: that takes as long
    as copying, and touches nothing that its other calls use.
    """

    def register(self, memory: HostMemory) -> str:
        """Let others read this memory; return its address behind ``TRANSPORT:``. Called at most once.

        Raises:
            BackendConfigError: the memory cannot be offered in this way; one line.
        """
        ...

    def pull(
        self, pool: str, address: str, host_blocks: Int32Array, *, block_bytes: int, timeout_s: float
    ) -> PulledBlocks:
        """Copy these blocks of the pool of this name out of the memory at ``address``.

        Raises:
            PullError: see there. A later pull may succeed.
        """
        ...

    def release(self, address: str) -> None:
        """Forget what is kept open for this address; unknown ones are ignored."""
        ...

    def close(self) -> None:
        """End everything, also what others read. May be called twice."""
        ...
