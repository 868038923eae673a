"""A row that fails must fail alone."""

import msgspec

from headway_conformance.requests import ScriptedRequest
from headway_conformance.scenario import scenario
from headway_conformance.scenarios.kinds import LOGPROBS, kinds
from headway_conformance.stage import Stage
from headway_proto.sampling import SamplingParams


@scenario
def errors_stay_in_their_row(stage: Stage) -> None:
    """Rows whose parameters exclude every token fail alone, one by one, while others draw as they should."""
    requests, bad = _good_and_bad(stage)
    scheduler = stage.scheduler(seed=1)
    scheduler.run([*requests[:2], *bad, *requests[2:]])
    stage.verify(*requests)
    for request in bad:
        stage.verify_failed(request)


@scenario
def a_failed_row_runs_once_more(stage: Stage) -> None:
    """With steps in flight, a failed row runs until the scheduler learns of it; then its row can be used again."""
    requests, bad = _good_and_bad(stage)
    scheduler = stage.scheduler(depth=3, seed=2, max_num_seqs=3)
    scheduler.run([bad[0], requests[0], bad[1], *requests[1:]])
    stage.verify(*requests)
    for request in bad:
        stage.verify_failed(request)


def _good_and_bad(stage: Stage) -> tuple[list[ScriptedRequest], list[ScriptedRequest]]:
    everything = tuple(range(stage.size.vocab_size))
    excluding = SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=everything)
    bad = [
        stage.request(5, 4, excluding),
        stage.request(9, 4, msgspec.structs.replace(excluding, temperature=1.0, seed=3, logprobs=2)),
    ]
    good = [
        stage.request(4 + place, 4, sampling) for place, sampling in enumerate((LOGPROBS, kinds(stage.size)["top_p"]))
    ]
    return [*good, stage.request(7, 4, kinds(stage.size)["everything"])], bad


SCENARIOS = (errors_stay_in_their_row, a_failed_row_runs_once_more)
