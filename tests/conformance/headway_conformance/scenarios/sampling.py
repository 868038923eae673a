"""Sampling: each row by its own parameters, in any company."""

import msgspec

from headway_conformance.failures import NotApplicable, require
from headway_conformance.requests import GREEDY, ScriptedRequest
from headway_conformance.scenario import scenario
from headway_conformance.scenarios.kinds import kinds
from headway_conformance.stage import Stage
from headway_proto.sampling import MAX_LOGPROBS, NO_LOGPROBS, SamplingParams


@scenario
def parameters_mixed_in_a_batch(stage: Stage) -> None:
    """Rows of every kind share their steps, and each draws the same as alone."""
    size = stage.size
    requests = [
        stage.request(4 + place, size.num_output + 2, sampling) for place, sampling in enumerate(kinds(size).values())
    ]
    scheduler = stage.scheduler(seed=1)
    if scheduler.reports_prompts:
        requests.append(stage.request(9, 2, msgspec.structs.replace(GREEDY, prompt_logprobs=2)))
    scheduler.run(requests)
    stage.verify(*requests)


@scenario
def a_seed_decides(stage: Stage) -> None:
    """Under many seeds, the same seed draws the same in one batch, and other seeds draw something else."""
    prompt = stage.prompt(11)
    seeds = (0, 1, 2, 1, (1 << 64) - 1, 0, 2)
    requests = [ScriptedRequest(prompt, 6, SamplingParams(temperature=3.0, seed=seed)) for seed in seeds]
    stage.scheduler(seed=2).run(requests)
    stage.verify(*requests)
    outputs = {seed: request.output for seed, request in zip(seeds, requests, strict=True)}
    require(len({tuple(output) for output in outputs.values()}) > 2, "other seeds draw the same tokens")
    for seed, request in zip(seeds, requests, strict=True):
        require(request.output == outputs[seed], f"seed {seed} draws differently in two rows of one batch")


@scenario
def logprobs_among_rows_without(stage: Stage) -> None:
    """Rows get as many logprobs as they ask for, or none; the logprobs are the raw distribution's."""
    counts = (-1, 0, 3, -1, MAX_LOGPROBS, 1, -1)
    requests = [stage.request(4 + place, 3, _with_logprobs(place, count)) for place, count in enumerate(counts)]
    scheduler = stage.scheduler(seed=3)
    scheduler.run(requests[:1])
    scheduler.run(requests[1:])
    stage.verify(*requests)


@scenario
def prompts_that_are_reported(stage: Stage) -> None:
    """Log probabilities of prompts come once for each position, with any chunks, and again when a prompt is computed
    again behind tokens of the output.
    """
    scheduler = stage.scheduler(seed=5)
    if not scheduler.reports_prompts:
        raise NotApplicable("it reports no log probabilities of prompts")
    size = stage.size
    counts = (0, -1, 3, MAX_LOGPROBS, 1)
    lengths = (2 * size.block_size + 3, 9, size.block_size, 1, 2)
    requests = [
        stage.request(length, 3, _with_prompt_logprobs(count)) for length, count in zip(lengths, counts, strict=True)
    ]
    again = stage.request(size.block_size + 2, 3, _with_prompt_logprobs(2))
    scheduler.run(requests, chunk=5)
    scheduler.admit(again)
    scheduler.step_whole()
    scheduler.drain()
    scheduler.preempt(again)
    again.prompt_logprobs.clear()
    scheduler.run([again], chunk=7)
    stage.verify(*requests, again)
    for request in (*requests, again):
        wants = request.sampling.prompt_logprobs != NO_LOGPROBS
        positions = list(range(1, len(request.prompt))) if wants else []
        reported = sorted(request.prompt_logprobs)
        require(
            reported == positions, f"positions {reported} were reported of a prompt of {len(request.prompt)} tokens"
        )


@scenario
def a_mask_that_leaves_one_token(stage: Stage) -> None:
    """Until ``min_tokens`` is reached, the only allowed token is drawn, at any temperature; then others are, too."""
    left = 5
    others = tuple(token for token in range(stage.size.vocab_size) if token != left)
    samplings = [
        SamplingParams(temperature=temperature, min_tokens=3, stop_token_ids=others, seed=4, logprobs=1)
        for temperature in (0.0, 1.0)
    ]
    requests = [stage.request(6, 5, sampling) for sampling in samplings]
    stage.scheduler(seed=4).run(requests)
    stage.verify(*requests)
    for request in requests:
        require(request.output[:3] == [left] * 3, f"drew {request.output[:3]}; only token {left} is left")


def _with_prompt_logprobs(count: int) -> SamplingParams:
    return msgspec.structs.replace(GREEDY, prompt_logprobs=count)


def _with_logprobs(place: int, count: int) -> SamplingParams:
    """Half of the draws are far from the raw distribution."""
    if place % 2:
        return msgspec.structs.replace(GREEDY, logprobs=count)
    return SamplingParams(temperature=2.5, seed=place, logprobs=count, logit_bias=((place, 6.0),), presence_penalty=1.0)


SCENARIOS = (
    parameters_mixed_in_a_batch,
    a_seed_decides,
    logprobs_among_rows_without,
    prompts_that_are_reported,
    a_mask_that_leaves_one_token,
)
