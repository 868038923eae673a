"""What becomes of a request whose blocks are taken away, and whose are taken: the preemption policies by name.

Owns: the costs of preemption, the choice between its two kinds, and the choice of a victim.
Must not know: queues, budgets, or how a row is taken away.

- ``recompute``: the blocks are given up; the tokens are computed again later (vLLM's first choice: Kwon et al., SOSP
  2023, section 4.5).
- ``swap``: the blocks are copied to the host and back; where the host has no room, recompute.
- ``auto``: whichever costs the device less, by what both have been measured to cost: the time of moving a block, from the
  executor's reports, and the time of computing prompt tokens, from the model of step times. While either is unknown,
  recompute.

A victim is one of the lowest class among those that are served later than whoever lacks a block; among these, the one
with the least work lost per block that becomes free, differences below a quarter counting as none; then the last in service
order. Only ``MAX_CANDIDATES`` rows, the last in service order, are looked at closely, which bounds the cost and lets
nobody who started early be taken for a trifle.
"""

from collections.abc import Callable, Collection
from typing import Protocol

import numpy as np

from headway_scheduler.core.memory.block_pool import BlockPool
from headway_scheduler.core.memory.row_table import RowTable

MAX_CANDIDATES = 16
_RESOLUTION = 4
"""Work lost per block is told apart in quarters of a block's tokens."""
_MOVE_SMOOTHING = 0.2


class PreemptionCosts:
    """What either kind costs the device, in microseconds; None while unknown.

    ``prefill_s`` answers for a number of prompt tokens and a number computed before, in seconds; ``swap_us_per_block`` is the
    executor's own first measurement, 0 if it has none.
    """

    def __init__(self, prefill_s: Callable[[int, int], float | None], swap_us_per_block: float) -> None:
        self._prefill_s = prefill_s
        self._swap_us_per_block = swap_us_per_block

    def observe_moves(self, num_blocks: int, time_us: int) -> None:
        """A step moved so many blocks in that time."""
        if num_blocks <= 0 or time_us <= 0:
            return
        measured = time_us / num_blocks
        if self._swap_us_per_block <= 0:
            self._swap_us_per_block = measured
        else:
            self._swap_us_per_block += _MOVE_SMOOTHING * (measured - self._swap_us_per_block)

    def recompute_us(self, num_tokens: int) -> float | None:
        """Computing ``num_tokens`` tokens again."""
        seconds = self._prefill_s(num_tokens, 0)
        return None if seconds is None else seconds * 1e6

    def swap_us(self, num_blocks: int) -> float | None:
        """Moving so many blocks out and back in."""
        return 2 * num_blocks * self._swap_us_per_block if self._swap_us_per_block > 0 else None


class PreemptionPolicy(Protocol):
    """Small objects without state."""

    @property
    def needs_costs(self) -> bool: ...  # noqa: D102 - whether step times have to be observed for it

    def swaps(self, costs: PreemptionCosts, num_tokens: int, num_blocks: int) -> bool:
        """Whether a request with so many computed tokens and blocks is better swapped, if the host has room."""


class Recompute:
    """Never swaps."""

    needs_costs = False

    def swaps(self, costs: PreemptionCosts, num_tokens: int, num_blocks: int) -> bool:
        """No."""
        del costs, num_tokens, num_blocks
        return False


class Swap:
    """Swaps where there is room."""

    needs_costs = False

    def swaps(self, costs: PreemptionCosts, num_tokens: int, num_blocks: int) -> bool:
        """Yes."""
        del costs, num_tokens, num_blocks
        return True


class CheaperOfBoth:
    """Swaps where that is known to be cheaper."""

    needs_costs = True

    def swaps(self, costs: PreemptionCosts, num_tokens: int, num_blocks: int) -> bool:
        """Whether moving costs less than computing."""
        swap_us, recompute_us = costs.swap_us(num_blocks), costs.recompute_us(num_tokens)
        return swap_us is not None and recompute_us is not None and swap_us < recompute_us


PREEMPTIONS: dict[str, PreemptionPolicy] = {"recompute": Recompute(), "swap": Swap(), "auto": CheaperOfBoth()}


def choose_victim(rows: RowTable, pool: BlockPool, row: int, planned: Collection[int]) -> int | None:
    """The row to preempt so that ``row`` gets a block: one that is later in the service order, or itself if it is the last.

    Not one of ``planned``, whose prompts have got their part of this step; None if there are no others.
    """
    keys = rows.order_key[: rows.end]
    later = (keys > keys[row]).nonzero()[0]
    if not len(later):
        return row
    if planned:
        later = later[~np.isin(later, list(planned))]
        if not len(later):
            return None
    classes = rows.priority[later]
    lowest = later[classes == classes.max()]
    last = lowest[keys[lowest].argsort()[-MAX_CANDIDATES:]]
    return in_victim_order(rows, pool, last.tolist())[0]


def in_victim_order(rows: RowTable, pool: BlockPool, candidates: list[int]) -> list[int]:
    """``candidates`` by class, the lowest first, then by work lost per block, then the last in service order first."""
    return sorted(
        candidates,
        key=lambda row: (-int(rows.priority[row]), _lost_per_block(rows, pool, row), -int(rows.order_key[row])),
    )


def _lost_per_block(rows: RowTable, pool: BlockPool, row: int) -> int:
    """Tokens that would have to be computed again per block that becomes free, in quarters of a block."""
    blocks = rows.block_table[row, : rows.num_blocks[row]]
    num_freed = pool.num_held_once(blocks)
    if not num_freed:
        return int(np.iinfo(np.int64).max)
    return _RESOLUTION * int(rows.num_computed_tokens[row]) // (num_freed * rows.block_size)
