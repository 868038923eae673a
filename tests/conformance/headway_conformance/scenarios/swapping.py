"""Blocks on their way to main memory and back."""

from headway_conformance.requests import ScriptedRequest
from headway_conformance.scenario import scenario
from headway_conformance.scenarios.kinds import LOGPROBS, kinds
from headway_conformance.scripted_scheduler import ScriptedScheduler
from headway_conformance.stage import Stage
from headway_proto.sampling import SamplingParams


@scenario
def swapped_out_and_in(stage: Stage) -> None:
    """A request goes to the host in its prompt or in decode, and comes back into other blocks with its draws."""
    size = stage.size
    parameters = kinds(size)
    scheduler = stage.scheduler()
    for steps_before, name in enumerate(("logprobs", "everything", "min_tokens", "repetition_penalty")):
        request = _started(stage, scheduler, steps_before, parameters[name])
        scheduler.swap_out(request)
        thieves = [stage.request(size.block_size + 1 + place, 1) for place in range(2)]
        scheduler.run(thieves)
        scheduler.swap_in(request)
        scheduler.step()
        scheduler.run()
        stage.verify(request, *thieves)


@scenario
def out_and_in_in_one_step(stage: Stage) -> None:
    """One step swaps a request out, another into the blocks that this frees, and gives the rest to a third."""
    size = stage.size
    scheduler = stage.scheduler(seed=1, num_kv_blocks=-(-size.max_model_len // size.block_size))
    first, second = (_started(stage, scheduler, steps, LOGPROBS) for steps in (1, 2))
    scheduler.swap_out(first)
    scheduler.step()
    for _ in range(3):
        scheduler.swap_out(second)
        scheduler.swap_in(first)
        third = stage.request(size.block_size + 1, 1, LOGPROBS)
        scheduler.admit(third)
        scheduler.step({third: third.remaining})
        scheduler.finish(third)
        stage.verify(third)
        first, second = second, first
    scheduler.swap_in(first)
    scheduler.run()
    stage.verify(first, second)


@scenario
def moved_within_one_step(stage: Stage) -> None:
    """A request that one step swaps out and in changes only its row and its blocks."""
    scheduler = stage.scheduler(seed=2)
    request = _started(stage, scheduler, 2, kinds(stage.size)["everything"])
    neighbour = _started(stage, scheduler, 1, LOGPROBS)
    for _ in range(2):
        old_row = request.row
        scheduler.swap_out(request)
        scheduler.swap_in(request, row=scheduler.other_free_row(old_row))
        scheduler.step()
    scheduler.run()
    stage.verify(request, neighbour)


@scenario
def host_blocks_keep_what_was_last_written(stage: Stage) -> None:
    """A host block may be written again unread, and read more than once, steps apart."""
    size = stage.size
    scheduler = stage.scheduler(seed=3)
    dropped = _started(stage, scheduler, 1, LOGPROBS)
    kept = _started(stage, scheduler, 1, LOGPROBS)
    scheduler.swap_out(dropped)
    scheduler.step()
    unread = set(dropped.host_blocks)
    scheduler.drop(dropped)
    scheduler.swap_out(kept)
    assert unread & set(kept.host_blocks), "the script writes no host block again"
    scheduler.run([stage.request(2 * size.block_size, 2)])
    twin = ScriptedRequest(kept.prompt + kept.output, 3, LOGPROBS)
    blocks = scheduler.copy_from_host(kept.host_blocks)
    scheduler.admit(twin, blocks=blocks, num_computed=kept.num_computed)
    scheduler.step_whole()
    scheduler.run()
    scheduler.swap_in(kept)
    scheduler.run()
    stage.verify(twin, kept)


@scenario
def swapped_in_then_copied(stage: Stage) -> None:
    """Copies of a step come after its swaps: a block that was just swapped in may be copied."""
    block_size = stage.size.block_size
    scheduler = stage.scheduler(seed=4)
    request = stage.request(block_size + 3, 4, LOGPROBS)
    scheduler.admit(request)
    scheduler.step_whole()
    host_blocks = scheduler.copy_to_host(request.blocks)
    scheduler.run()
    twin = ScriptedRequest([*request.prompt, *request.output[:1]], 3, LOGPROBS)
    blocks = scheduler.copy_from_host(host_blocks)
    scheduler.admit(twin, blocks=scheduler.copy_blocks(blocks), num_computed=len(request.prompt))
    scheduler.run()
    stage.verify(request, twin)


def _started(
    stage: Stage, scheduler: ScriptedScheduler, steps_before: int, sampling: SamplingParams
) -> ScriptedRequest:
    """Run a first chunk and ``steps_before`` steps."""
    block_size = stage.size.block_size
    request = stage.request(block_size + 6, 7, sampling)
    others = dict.fromkeys(scheduler.live.values(), 0)
    scheduler.admit(request)
    scheduler.step({request: block_size - 1, **others})
    for _ in range(steps_before):
        scheduler.step({request: request.remaining, **others})
    return request


SCENARIOS = (
    swapped_out_and_in,
    out_and_in_in_one_step,
    moved_within_one_step,
    host_blocks_keep_what_was_last_written,
    swapped_in_then_copied,
)
