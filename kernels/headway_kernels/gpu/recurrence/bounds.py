"""Which tokens of a step are whose.

Owns: these columns together. Must not know: who has them.
"""

from typing import NamedTuple

from torch import Tensor


class RowBounds(NamedTuple):
    """int32 on the device. Entry i has the tokens ``query_start[i]`` to ``query_start[i + 1]`` and the state ``rows[i]``; it
    begins anew if ``first_position[i]`` is 0. ``rows`` and ``first_position`` ``[R]``, ``query_start`` ``[R + 1]``. Padding
    has no tokens.
    """

    rows: Tensor
    query_start: Tensor
    first_position: Tensor
