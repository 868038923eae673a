"""Steps that speculate: a row returns its accepted proposals and one more token."""

from headway_conformance.failures import NotApplicable
from headway_conformance.requests import GREEDY, ScriptedRequest
from headway_conformance.scenario import Scenario, scenario
from headway_conformance.scenarios.kinds import kinds
from headway_conformance.scripted_scheduler import ScriptedScheduler
from headway_conformance.stage import Stage
from headway_executor.backend import BackendConfigError

_MOST = 5


def _speculating(stage: Stage) -> ScriptedScheduler:
    try:
        scheduler = stage.scheduler(seed=4, speculation="ngram", num_speculative_tokens=_MOST)
    except BackendConfigError as error:
        raise NotApplicable("it does not speculate") from error
    if not scheduler.max_speculative_tokens:
        raise NotApplicable("it does not speculate")
    return scheduler


def _requests(stage: Stage) -> list[ScriptedRequest]:
    """Repetitions in prompts lead to proposals."""
    size = stage.size
    found = []
    for place, sampling in enumerate([GREEDY, *kinds(size).values()]):
        passage = stage.prompt(1 + place % 5)
        prompt = (passage * size.max_model_len)[: 2 * size.block_size + place]
        found.append(ScriptedRequest(prompt, 2 + 3 * (place % 5), sampling, foreseen=True))
    return found


@scenario
def proposals_change_no_token(stage: Stage) -> None:
    """Rows that run proposals return the same tokens and log probabilities as without, and the state is the same."""
    scheduler = _speculating(stage)
    waiting, ended = _requests(stage), []
    most = scheduler.max_speculative_tokens
    number = 0
    while waiting or scheduler.live:
        for request in tuple(scheduler.live.values()):
            if request.ended:
                scheduler.finish(request)
                ended.append(request)
        if waiting and len(scheduler.live) < stage.size.max_num_seqs // 2:
            scheduler.admit(waiting.pop())
            scheduler.step({request: request.remaining for request in scheduler.live.values()})
            scheduler.drain()
        elif scheduler.live:
            number += 1
            scheduler.step_speculating(1 + number % most)
    stage.verify(*ended)


SCENARIOS: tuple[Scenario, ...] = (proposals_change_no_token,)
