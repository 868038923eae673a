"""Forecasts the blocks of the running requests if no other request starts.

Owns: the arithmetic of growth. Must not know: where the chances come from.

After ``t`` steps a request holds ``blocks(num_tokens + t)`` with the probability that it still runs, otherwise nothing.
Requests end independently, so means and variances add up, and the sum is nearly always below its mean plus ``MARGIN``
standard deviations. For the next ``block_size`` steps averages say little, so each request gets one more block.

LightLLM asks the same question (Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees", ASPLOS 2025,
arXiv:2507.10150), but puts one length in place of each distribution. With heavy tails that predicts a peak which never
comes, because half of the requests end long before their mean.

A prompt under way counts as computed, a shared block for each of its requests.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.integer[Any]]
FloatArray: TypeAlias = NDArray[np.float64]

MARGIN = 1.5
"""Standard deviations of the demand that stay free above its mean."""


def horizons(block_size: int, max_tokens: int) -> NDArray[np.int64]:
    """The steps to look at, one or more: int64 ``[m]``, ascending multiples of ``block_size``."""
    most = max(max_tokens // block_size, 1)
    octaves = 2 ** np.arange(most.bit_length(), dtype=np.int64)
    blocks = np.union1d(octaves, octaves * 3 // 2)
    return blocks[blocks <= most] * block_size


class MemoryForecast:
    """The demand for blocks after each of ``horizons``.

    Chances, float64 ``[n, m]`` or ``[m]``, are the probabilities that a request still runs at each horizon: multiples
    of 1 / 1024, so that sums are exact in any order. With chances of 0 a request keeps its present blocks.
    """

    def __init__(self, block_size: int, horizons: NDArray[np.int64]) -> None:
        self._block_size = block_size
        self._horizons = horizons
        self._growth = (horizons // block_size).astype(np.float64)
        self._num_soon = 0
        """Blocks after the next ``block_size`` steps if no request ends."""
        self._mean = np.zeros(len(horizons))
        self._variance = np.zeros(len(horizons))

    def add_all(self, num_tokens: IntArray, chances: FloatArray) -> None:
        """Add requests with ``num_tokens`` cached tokens, ``[n]``; O(n m)."""
        held = self._blocks(num_tokens).astype(np.float64)
        powers = np.stack((np.ones_like(held), held, held * held))
        likely, squared = powers @ chances, powers @ (chances * chances)
        self._num_soon += int(held.sum()) + int(np.count_nonzero(chances[:, 0]))
        self._mean += self._moment(likely[:2])
        self._variance += self._second_moment(likely) - self._second_moment(squared)

    def add(self, num_tokens: int, chances: FloatArray) -> None:
        """Add one request."""
        mean, variance = self._demand_of(num_tokens, chances)
        self._num_soon += int(self._blocks(num_tokens)) + int(chances[0] > 0)
        self._mean = self._mean + mean
        self._variance = self._variance + variance

    def peak_with(self, num_tokens: int, chances: FloatArray) -> int:
        """The largest demand if a request of ``num_tokens`` tokens starts now."""
        mean, variance = self._demand_of(num_tokens, chances)
        soon = self._num_soon + (int(self._blocks(num_tokens)) + 1 if chances[0] else int(self._blocks(num_tokens + 1)))
        demand = _demand(self._mean + mean, self._variance + variance)
        return max(soon, int(np.ceil(demand.max(initial=0.0))))

    def steps_until(self, num_blocks: int) -> int | None:
        """Steps until demand may exceed ``num_blocks``; None for probably never."""
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
        moment: FloatArray = likely[1] + self._growth * likely[0]
        return moment

    def _second_moment(self, likely: FloatArray) -> FloatArray:
        moment: FloatArray = likely[2] + self._growth * (2.0 * likely[1] + self._growth * likely[0])
        return moment


def _demand(mean: FloatArray, variance: FloatArray) -> FloatArray:
    demand: FloatArray = mean + MARGIN * np.sqrt(variance)
    return demand
