"""How many blocks the running requests will probably hold in the steps to come, if nobody else starts.

Owns: the arithmetic of growth. Must not know: rows, the block pool, or where the chances come from.

A running request grows by one token each step and gives all its blocks back when it ends, and when that will be is a
matter of chance. After ``t`` steps it holds ``blocks(num_tokens + t)`` with the probability that it still runs, and none
otherwise. Requests end independently of each other, so means and variances add up, and the sum of many is close to a
normal variable: it is below its mean and ``MARGIN`` standard deviations nearly always. Beside that there is always a block
for each, so that the next ``block_size`` steps can be run even if nobody ends in them: so soon, chance is no average yet.

This is the question of LightLLM's scheduler ("calculating memory occupancy at each future time point"; Gong et al.,
"Past-Future Scheduler for LLM Serving under SLA Guarantees", ASPLOS 2025, arXiv:2507.10150) with another answer. To
put one expected or sampled length in the place of each distribution makes all requests grow until their mean is
reached, while in truth half of them are gone long before: with heavy tails that foresees a peak which never comes, and
keeps out requests that would fit. And a single number cannot say how far off it may be.

Demand is looked at in some steps only, two to an octave, in multiples of the block size. A prompt under way counts as if it
were computed already. A request that sits out steps grows later than foreseen. A block that several requests share
(prefix cache) counts once for each of them, which is an upper bound.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.integer[Any]]
FloatArray: TypeAlias = NDArray[np.float64]

MARGIN = 1.5
"""Standard deviations of the demand that are kept free beside its mean."""


def horizons(block_size: int, max_tokens: int) -> NDArray[np.int64]:
    """The steps after which demand is looked at, ascending, int64 ``[m]``: multiples of ``block_size`` below ``max_tokens``.

    There is at least one.
    """
    most = max(max_tokens // block_size, 1)
    octaves = 2 ** np.arange(most.bit_length(), dtype=np.int64)
    blocks = np.union1d(octaves, octaves * 3 // 2)
    return blocks[blocks <= most] * block_size


class MemoryForecast:
    """The demand for blocks after each of ``horizons``, int64 ``[m]``, multiples of ``block_size``.

    Begins with nobody; ``add`` whoever runs. Chances are float64 ``[n, m]`` or ``[m]``: the probability that a request still
    runs after so many steps, a multiple of 1 / 1024, so that all sums are exact and do not depend on the order of additions.
    With chances of 0, a request counts with what it holds now.
    """

    def __init__(self, block_size: int, horizons: NDArray[np.int64]) -> None:
        self._block_size = block_size
        self._horizons = horizons
        self._growth = (horizons // block_size).astype(np.float64)
        self._num_soon = 0
        """Blocks that all hold after the next ``block_size`` steps if nobody ends; now, of those who have no chances at all."""
        self._mean = np.zeros(len(horizons))
        self._variance = np.zeros(len(horizons))

    def add_all(self, num_tokens: IntArray, chances: FloatArray) -> None:
        """Take in requests that hold ``num_tokens`` places in the cache, ``[n]``; O(n m)."""
        held = self._blocks(num_tokens).astype(np.float64)
        powers = np.stack((np.ones_like(held), held, held * held))
        likely, squared = powers @ chances, powers @ (chances * chances)
        self._num_soon += int(held.sum()) + int(np.count_nonzero(chances[:, 0]))
        self._mean += self._moment(likely[:2])
        self._variance += self._second_moment(likely) - self._second_moment(squared)

    def add(self, num_tokens: int, chances: FloatArray) -> None:
        """Take in one more request."""
        mean, variance = self._demand_of(num_tokens, chances)
        self._num_soon += int(self._blocks(num_tokens)) + int(chances[0] > 0)
        self._mean = self._mean + mean
        self._variance = self._variance + variance

    def peak_with(self, num_tokens: int, chances: FloatArray) -> int:
        """What will probably do for all, now and later, if one more request starts now.

        It finds room for ``num_tokens`` tokens and the next.
        """
        mean, variance = self._demand_of(num_tokens, chances)
        soon = self._num_soon + (int(self._blocks(num_tokens)) + 1 if chances[0] else int(self._blocks(num_tokens + 1)))
        demand = _demand(self._mean + mean, self._variance + variance)
        return max(soon, int(np.ceil(demand.max(initial=0.0))))

    def steps_until(self, num_blocks: int) -> int | None:
        """After about how many steps the demand may exceed ``num_blocks``: 0 for at once, None if it probably never will."""
        if self._num_soon > num_blocks:
            return 0
        demand = _demand(self._mean, self._variance)
        exceeding = (demand > num_blocks).nonzero()[0]
        if not len(exceeding):
            return None
        first = int(exceeding[0])
        before, start = (float(demand[first - 1]), int(self._horizons[first - 1])) if first else (self._num_soon, 0)
        share = (num_blocks - before) / (float(demand[first]) - before)
        return start + int(share * (int(self._horizons[first]) - start))

    def _blocks(self, num_tokens: IntArray | int) -> NDArray[np.int64]:
        return np.asarray(-(-num_tokens // self._block_size))

    def _demand_of(self, num_tokens: int, chances: FloatArray) -> tuple[FloatArray, FloatArray]:
        blocks = int(self._blocks(num_tokens)) + self._growth
        mean = chances * blocks
        return mean, mean * (blocks - mean)

    def _moment(self, likely: FloatArray) -> FloatArray:
        """Of the blocks after each horizon, given the sums of chances and of chances times the blocks that are held now."""
        moment: FloatArray = likely[1] + self._growth * likely[0]
        return moment

    def _second_moment(self, likely: FloatArray) -> FloatArray:
        moment: FloatArray = likely[2] + self._growth * (2.0 * likely[1] + self._growth * likely[0])
        return moment


def _demand(mean: FloatArray, variance: FloatArray) -> FloatArray:
    demand: FloatArray = mean + MARGIN * np.sqrt(variance)
    return demand
