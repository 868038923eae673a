"""Why a request waits, as a sentence with figures.

Owns: the words. Must not know: how ``core.admission`` decided.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from headway_proto.wording import shown
from headway_scheduler.core.admission.refusals import Reason
from headway_scheduler.core.choosing.cell_load import CellLoad, Lack
from headway_scheduler.core.choosing.policies import PlacementPolicy, has_role
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.request import Request
from headway_scheduler.placement.placement import Placed

MOST_NAMED = 8
"""Executors that a sentence names."""

_WITHOUT_FIGURES: Mapping[Reason, str] = MappingProxyType(
    {
        Reason.PAUSED: "admission is paused",
        Reason.LOSS: "an executor was lost, and its requests start again a few at a time",
        Reason.PREFIX: "another request is computing the beginning of its prompt, which it will share",
        Reason.OBJECTIVE: "with one more, running requests would miss their inter-token objective",
    }
)


def sentence_for(core: Scheduler, request: Request) -> str:
    """Put admission's reason into words."""
    # Admission notes it with its next attempt.
    reason = Reason.PAUSED if core.paused else core.admission.reason_for(request)
    match reason:
        case Reason.ALONE if core.alone is not None:
            return f"{shown(core.alone.new.request_id)} runs alone, because executors were lost while it ran"
        case Reason.ROWS if core.max_running == core.limits.max_num_seqs:
            return f"max_num_seqs = {core.max_running} requests are running"
        case Reason.ROWS:
            return f"{core.max_running} requests are running, as many as the token budget or the executor's rows allow"
        case Reason.ADAPTERS:
            return f"requests with max_adapters = {core.limits.max_adapters} other adapters are running"
        case Reason.BATCH:
            return f"batching is {core.limits.batching}, and the batch that runs has to end first"
        case Reason.BLOCKS:
            return _blocks_missing(core, request)
    if reason in _WITHOUT_FIGURES:
        return _WITHOUT_FIGURES[reason]
    return f"the budget of {core.max_num_batched_tokens} tokens per step is taken, or it is next"


def sentence_for_unplaced(
    request: Request, cells: Sequence[CellLoad], policy: PlacementPolicy, *, is_paused: bool
) -> str:
    """Why placement gives a request to none of these cells, at least one."""
    if is_paused:
        return "admission is paused"
    allowed = policy.cells_for(request, [cell for cell in cells if cell.can_hold(request) and cell.accepts])
    reasons = "; ".join(
        f"executor {cell.number} {_why_not_there(request, cell, allowed)}" for cell in cells[:MOST_NAMED]
    )
    num_more = len(cells) - MOST_NAMED
    return reasons if num_more <= 0 else f"{reasons}; and {num_more} more executors"


def sentence_for_placed(placed: Placed) -> str:
    """Why placement chose its executor."""
    if placed.num_choices < 2:
        return f"Executor {placed.cell} was the only one that could start it soon."
    return (
        f"Of {placed.num_choices} executors that could start it soon, number {placed.cell} was expected to be first: it "
        f"had {placed.num_cached_tokens} of its tokens in the prefix cache and {placed.num_tokens_ahead} tokens to compute "
        "before it."
    )


def sentence_for_move(request: Request, placed: Placed | None, keeper: int) -> str:
    """What becomes of a request that changes executors, behind a space; "" if it does not.

    ``keeper``: the executor that keeps its blocks on the host; negative if that need not be said.
    """
    if request.stored is not None:
        whose = f"executor {keeper}" if keeper >= 0 else "the executor that had it"
        return f" {request.stored.num_tokens} of its tokens are computed and kept in the host pool of {whose}."
    if request.is_leaving:
        after = "with its first token" if placed is not None and placed.leaves else "after its next token"
        return f" It leaves this executor {after}, and goes on elsewhere."
    if placed is not None and placed.leaves:
        return " It was to leave behind its prompt, and stays: there was no room for its blocks where others can read."
    return ""


def _why_not_there(request: Request, cell: CellLoad, allowed: Sequence[CellLoad]) -> str:
    if not cell.can_hold(request):
        return f"cannot run its {len(request.token_ids)} tokens"
    if not cell.accepts:
        return "is draining"
    if cell not in allowed:
        return "could not keep inter-token objectives" if has_role(request, cell) else f"has the role {cell.role}"
    shortage = cell.shortage_for(request)
    if shortage is None:
        return "has room, and it starts there when its turn comes"
    match shortage.lack:
        case Lack.ROWS:
            return f"has {shortage.num_needed - 1} requests in {shortage.num_there} rows"
        case Lack.TOKENS:
            waiting = shortage.num_needed - len(request.token_ids)
            return f"has {waiting} waiting tokens, and a step takes {shortage.num_there}"
        case Lack.BLOCKS:
            return f"must find {shortage.num_needed} blocks for all that waits, and {shortage.num_there} are free"


def _blocks_missing(core: Scheduler, request: Request) -> str:
    needed, free = core.admission.blocks_for_start(request)
    steps = core.steps_until_shortage()
    shortage = "" if steps is None else f"; running requests may need more than there is in about {steps} steps"
    tokens = f"its {len(request.token_ids)} tokens of at most {request.limit}"
    return f"{tokens} must find {needed} blocks, and {free} are free and not promised{shortage}"
