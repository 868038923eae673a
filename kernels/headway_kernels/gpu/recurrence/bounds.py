"""Which tokens of a step are whose.

Owns: these columns together. Must not know: who has them.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class RowBounds(NamedTuple):
    """int32 on the device. Entry i has the tokens ``query_start[i]`` to ``query_start[i + 1]`` and the state ``rows[i]``; it
    begins anew if ``first_position[i]`` is 0. ``rows`` and ``first_position`` ``[R]``, ``query_start`` ``[R + 1]``. Padding
    has no tokens.
    """

    rows: Tensor
    query_start: Tensor
    first_position: Tensor


_PROGRAMS = 4096
"""Of one warp, of a launch: more than run at once anywhere."""


@triton.jit
def known_numbers(position, number, SIZE: tl.constexpr):
    """Which of ``SIZE`` numbers of a state a row has when it comes to a position: none at 0, where it begins.

    Triton's interpreter cannot broadcast what comparing a scalar gives.
    """
    return tl.where(position > 0, number, SIZE) < SIZE


def programs_along(num_rows: int, programs_of_row: int) -> int:
    """Along the rows of a step, each of which has so many: the padding of a large graph would be many that do nothing."""
    return min(num_rows, max(1, _PROGRAMS // programs_of_row))
