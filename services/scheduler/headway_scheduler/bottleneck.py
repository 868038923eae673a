"""Why a waiting request does not start: the one place where that is worked out, for operators and for flight logs.

Owns: the order in which reasons are looked for, and their words. Must not know: how the answer travels.
"""

from enum import Enum
from typing import NamedTuple

from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.request import Request


class Reason(Enum):
    """What holds a request, in a few words."""

    PAUSED = "admission was paused"
    ALONE = "another request ran alone"
    LOSS = "an executor had been lost, and those that ran on it came back a few at a time"
    ROWS = "as many requests ran as may run at once"
    BATCH = "the batch that ran had to end first"
    PREFIX = "the beginning of its prompt was being computed for another request"
    BLOCKS = "too few KV blocks were free"
    OBJECTIVE = "those that ran would have missed their inter-token objective"
    TURN = "the token budget was taken, or others were first"


class Bottleneck(NamedTuple):
    """What holds a request: the kind, and in figures."""

    reason: Reason
    text: str


def bottleneck_of(core: Scheduler, request: Request) -> Bottleneck:
    """What holds a waiting request at this moment."""
    if core.paused:
        return Bottleneck(Reason.PAUSED, "admission is paused")
    if core.alone is not None:
        name = f"{core.alone.new.request_id!r:.64}"
        return Bottleneck(Reason.ALONE, f"{name} runs alone, because executors were lost while it ran")
    if core.is_starting_slowly:
        return Bottleneck(Reason.LOSS, "an executor was lost, and those that ran on it start a few at a time")
    if core.num_running >= core.max_running:
        if core.max_running == core.limits.max_num_seqs:
            return Bottleneck(Reason.ROWS, f"max_num_seqs = {core.max_running} requests are running")
        text = f"{core.max_running} requests are running, as many as the token budget or the executor's rows allow"
        return Bottleneck(Reason.ROWS, text)
    if not core.is_admitting:
        return Bottleneck(Reason.BATCH, f"batching is {core.limits.batching}, and the batch that runs has to end first")
    if core.waits_for_prefix(request):
        return Bottleneck(
            Reason.PREFIX, "another request is computing the beginning of its prompt, which it will share"
        )
    needed, free = core.blocks_for_start(request)
    if needed > free:
        tokens = f"its {len(request.token_ids)} tokens of at most {request.limit}"
        text = f"{tokens} must find {needed} blocks, and {free} are free and not promised{_shortage(core)}"
        return Bottleneck(Reason.BLOCKS, text)
    if not core.keeps_objective(request):
        return Bottleneck(Reason.OBJECTIVE, "with one more, those that run would miss their inter-token objective")
    text = f"the budget of {core.max_num_batched_tokens} tokens per step is taken, or it is next"
    return Bottleneck(Reason.TURN, text)


def _shortage(core: Scheduler) -> str:
    steps = core.steps_until_shortage()
    return "" if steps is None else f"; those that run may need more than there is in about {steps} steps"
