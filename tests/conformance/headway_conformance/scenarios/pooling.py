"""Vectors: the same whatever runs beside them, and however the prompt is cut."""

from headway_conformance.failures import NotApplicable
from headway_conformance.requests import ScriptedRequest
from headway_conformance.scenario import scenario
from headway_conformance.scenarios.kinds import LOGPROBS
from headway_conformance.scripted_scheduler import ScriptedScheduler
from headway_conformance.stage import Stage
from headway_proto.pooling import POOL_CLS, POOL_LAST, POOL_MEAN

_POOLINGS = (POOL_LAST, POOL_MEAN, POOL_CLS)


def _scheduler(stage: Stage) -> ScriptedScheduler:
    scheduler = stage.scheduler(seed=3)
    if not scheduler.makes_vectors:
        raise NotApplicable("it makes no vectors")
    return scheduler


@scenario
def vectors_beside_tokens(stage: Stage) -> None:
    """Rows that are pooled in every way, and rows that draw tokens, share steps in chunks without a change in either."""
    scheduler = _scheduler(stage)
    block_size = stage.size.block_size
    lengths = (1, block_size - 1, block_size, 2 * block_size + 3)
    pooled = [stage.pooled(length, pooling) for length in lengths for pooling in _POOLINGS]
    drawing = [stage.request(length, sampling=LOGPROBS) for length in lengths]
    in_turn = [
        one for place, several in enumerate(zip(*[iter(pooled)] * 3, strict=True)) for one in (drawing[place], *several)
    ]
    scheduler.run(in_turn, budget=block_size + 3, chunk=block_size - 3)
    stage.verify(*pooled, *drawing)


@scenario
def a_vector_behind_a_shared_beginning(stage: Stage) -> None:
    """A row that wants the last hidden state begins behind blocks that another row has computed."""
    scheduler = _scheduler(stage)
    block_size = stage.size.block_size
    first = stage.request(2 * block_size, 3, LOGPROBS, foreseen=False)
    scheduler.admit(first)
    scheduler.step_whole()
    behind = ScriptedRequest(first.prompt + stage.prompt(5), 1, pooling=POOL_LAST)
    scheduler.admit(behind, blocks=first.blocks[:2], num_computed=2 * block_size)
    scheduler.step_whole()
    scheduler.run()
    stage.verify(first, behind)


@scenario
def a_pooled_row_changes_hands(stage: Stage) -> None:
    """What a pooled row has summed is gone when it ends, also in mid-prompt; the next in the row begins anew."""
    scheduler = _scheduler(stage)
    row, length = 2, stage.size.block_size + 5
    for pooling in _POOLINGS:
        given_up = stage.pooled(length, pooling)
        scheduler.admit(given_up, row=row)
        scheduler.step({given_up: length - 3})
        scheduler.preempt(given_up)
        again = ScriptedRequest(given_up.prompt, 1, pooling=pooling)
        drawing = stage.request(3, 1, LOGPROBS)
        for request in (again, drawing):
            scheduler.admit(request, row=row)
            scheduler.step({request: 2})
            scheduler.step_whole()
            scheduler.finish(request)
        scheduler.drain()
        stage.verify(again, drawing)


SCENARIOS = (vectors_beside_tokens, a_vector_behind_a_shared_beginning, a_pooled_row_changes_hands)
"""Vectors."""
