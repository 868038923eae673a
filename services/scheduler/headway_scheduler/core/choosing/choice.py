"""Which of several cells gets a request.

Owns: the cells that could start it, and the choice of one. Must not know: the queue, or which request is next.

A request goes to the cell with the shortest predicted time to its first token. Of cells that are level, it goes where
the fewest requests are. All this is asked of every cell for every request that is placed, so it is compiled with the core.
"""

from collections.abc import Sequence
from typing import NamedTuple

from headway_scheduler.core.choosing.cell_load import CellLoad
from headway_scheduler.core.choosing.policies import PlacementPolicy
from headway_scheduler.core.memory.cached_prefixes import PrefixQuery
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.request import Request

LEAST_ERROR, MOST_ERROR = 0.1, 0.5
"""Predicted times that differ by a smaller share are level; the models' own error counts between these bounds."""


class Choice(NamedTuple):
    """A cell, and why: in tokens of the request that are cached there, and tokens to compute before it."""

    cell: CellLoad
    num_cached_tokens: int
    num_tokens_ahead: int


def has_preempted(cores: list[Scheduler]) -> bool:
    """Whether a request that lost its row waits in any of them."""
    return any(core.num_preempted for core in cores)


def able_cells(request: Request, cells: Sequence[CellLoad]) -> list[CellLoad]:
    """The cells whose executor could ever run this request."""
    able: list[CellLoad] = []
    kind, is_able = -1, False
    for cell in cells:
        if cell.kind != kind or kind < 0:
            kind, is_able = cell.kind, cell.can_hold(request)
        if is_able:
            able.append(cell)
    return able


def accepting_cells(request: Request, able: Sequence[CellLoad], policy: PlacementPolicy) -> Sequence[CellLoad]:
    """Of cells that are able, those that may get it."""
    return policy.cells_for(request, [cell for cell in able if cell.accepts])


def cells_with_room(request: Request, accepting: Sequence[CellLoad]) -> list[CellLoad]:
    """Those that could start it soon."""
    return [cell for cell in accepting if cell.has_room_for(request)]


def best_of(request: Request, choices: Sequence[CellLoad], policy: PlacementPolicy, query: PrefixQuery) -> Choice:
    """The best of ``choices``, at least one."""
    cached: list[int] = []
    waits: list[float] = []
    error = LEAST_ERROR
    for cell in choices:
        error = max(error, cell.relative_error)
        num_cached_tokens = cell.num_cached_tokens(query)
        num_tokens = cell.num_tokens_ahead + len(request.token_ids) - num_cached_tokens
        cached.append(num_cached_tokens)
        wait = cell.prefill_s(num_tokens, num_cached_tokens)
        if wait is not None:
            waits.append(wait)
    if len(waits) < len(choices):
        waits = _waits_without_speed(len(request.token_ids), choices, cached)
    # Predictions that differ by less than they err are level: then it goes where the fewest
    # requests are. Those that wait count, too: where prompts cost next to nothing, all that come at once would go to one
    # cell.
    level = min(waits) * (1.0 + min(error, MOST_ERROR))
    best, best_rank = -1, (True, 0, 0)
    for place, wait_s in enumerate(waits):
        if wait_s <= level:
            cell = choices[place]
            rank = (policy.is_misplaced(request, cell), cell.num_here, cell.number)
            if best < 0 or rank < best_rank:
                best, best_rank = place, rank
    return Choice(choices[best], cached[best], choices[best].num_tokens_ahead)


def _waits_without_speed(num_known: int, choices: Sequence[CellLoad], cached: list[int]) -> list[float]:
    """Where a cell has not learned its speed: it is taken to be as fast as another. If none has, tokens count.

    Were only tokens compared, one that has just joined would get nothing while others have the prompts in their caches,
    however many requests run there, and would never learn.
    """
    tokens = [cell.num_tokens_ahead + num_known - num for cell, num in zip(choices, cached, strict=True)]
    waits: list[float] = []
    for cell, num_tokens, num in zip(choices, tokens, cached, strict=True):
        wait = cell.prefill_s(num_tokens, num)
        for other in choices:
            wait = other.idle_prefill_s(num_tokens, num) if wait is None else wait
        if wait is None:
            return [float(num_tokens) for num_tokens in tokens]
        waits.append(wait)
    return waits
