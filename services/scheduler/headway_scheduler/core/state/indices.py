"""The integer type that arrays are indexed with, and a number for arithmetic with them.

Owns: the types of row and block numbers inside the core. Must not know: what they number.

On the wire they are int32. Inside, they index other columns all the time, and numpy first converts any other integer
type to this one: indexing thirty entries by int32 costs five times as much.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

RowIndices: TypeAlias = NDArray[np.intp]
BlockIndices: TypeAlias = NDArray[np.intp]

NO_ROWS: RowIndices = np.empty(0, dtype=np.intp)
NO_BLOCKS: BlockIndices = np.empty(0, dtype=np.intp)

# For array operations. Of a Python number numpy first makes such an array, which takes as long as the operation itself.
ONE: NDArray[np.int32] = np.array(1, dtype=np.int32)
