"""Why a request waits, as a sentence with figures.

Owns: the words. Must not know: how ``core.admission`` decided.
"""

from headway_scheduler.core.admission.refusals import Reason
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.request import Request


def sentence_for(core: Scheduler, request: Request) -> str:
    """Put admission's reason into words."""
    match core.admission.reason_for(request):
        case Reason.PAUSED:
            return "admission is paused"
        case Reason.ALONE if core.alone is not None:
            return f"{core.alone.new.request_id!r:.64} runs alone, because executors were lost while it ran"
        case Reason.LOSS:
            return "an executor was lost, and its requests start again a few at a time"
        case Reason.ROWS if core.max_running == core.limits.max_num_seqs:
            return f"max_num_seqs = {core.max_running} requests are running"
        case Reason.ROWS:
            return f"{core.max_running} requests are running, as many as the token budget or the executor's rows allow"
        case Reason.BATCH:
            return f"batching is {core.limits.batching}, and the batch that runs has to end first"
        case Reason.PREFIX:
            return "another request is computing the beginning of its prompt, which it will share"
        case Reason.BLOCKS:
            return _blocks_missing(core, request)
        case Reason.OBJECTIVE:
            return "with one more, running requests would miss their inter-token objective"
    return f"the budget of {core.max_num_batched_tokens} tokens per step is taken, or it is next"


def _blocks_missing(core: Scheduler, request: Request) -> str:
    needed, free = core.admission.blocks_for_start(request)
    steps = core.steps_until_shortage()
    shortage = "" if steps is None else f"; running requests may need more than there is in about {steps} steps"
    tokens = f"its {len(request.token_ids)} tokens of at most {request.limit}"
    return f"{tokens} must find {needed} blocks, and {free} are free and not promised{shortage}"
