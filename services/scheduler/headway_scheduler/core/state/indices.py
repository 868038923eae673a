"""The integer types of row and block numbers inside the core.

Owns: these types. Must not know: what they number.

NumPy converts other index types first: indexing thirty entries by int32, as on the wire, costs five times as much.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

RowIndices: TypeAlias = NDArray[np.intp]
BlockIndices: TypeAlias = NDArray[np.intp]

NO_ROWS: RowIndices = np.empty(0, dtype=np.intp)
NO_BLOCKS: BlockIndices = np.empty(0, dtype=np.intp)


def joined(parts: list[BlockIndices]) -> BlockIndices:
    """Some arrays one behind the other, often only one."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else NO_BLOCKS


def is_any(mask: NDArray[np.bool_]) -> bool:
    """Whether any entry is true. With few entries, ``mask.any()`` takes ten times as long."""
    return 1 in mask.tobytes()


def are_all(mask: NDArray[np.bool_]) -> bool:
    """Whether all entries are true."""
    return 0 not in mask.tobytes()


# For array operations: to make an array of a Python number takes NumPy as long as the operation itself.
ZERO: NDArray[np.int32] = np.array(0, dtype=np.int32)
ONE: NDArray[np.int32] = np.array(1, dtype=np.int32)
ONE_PLACE: NDArray[np.intp] = np.array(1, dtype=np.intp)
