"""Several steps in flight: a step is sent before the tokens of the step before are known."""

from functools import partial

from headway_conformance.failures import require
from headway_conformance.requests import ScriptedRequest
from headway_conformance.scenario import Scenario, scenario
from headway_conformance.scenarios.kinds import LOGPROBS, kinds
from headway_conformance.scripted_scheduler import ScriptedScheduler
from headway_conformance.stage import Stage


def traffic(stage: Stage) -> list[ScriptedRequest]:
    """Every other request ends unforeseen."""
    size = stage.size
    return [
        stage.request(
            1 + (7 * place) % (2 * size.block_size),
            2 + place % 3,
            sampling,
            foreseen=place % 2 == 0,
        )
        for place, sampling in enumerate(kinds(size).values())
    ]


def _in_flight(stage: Stage, *, depth: int) -> None:
    """Rows end while later steps that run them are in flight, and others take their rows and blocks."""
    size = stage.size
    requests = traffic(stage)
    scheduler = stage.scheduler(depth=depth, seed=depth, max_num_seqs=4)
    scheduler.run(requests, budget=size.block_size + 5)
    stage.verify(*requests)
    _change_hands(stage, scheduler)
    _lose_and_resume(stage, scheduler)


def _change_hands(stage: Stage, scheduler: ScriptedScheduler) -> None:
    """Another request gets a row while its last step is in flight, with the blocks in another order."""
    block_size = stage.size.block_size
    requests = [stage.request(2 * block_size + 1 + place, 1, LOGPROBS) for place in range(4)]
    for request in requests:
        scheduler.admit(request, row=1)
        scheduler.step({request: block_size + 1})
        scheduler.step_whole()
        scheduler.finish(request)
    scheduler.run()
    stage.verify(*requests)


def _lose_and_resume(stage: Stage, scheduler: ScriptedScheduler) -> None:
    """Tokens of both are in flight."""
    parameters = kinds(stage.size)
    recomputed, swapped = (stage.request(9, 8, parameters[name]) for name in ("top_p", "everything"))
    scheduler.admit(recomputed)
    scheduler.admit(swapped)
    scheduler.step_whole()
    scheduler.step()
    scheduler.step()
    scheduler.preempt(recomputed)
    can_swap = bool(scheduler.num_host_blocks)
    if can_swap:
        scheduler.swap_out(swapped)
    scheduler.run([recomputed])
    if can_swap:
        scheduler.swap_in(swapped)
        scheduler.run()
    stage.verify(recomputed, swapped)


@scenario
def the_same_twice(stage: Stage) -> None:
    """The same steps give the same tokens and logprobs, to the last bit, on a backend that is opened anew."""
    both = []
    requests = traffic(stage)[2:8]
    for _ in range(2):
        again = [
            ScriptedRequest(request.prompt, request.max_tokens, request.sampling, request.foreseen)
            for request in requests
        ]
        stage.scheduler(depth=2, seed=9).run(again, budget=2 * stage.size.block_size)
        both.append(again)
    for first, second in zip(*both, strict=True):
        require(first.output == second.output, f"the same steps drew {first.output} and then {second.output}")
        require(first.logprobs == second.logprobs, "the same steps gave other logprobs the second time")


SCENARIOS = (
    *(
        Scenario(
            name=f"steps_in_flight_{depth}",
            proves=f"With up to {depth} in flight: {' '.join((_in_flight.__doc__ or '').split())}",
            run=partial(_in_flight, depth=depth),
        )
        for depth in (1, 2, 3, 4)
    ),
    the_same_twice,
)
