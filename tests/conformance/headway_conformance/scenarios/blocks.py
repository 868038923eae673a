"""Blocks: their order, sharing, and copies."""

from headway_conformance.requests import ScriptedRequest
from headway_conformance.scenario import scenario
from headway_conformance.scenarios.kinds import LOGPROBS, kinds
from headway_conformance.stage import Stage


@scenario
def blocks_in_any_order(stage: Stage) -> None:
    """A table may descend, jump, and lie between another row's blocks; the pool's last block works like any other."""
    size = stage.size
    last = size.num_kv_blocks - 1
    tables = [[last, last - 2, last - 4, 0], [last - 1, last - 3, 1, last - 5], [5, 3, 4, 2]]
    requests = [stage.request(3 * size.block_size + 1 + place, sampling=LOGPROBS) for place in range(len(tables))]
    scheduler = stage.scheduler()
    for request, blocks in zip(requests, tables, strict=True):
        scheduler.admit(request, blocks=blocks)
    scheduler.step(dict.fromkeys(requests, size.block_size + 3))
    scheduler.run()
    stage.verify(*requests)


@scenario
def a_prefix_that_is_there(stage: Stage) -> None:
    """A new row starts behind blocks that another row wrote, while that row runs and after it has ended."""
    block_size = stage.size.block_size
    first = stage.request(2 * block_size + 3, 8, LOGPROBS)
    scheduler = stage.scheduler(seed=4)
    scheduler.admit(first)
    scheduler.step_whole()
    scheduler.step()
    blocks = list(first.blocks)
    hits = [_after_prefix(stage, first, num_blocks, tail) for num_blocks, tail in ((2, 5), (1, block_size + 2), (2, 1))]
    for request, num_blocks in zip(hits[:2], (2, 1), strict=True):
        scheduler.admit(request, blocks=blocks[:num_blocks], num_computed=num_blocks * block_size)
    scheduler.step_whole()
    scheduler.run()
    scheduler.admit(hits[2], blocks=blocks[:2], num_computed=2 * block_size)
    scheduler.run()
    stage.verify(first, *hits)


@scenario
def a_prefix_of_the_same_step(stage: Stage) -> None:
    """A new row may start behind blocks that other rows write in its own first step, whichever row comes first."""
    size = stage.size
    block_size, last = size.block_size, size.max_num_seqs - 1
    scheduler = stage.scheduler(seed=5)
    writer = stage.request(2 * block_size + 1, 3, LOGPROBS)
    writer_blocks = [9, 4, 7]
    scheduler.admit(writer, row=last - 1, blocks=writer_blocks)
    between = _after_prefix(stage, writer, 2, block_size + 2)
    between_blocks = [*writer_blocks[:2], 1, 12]
    scheduler.admit(between, row=0, blocks=between_blocks, num_computed=2 * block_size)
    behind = [_after_prefix(stage, writer, 1, 3), _after_prefix(stage, writer, 2, block_size)]
    for request, row, num_blocks in zip(behind, (1, last), (1, 2), strict=True):
        scheduler.admit(request, row=row, blocks=writer_blocks[:num_blocks], num_computed=num_blocks * block_size)
    third = _after_prefix(stage, between, 3, 4)
    scheduler.admit(third, row=2, blocks=between_blocks[:3], num_computed=3 * block_size)
    scheduler.step_whole()
    scheduler.run()
    stage.verify(writer, between, *behind, third)


@scenario
def copied_blocks(stage: Stage) -> None:
    """A copied block holds the same as its source: one to many, a partial block, and a source that runs on."""
    block_size = stage.size.block_size
    scheduler = stage.scheduler(seed=6)
    first = stage.request(2 * block_size + 4, 6, LOGPROBS)
    scheduler.admit(first)
    scheduler.step_whole()
    scheduler.step()
    twins = [ScriptedRequest(first.prompt[:-1] + stage.prompt(2), 4, LOGPROBS) for _ in range(2)]
    for twin in twins:
        full, partial = first.blocks[:2], first.blocks[2]
        shared = full if twin is twins[0] else scheduler.copy_blocks(full)
        own = scheduler.copy_blocks([partial])
        scheduler.admit(twin, blocks=[*shared, *own], num_computed=2 * block_size + 3)
    scheduler.step_whole()
    scheduler.run()
    stage.verify(first, *twins)


@scenario
def preempted_and_computed_again(stage: Stage) -> None:
    """A request that lost its row and blocks, in its prompt or later, starts over with the same draws."""
    size = stage.size
    parameters = kinds(size)
    for steps_before, name in enumerate(("logprobs", "everything", "min_tokens", "presence_and_frequency")):
        request = stage.request(size.block_size + 4, 6, parameters[name])
        scheduler = stage.scheduler(seed=steps_before)
        scheduler.admit(request)
        scheduler.step({request: size.block_size + 1})
        for _ in range(steps_before):
            scheduler.step({request: request.remaining})
        scheduler.preempt(request)
        others = [stage.request(size.block_size + 1 + place, 1) for place in range(2)]
        scheduler.run(others)
        scheduler.run([request], budget=size.block_size + 3)
        stage.verify(request, *others)


def _after_prefix(stage: Stage, other: ScriptedRequest, num_blocks: int, tail: int) -> ScriptedRequest:
    prefix = other.prompt[: num_blocks * stage.size.block_size]
    return ScriptedRequest(prefix + stage.prompt(tail), 3, LOGPROBS)


SCENARIOS = (
    blocks_in_any_order,
    a_prefix_that_is_there,
    a_prefix_of_the_same_step,
    copied_blocks,
    preempted_and_computed_again,
)
