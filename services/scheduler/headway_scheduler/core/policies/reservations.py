"""The reservations by name: how many blocks a request must find free to start.

Owns: this arithmetic and the registry. Must not know: queues, budgets, or the block pool.

Nothing is set aside: promised blocks that running requests do not hold yet count as taken. A request's very last token
needs no place in the cache.

- ``none``: the first chunk fits. This fills memory best and preempts most.
- ``prompt``: the whole prompt and one token fit, beside the rest of running prompts.
- ``full``: everything up to ``max_tokens`` fits, so no request is preempted (Orca's Algorithm 1, lines 23 to 26;
  TensorRT-LLM's GUARANTEED_NO_EVICT).
- ``predicted``: the probable peak of all requests fits (``output_lengths``, ``memory_forecast``). Of an unknown request
  one token is expected.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from headway_scheduler.core.memory.memory_forecast import MemoryForecast
from headway_scheduler.core.memory.row_table import RowTable
from headway_scheduler.core.policies.output_lengths import FloatArray, OutputLengths
from headway_scheduler.core.state.request import Request


class PoolState(NamedTuple):
    """All blocks, and those free now or after a step."""

    num_blocks: int
    num_unused: int


STEPS_BETWEEN_FORECASTS = 2
"""A forecast costs time. With more steps, requests would start in bunches, and decodes would wait for them."""

AskPool: TypeAlias = Callable[[], PoolState]


class Books(Protocol):
    """The promises while requests start one after another."""

    owed_blocks: int
    """Free blocks that are promised to running requests."""
    retry_after_steps: int
    """For so many steps after a refusal it is not worth asking again."""

    def num_missing(self, request: Request, chunk_end: int, num_shared: int, num_free: int) -> int:
        """Return the blocks that ``request`` lacks; 0 or less: it fits.

        ``chunk_end``: its computed tokens after the first chunk. ``num_shared``: its cached blocks. ``num_free``: free
        blocks beside them.
        """

    def num_needed(self, request: Request, chunk_end: int) -> int:
        """Return its blocks without the prefix cache, for operators."""

    def record_start(self, request: Request, chunk_end: int, num_held: int) -> None:
        """Record a start with so many blocks."""


class Reservation(Protocol):
    """``predicts``: its books use predicted outputs, so they must be learned."""

    @property
    def predicts(self) -> bool: ...

    def open_books(self, rows: RowTable, prefilling: Collection[int], lengths: OutputLengths, pool: AskPool) -> Books:
        """Promise blocks to running requests. ``prefilling``: rows in their prompt. Asking ``pool`` costs time."""


class PromisedBlocks:
    """Books that add up what is promised and not held yet."""

    retry_after_steps = 0

    def __init__(self, block_size: int, owed_blocks: int, *, wants_prompt: bool, wants_all: bool) -> None:
        self.owed_blocks = owed_blocks
        self._block_size = block_size
        self._wants_prompt = wants_prompt
        self._wants_all = wants_all

    def num_missing(self, request: Request, chunk_end: int, num_shared: int, num_free: int) -> int:
        return self.num_needed(request, chunk_end) - num_shared - (num_free - self.owed_blocks)

    def num_needed(self, request: Request, chunk_end: int) -> int:
        """With its next token, so that it does not stall at once."""
        if self._wants_all:
            num_tokens = request.limit - 1
        elif self._wants_prompt:
            num_tokens = min(len(request.token_ids) + 1, request.limit - 1)
        else:
            num_tokens = chunk_end
        return -(-num_tokens // self._block_size)

    def record_start(self, request: Request, chunk_end: int, num_held: int) -> None:
        if self._wants_all:
            num_promised = request.limit - 1
        elif self._wants_prompt:
            num_promised = len(request.token_ids)
        else:
            num_promised = chunk_end
        self.owed_blocks += -(-num_promised // self._block_size) - num_held


class NoReservation:
    """The first chunk fits."""

    predicts = False

    def open_books(self, rows: RowTable, prefilling: Collection[int], lengths: OutputLengths, pool: AskPool) -> Books:
        del prefilling, lengths, pool
        return PromisedBlocks(rows.block_size, 0, wants_prompt=False, wants_all=False)


class PromptReservation:
    """The prompt fits beside running prompts."""

    predicts = False

    def open_books(self, rows: RowTable, prefilling: Collection[int], lengths: OutputLengths, pool: AskPool) -> Books:
        del lengths, pool
        owed = sum(-(-int(rows.num_tokens[row]) // rows.block_size) - int(rows.num_blocks[row]) for row in prefilling)
        return PromisedBlocks(rows.block_size, owed, wants_prompt=True, wants_all=False)


class FullReservation:
    """Everything fits beside all running requests."""

    predicts = False

    def open_books(self, rows: RowTable, prefilling: Collection[int], lengths: OutputLengths, pool: AskPool) -> Books:
        """O(rows)."""
        del prefilling, lengths, pool
        live = rows.live_rows()
        owed = int(np.sum(-(-rows.last_position[live] // rows.block_size) - rows.num_blocks[live]))
        return PromisedBlocks(rows.block_size, owed, wants_prompt=False, wants_all=True)


class ForeseenBlocks:
    """Books that forecast the most blocks held at once."""

    owed_blocks = 0
    retry_after_steps = STEPS_BETWEEN_FORECASTS

    def __init__(self, rows: RowTable, lengths: OutputLengths, pool: PoolState) -> None:
        live = rows.live_rows()
        self._block_size = rows.block_size
        self._lengths = lengths
        self._horizons = rows.horizons
        self._num_running = len(live)
        self._num_unused = pool.num_unused
        # The forecast counts a shared block once for each row, so the pool counts it as often.
        num_counted_again = int(rows.num_blocks[live].sum()) - (pool.num_blocks - pool.num_unused)
        self._num_usable = pool.num_blocks + max(num_counted_again, 0)
        self._asked: Request | None = None
        self._chances = np.zeros(0)
        """Chances of the request asked about last."""
        self._forecast = MemoryForecast(rows.block_size, self._horizons)
        num_tokens, num_prompt_tokens = rows.num_tokens[live], rows.num_prompt_tokens[live]
        limits = rows.last_position[live] + 1 - num_prompt_tokens
        chances = lengths.chances_to_go_on(rows.curve[live], num_tokens - num_prompt_tokens, limits, self._horizons)
        self._forecast.add_all(num_tokens, chances)

    def num_missing(self, request: Request, chunk_end: int, num_shared: int, num_free: int) -> int:
        """Its peak and its first chunk must both fit."""
        missing_now = -(-chunk_end // self._block_size) - num_shared - num_free
        return max(self._num_beyond(request) - num_shared, missing_now)

    def num_needed(self, request: Request, chunk_end: int) -> int:
        return max(self._num_beyond(request) + self._num_unused, -(-chunk_end // self._block_size))

    def record_start(self, request: Request, chunk_end: int, num_held: int) -> None:
        del chunk_end, num_held
        self._num_running += 1
        self._forecast.add(len(request.token_ids), self._chances_of(request))

    def steps_until_shortage(self) -> int | None:
        """Return the steps until running requests probably lack blocks; None: never."""
        return self._forecast.steps_until(self._num_usable)

    def _num_beyond(self, request: Request) -> int:
        """Alone, every accepted request fits."""
        if not self._num_running:
            return -self._num_usable
        return self._forecast.peak_with(len(request.token_ids), self._chances_of(request)) - self._num_usable

    def _chances_of(self, request: Request) -> FloatArray:
        if self._asked is not request:
            columns = [[request.curve], [len(request.token_ids)], [request.limit]]
            curves, num_tokens, limits = np.array(columns, dtype=np.int64)
            prompt = request.new.num_prompt_tokens
            self._chances = self._lengths.chances_to_go_on(
                curves, num_tokens - prompt, limits - prompt, self._horizons
            )[0]
            self._asked = request
        return self._chances


class PredictedReservation:
    """The probable peak fits."""

    predicts = True

    def open_books(self, rows: RowTable, prefilling: Collection[int], lengths: OutputLengths, pool: AskPool) -> Books:
        """O(rows)."""
        del prefilling
        return ForeseenBlocks(rows, lengths, pool())


RESERVATIONS: dict[str, Reservation] = {
    "none": NoReservation(),
    "prompt": PromptReservation(),
    "full": FullReservation(),
    "predicted": PredictedReservation(),
}
