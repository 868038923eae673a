"""The preemption policies by name, and the choice of a victim.

Owns: swap or recompute, and which row loses its blocks. Must not know: how a row is taken away.

- ``recompute``: release the blocks, compute the tokens again later (vLLM's first choice: Kwon et al., SOSP 2023,
  section 4.5).
- ``swap``: copy the blocks to the host and back; recompute if the host is full.
- ``auto``: whichever has taken less device time; recompute while that is unknown.

A victim comes later in the service order. The lowest class goes first, then the least lost work per freed block, in
quarters of a block, then the last in service order. Only the last ``MAX_CANDIDATES`` rows are compared, which bounds
the cost and protects requests that started early.
"""

from collections.abc import Callable, Collection
from typing import Protocol

import numpy as np

from headway_scheduler.core.memory.block_pool import BlockPool
from headway_scheduler.core.memory.row_table import RowTable

MAX_CANDIDATES = 16
_RESOLUTION = 4
"""Lost work is compared in quarters of a block."""
_MOVE_SMOOTHING = 0.2


class PreemptionCosts:
    """Device time in microseconds; None while unknown.

    ``prefill_s`` maps numbers of prompt tokens and of computed tokens to seconds.
    """

    def __init__(self, prefill_s: Callable[[int, int], float | None], swap_us_per_block: float) -> None:
        self._prefill_s = prefill_s
        self._swap_us_per_block = swap_us_per_block

    def observe_moves(self, num_blocks: int, time_us: int) -> None:
        """Learn from a step that moved ``num_blocks`` blocks."""
        if num_blocks <= 0 or time_us <= 0:
            return
        measured = time_us / num_blocks
        if self._swap_us_per_block <= 0:
            self._swap_us_per_block = measured
        else:
            self._swap_us_per_block += _MOVE_SMOOTHING * (measured - self._swap_us_per_block)

    def recompute_us(self, num_tokens: int) -> float | None:
        """The time to compute ``num_tokens`` tokens again."""
        seconds = self._prefill_s(num_tokens, 0)
        return None if seconds is None else seconds * 1e6

    def swap_us(self, num_blocks: int) -> float | None:
        """The time to move blocks out and back in."""
        return 2 * num_blocks * self._swap_us_per_block if self._swap_us_per_block > 0 else None


class PreemptionPolicy(Protocol):
    """A stateless choice between swapping and recomputing."""

    @property
    def needs_costs(self) -> bool: ...  # noqa: D102 - whether it needs the model of step times

    def swaps(self, costs: PreemptionCosts, num_tokens: int, num_blocks: int) -> bool:
        """Whether to swap this request if the host has room."""


class Recompute:
    """Never swaps."""

    needs_costs = False

    def swaps(self, costs: PreemptionCosts, num_tokens: int, num_blocks: int) -> bool:
        """No."""
        del costs, num_tokens, num_blocks
        return False


class Swap:
    """Always swaps if there is room."""

    needs_costs = False

    def swaps(self, costs: PreemptionCosts, num_tokens: int, num_blocks: int) -> bool:
        """Yes."""
        del costs, num_tokens, num_blocks
        return True


class CheaperOfBoth:
    """Swaps if that is known to be cheaper."""

    needs_costs = True

    def swaps(self, costs: PreemptionCosts, num_tokens: int, num_blocks: int) -> bool:
        """Whether moving costs less than computing."""
        swap_us, recompute_us = costs.swap_us(num_blocks), costs.recompute_us(num_tokens)
        return swap_us is not None and recompute_us is not None and swap_us < recompute_us


PREEMPTIONS: dict[str, PreemptionPolicy] = {"recompute": Recompute(), "swap": Swap(), "auto": CheaperOfBoth()}

OFFLOADS: dict[str, PreemptionPolicy | None] = {"off": None, "always": Swap(), "auto": CheaperOfBoth()}
"""When the host keeps a prefix: a copy there is to its computation what a swap is to a recomputation."""


def choose_victim(rows: RowTable, pool: BlockPool, row: int, planned: Collection[int]) -> int | None:
    """The row that must give ``row`` a block: ``row`` itself if it is the last.

    None if all later rows are ``planned``, with prompts in this step.
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
    """``candidates``, the best victim first."""
    return sorted(
        candidates,
        key=lambda row: (-int(rows.priority[row]), _lost_per_block(rows, pool, row), -int(rows.order_key[row])),
    )


def _lost_per_block(rows: RowTable, pool: BlockPool, row: int) -> int:
    """Tokens to recompute, in quarters of a block."""
    blocks = rows.block_table[row, : rows.num_blocks[row]]
    num_freed = pool.num_held_once(blocks)
    if not num_freed:
        return int(np.iinfo(np.int64).max)
    return _RESOLUTION * int(rows.num_computed_tokens[row]) // (num_freed * rows.block_size)
