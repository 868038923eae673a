"""How many blocks the running requests will come to hold, if nobody else starts.

Owns: the arithmetic of growth. Must not know: rows, the block pool, or where the expected lengths come from.

A running request grows by one token each step and gives all its blocks back when it ends. So the demand only rises
between one end and the next, and its peak is at the moment before one of the ends. Sorted by the steps that are left,
the demand at each end is the sum over the requests that have at least as many. This is how LightLLM looks ahead (Gong et
al., "Past-Future Scheduler for LLM Serving under SLA Guarantees", ASPLOS 2025, arXiv:2507.10150: "calculating memory
occupancy at each future time point"), here in whole blocks.

The forecast is as good as the lengths it is given. With what each limit leaves instead of an expectation, it is
the worst case of every request, and still knows that those with a lower limit end before the others have grown.
A prompt under way counts as if it were computed already. A request that sits out steps grows later than foreseen.

A block that several requests share (prefix cache) counts once for each of them, which is an upper bound, unless the
caller says by ``num_shared_blocks`` how many blocks of a request are surely counted with another one.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.integer[Any]]
RealArray: TypeAlias = NDArray[np.integer[Any] | np.floating[Any]]


def peak_blocks(num_tokens: IntArray, remaining: RealArray, block_size: int) -> int:
    """The most blocks that are held at once. Arguments as in ``MemoryForecast``."""
    return MemoryForecast(num_tokens, remaining, block_size).peak_blocks


class MemoryForecast:
    """The demand for blocks in each step to come.

    ``num_tokens``, ``[n]``: places in the cache that each request takes now. ``remaining``, ``[n]``: steps that each of
    them has still to run, 0 or more, and as many further places; a part of a step counts as a whole one. After ``t`` steps
    a request with ``t`` or more remaining takes ``num_tokens + t`` places, any other none. (The very last token of
    a request needs no place: a caller who counts exactly takes one off.) ``num_shared_blocks``, ``[n]``: blocks of each
    request that another one holds too, which is counted in full and ends no sooner; none by default.

    Making one is O(n (log n + block_size)); answers are O(n) unless told otherwise.
    """

    def __init__(
        self,
        num_tokens: IntArray,
        remaining: RealArray,
        block_size: int,
        *,
        num_shared_blocks: IntArray | None = None,
    ) -> None:
        self._block_size = block_size
        steps = np.ceil(remaining).astype(np.int64)
        by_end = np.argsort(steps, kind="stable")
        # Columns ascend by the step in which a request ends. Of requests that end together, the first one's demand is
        # that of them all; the others' is less, which no maximum notices.
        self._ends = steps[by_end]
        self._num_tokens = np.asarray(num_tokens, dtype=np.int64)[by_end]
        self._num_shared = np.zeros(len(steps), dtype=np.int64)
        if num_shared_blocks is not None:
            self._num_shared[:] = num_shared_blocks[by_end]
        self._demand = self._demand_at_ends()

    @property
    def peak_blocks(self) -> int:
        """The most blocks that are held at once."""
        return int(self._demand.max(initial=0))

    def peak_with(self, num_tokens: int, remaining: float, *, num_shared_blocks: int = 0) -> int:
        """The most blocks that are held at once if one more request starts now."""
        end = int(np.ceil(remaining))
        first = int(self._ends.searchsorted(end))
        # Ends before its own see it growing; at its own it stands beside those that go on; later ones never meet it.
        beside = self._demand[:first] + self._blocks(num_tokens + self._ends[:first])
        at_its_end = self._demand_at(end) - num_shared_blocks + int(self._blocks(num_tokens + end))
        later = int(self._demand[first:].max(initial=0))
        return max(int(beside.max(initial=0)) - num_shared_blocks, at_its_end, later)

    def add(self, num_tokens: int, remaining: float, *, num_shared_blocks: int = 0) -> None:
        """Take one more request in, so that further ones are asked about beside it."""
        end = int(np.ceil(remaining))
        first = int(self._ends.searchsorted(end))
        at_its_end = self._demand_at(end) - num_shared_blocks + int(self._blocks(num_tokens + end))
        self._demand[:first] += self._blocks(num_tokens + self._ends[:first]) - num_shared_blocks
        self._demand = _with_one_more(self._demand, first, at_its_end)
        self._ends = _with_one_more(self._ends, first, end)
        self._num_tokens = _with_one_more(self._num_tokens, first, num_tokens)
        self._num_shared = _with_one_more(self._num_shared, first, num_shared_blocks)

    def steps_until(self, num_blocks: int) -> int | None:
        """After how many steps the demand is first more than ``num_blocks``: 0 if it is now, None if it never is.

        O(n log s), s being the steps between two ends.
        """
        exceeding = self._demand > num_blocks
        if not exceeding.any():
            return None
        first = int(exceeding.argmax())
        # Up to this end and after the one before, demand only rises.
        low, high = int(self._ends[first - 1]) + 1 if first else 0, int(self._ends[first])
        while low < high:
            middle = (low + high) // 2
            if self._demand_at(middle) > num_blocks:
                high = middle
            else:
                low = middle + 1
        return low

    def _blocks(self, num_tokens: NDArray[np.int64] | int) -> NDArray[np.int64]:
        return np.asarray(-(-num_tokens // self._block_size))

    def _demand_at(self, step: int) -> int:
        """Blocks held after ``step`` steps."""
        first = int(self._ends.searchsorted(step))
        return int(np.sum(self._blocks(self._num_tokens[first:] + step) - self._num_shared[first:]))

    def _demand_at_ends(self) -> NDArray[np.int64]:
        """Blocks held before each end, by those that end no sooner.

        With ``n = size * a + u`` and ``t = size * c + v``, a request of ``n`` tokens holds ``a + c`` blocks after ``t``
        steps, one more if ``u + v > 0``, and another if ``u + v > size``. Only the last two depend on both; they are
        read off counts of how many, from each request on, have at least a given ``u``.
        """
        size, num_requests = self._block_size, len(self._ends)
        if not num_requests:
            return np.zeros(0, dtype=np.int64)
        whole, rest = np.divmod(self._num_tokens, size)
        step_blocks, step_rest = np.divmod(self._ends, size)
        num_going_on = np.arange(num_requests, 0, -1)
        reaches = rest >= np.arange(size + 2)[:, None]
        num_reaching = np.cumsum(reaches[:, ::-1], axis=1)[:, ::-1]
        each = np.arange(num_requests)
        own = np.cumsum((whole - self._num_shared)[::-1])[::-1]
        one_more = num_reaching[np.maximum(1 - step_rest, 0), each]
        another = num_reaching[size + 1 - step_rest, each]
        demand: NDArray[np.int64] = own + num_going_on * step_blocks + one_more + another
        return demand


def _with_one_more(column: NDArray[np.int64], place: int, value: int) -> NDArray[np.int64]:
    """A copy of ``column`` with ``value`` before ``place``; ``np.insert`` takes four times as long."""
    longer = np.empty(len(column) + 1, dtype=np.int64)
    longer[:place] = column[:place]
    longer[place] = value
    longer[place + 1 :] = column[place:]
    return longer
