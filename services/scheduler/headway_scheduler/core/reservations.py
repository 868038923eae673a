"""How much memory a request must find free before it starts: the reservations by name.

Owns: the arithmetic of what must be free and what is promised, and the registry.
Must not know: queues, budgets, or the block pool.

Nothing is set aside in the pool: what running requests have been promised and do not hold yet is counted as taken when
the next request asks. Numbers of tokens are places in the cache; the very last token of a request needs none.

- ``none``: the first chunk fits. Fills memory best, and preempts most when it runs out.
- ``prompt``: the whole prompt and one token fit, beside what prompts under way still need. Output is not foreseen.
- ``full``: everything up to ``max_tokens`` fits beside all that runs, so that nobody is ever preempted (Orca's
  Algorithm 1, lines 23 to 26; TensorRT-LLM's GUARANTEED_NO_EVICT).
"""

from collections.abc import Collection
from typing import Protocol

import numpy as np

from headway_scheduler.core.request import Request
from headway_scheduler.core.row_table import RowTable


class Reservation(Protocol):
    """What admission asks. ``chunk_end``: the tokens of the request that are computed after its first chunk."""

    def wanted_tokens(self, request: Request, chunk_end: int) -> int:
        """Places that must be free for ``request`` to start, those it finds in the prefix cache included."""

    def promised_tokens(self, request: Request, chunk_end: int) -> int:
        """Places that it may claim before another request starts."""

    def owed_blocks(self, rows: RowTable, prefilling: Collection[int]) -> int:
        """Blocks that the running requests have been promised and do not hold. ``prefilling``: rows in their prompt."""


class NoReservation:
    """The first chunk fits."""

    def wanted_tokens(self, request: Request, chunk_end: int) -> int:
        """The first chunk."""
        del request
        return chunk_end

    def promised_tokens(self, request: Request, chunk_end: int) -> int:
        """The first chunk."""
        del request
        return chunk_end

    def owed_blocks(self, rows: RowTable, prefilling: Collection[int]) -> int:
        """Nothing."""
        del rows, prefilling
        return 0


class PromptReservation:
    """The prompt fits, beside the prompts under way."""

    def wanted_tokens(self, request: Request, chunk_end: int) -> int:
        """One token beyond the prompt, so that the request does not stall at once."""
        del chunk_end
        return min(len(request.token_ids) + 1, request.limit - 1)

    def promised_tokens(self, request: Request, chunk_end: int) -> int:
        """The prompt."""
        del chunk_end
        return len(request.token_ids)

    def owed_blocks(self, rows: RowTable, prefilling: Collection[int]) -> int:
        """The rest of every prompt under way."""
        return sum(-(-int(rows.num_tokens[row]) // rows.block_size) - int(rows.num_blocks[row]) for row in prefilling)


class FullReservation:
    """Everything the request may ever need fits, beside everything that runs."""

    def wanted_tokens(self, request: Request, chunk_end: int) -> int:
        """Prompt and longest output."""
        del chunk_end
        return request.limit - 1

    def promised_tokens(self, request: Request, chunk_end: int) -> int:
        """Prompt and longest output."""
        del chunk_end
        return request.limit - 1

    def owed_blocks(self, rows: RowTable, prefilling: Collection[int]) -> int:
        """The rest of every running request: O(rows), only when a request wants to start."""
        del prefilling
        live = rows.live_rows()
        return int(np.sum(-(-rows.last_position[live] // rows.block_size) - rows.num_blocks[live]))


RESERVATIONS: dict[str, Reservation] = {
    "none": NoReservation(),
    "prompt": PromptReservation(),
    "full": FullReservation(),
}
