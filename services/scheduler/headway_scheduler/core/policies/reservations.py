"""How much memory a request must find free before it starts: the reservations by name.

Owns: the arithmetic of what must be free and what is promised, and the registry.
Must not know: queues, budgets, or the block pool.

Nothing is set aside in the pool: what running requests have been promised and do not hold yet is counted as taken when
the next request asks. Numbers of tokens are places in the cache; the very last token of a request needs none.

- ``none``: the first chunk fits. Fills memory best, and preempts most when it runs out.
- ``prompt``: the whole prompt and one token fit, beside what prompts under way still need. Output is not foreseen.
- ``full``: everything up to ``max_tokens`` fits beside all that runs, so that nobody is ever preempted (Orca's
  Algorithm 1, lines 23 to 26; TensorRT-LLM's GUARANTEED_NO_EVICT).
- ``predicted``: the most that all will probably hold at once fits, by the chances that each of them still runs
  (``output_lengths``, ``memory_forecast``). Of whom nothing can be expected yet, one token is, as with ``prompt``.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from headway_scheduler.core.memory.memory_forecast import MemoryForecast
from headway_scheduler.core.memory.row_table import RowTable
from headway_scheduler.core.policies.output_lengths import FloatArray, OutputLengths
from headway_scheduler.core.state.request import Request


class PoolState(NamedTuple):
    """The block pool when books are opened: all its blocks, and those that can be had now or come back after a step."""

    num_blocks: int
    num_unused: int


STEPS_BETWEEN_FORECASTS = 2
"""A forecast costs time. With more steps, requests would start in bunches, and decodes would wait for them."""

AskPool: TypeAlias = Callable[[], PoolState]


class Books(Protocol):
    """What is promised while requests are let in, one after the other."""

    owed_blocks: int
    """Free blocks that nobody else may take."""
    retry_after_steps: int
    """For so many steps after a refusal the answer is not worth working out again."""

    def num_missing(self, request: Request, chunk_end: int, num_shared: int, num_free: int) -> int:
        """Blocks that are missing for ``request`` to start; 0 or less: it fits.

        ``chunk_end``: its tokens that are computed after its first chunk. ``num_shared`` blocks it finds in the prefix cache;
        ``num_free`` are free beside them.
        """

    def num_needed(self, request: Request, chunk_end: int) -> int:
        """Blocks that it must find, without the prefix cache; for operators."""

    def note_start(self, request: Request, chunk_end: int, num_held: int) -> None:
        """It has started and holds so many blocks."""


class Reservation(Protocol):
    """Opens the books. ``predicts``: they ask for predicted outputs, so these must be learned."""

    @property
    def predicts(self) -> bool: ...  # noqa: D102 - told above

    def open_books(self, rows: RowTable, prefilling: Collection[int], lengths: OutputLengths, pool: AskPool) -> Books:
        """What is promised to those that run. ``prefilling``: rows in their prompt. Asking the pool costs something."""


class PromisedBlocks:
    """Books that add up: what each request has been promised, less what it holds."""

    retry_after_steps = 0

    def __init__(self, block_size: int, owed_blocks: int, *, wants_prompt: bool, wants_all: bool) -> None:
        self.owed_blocks = owed_blocks
        self._block_size = block_size
        self._wants_prompt = wants_prompt
        self._wants_all = wants_all

    def num_missing(self, request: Request, chunk_end: int, num_shared: int, num_free: int) -> int:
        """Blocks that are missing for ``request`` to start."""
        return self.num_needed(request, chunk_end) - num_shared - (num_free - self.owed_blocks)

    def num_needed(self, request: Request, chunk_end: int) -> int:
        """Its first chunk, its prompt and a token so that it does not stall at once, or all."""
        if self._wants_all:
            num_tokens = request.limit - 1
        elif self._wants_prompt:
            num_tokens = min(len(request.token_ids) + 1, request.limit - 1)
        else:
            num_tokens = chunk_end
        return -(-num_tokens // self._block_size)

    def note_start(self, request: Request, chunk_end: int, num_held: int) -> None:
        """What it may claim before another starts: its first chunk, its prompt, or all."""
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
        """Nothing is owed."""
        del prefilling, lengths, pool
        return PromisedBlocks(rows.block_size, 0, wants_prompt=False, wants_all=False)


class PromptReservation:
    """The prompt fits, beside the prompts under way."""

    predicts = False

    def open_books(self, rows: RowTable, prefilling: Collection[int], lengths: OutputLengths, pool: AskPool) -> Books:
        """The rest of every prompt under way is owed."""
        del lengths, pool
        owed = sum(-(-int(rows.num_tokens[row]) // rows.block_size) - int(rows.num_blocks[row]) for row in prefilling)
        return PromisedBlocks(rows.block_size, owed, wants_prompt=True, wants_all=False)


class FullReservation:
    """Everything the request may ever need fits, beside everything that runs."""

    predicts = False

    def open_books(self, rows: RowTable, prefilling: Collection[int], lengths: OutputLengths, pool: AskPool) -> Books:
        """The rest of every running request is owed: O(rows), only when a request wants to start."""
        del prefilling, lengths, pool
        live = rows.live_rows()
        owed = int(np.sum(-(-rows.last_position[live] // rows.block_size) - rows.num_blocks[live]))
        return PromisedBlocks(rows.block_size, owed, wants_prompt=False, wants_all=True)


class ForeseenBlocks:
    """Books that look ahead: the most blocks that all will probably hold at once."""

    owed_blocks = 0
    retry_after_steps = STEPS_BETWEEN_FORECASTS

    def __init__(self, rows: RowTable, lengths: OutputLengths, pool: PoolState) -> None:
        live = rows.live_rows()
        self._block_size = rows.block_size
        self._lengths = lengths
        self._horizons = rows.horizons
        self._num_running = len(live)
        self._num_unused = pool.num_unused
        # Blocks that several rows share are counted once for each, as are all of the forecast: so much more is usable.
        num_counted_again = int(rows.num_blocks[live].sum()) - (pool.num_blocks - pool.num_unused)
        self._num_usable = pool.num_blocks + max(num_counted_again, 0)
        self._asked: Request | None = None
        self._chances = np.zeros(0)
        """Of the request that was asked about last."""
        self._forecast = MemoryForecast(rows.block_size, self._horizons)
        num_tokens, num_prompt_tokens = rows.num_tokens[live], rows.num_prompt_tokens[live]
        limits = rows.last_position[live] + 1 - num_prompt_tokens
        chances = lengths.chances_to_go_on(rows.curve[live], num_tokens - num_prompt_tokens, limits, self._horizons)
        self._forecast.add_all(num_tokens, chances)

    def num_missing(self, request: Request, chunk_end: int, num_shared: int, num_free: int) -> int:
        """Blocks by which the peak with ``request`` exceeds the pool, or that its first chunk lacks now if those are more."""
        missing_now = -(-chunk_end // self._block_size) - num_shared - num_free
        return max(self._num_beyond(request) - num_shared, missing_now)

    def num_needed(self, request: Request, chunk_end: int) -> int:
        """What must be free now so that the peak fits later."""
        return max(self._num_beyond(request) + self._num_unused, -(-chunk_end // self._block_size))

    def note_start(self, request: Request, chunk_end: int, num_held: int) -> None:
        """It grows with the others from now on."""
        del chunk_end, num_held
        self._num_running += 1
        self._forecast.add(len(request.token_ids), self._chances_of(request))

    def steps_until_shortage(self) -> int | None:
        """After about how many steps those that run will probably want more than there is; None if they never will."""
        return self._forecast.steps_until(self._num_usable)

    def _num_beyond(self, request: Request) -> int:
        """Blocks by which the peak with ``request`` exceeds the pool. Beside nobody, everything that is accepted fits."""
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
    """The most that all will probably hold at once fits."""

    predicts = True

    def open_books(self, rows: RowTable, prefilling: Collection[int], lengths: OutputLengths, pool: AskPool) -> Books:
        """Look ahead: O(rows), only when a request wants to start."""
        del prefilling
        return ForeseenBlocks(rows, lengths, pool())


RESERVATIONS: dict[str, Reservation] = {
    "none": NoReservation(),
    "prompt": PromptReservation(),
    "full": FullReservation(),
    "predicted": PredictedReservation(),
}
