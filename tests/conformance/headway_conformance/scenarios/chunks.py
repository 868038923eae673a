"""Prompts in chunks: the cut must not change a result."""

from headway_conformance.requests import ScriptedRequest
from headway_conformance.scenario import scenario
from headway_conformance.scenarios.kinds import LOGPROBS
from headway_conformance.stage import Stage


@scenario
def every_split_of_a_prompt(stage: Stage) -> None:
    """Prompts over two blocks, cut in two at every place, give the tokens and logprobs of whole ones."""
    length = stage.size.block_size + 4
    scheduler = stage.scheduler()
    cuts = {stage.request(length, 2, LOGPROBS): cut for cut in range(1, length)}
    in_order, num_rows = list(cuts), stage.size.max_num_seqs
    for start in range(0, len(cuts), num_rows):
        requests = in_order[start : start + num_rows]
        for request in requests:
            scheduler.admit(request)
        scheduler.step({request: cuts[request] for request in requests})
        scheduler.step_whole()
        scheduler.run()
    stage.verify(*cuts)


@scenario
def chunks_of_one_token(stage: Stage) -> None:
    """Prompts that run token by token draw nothing before their last token, and then the same."""
    block_size = stage.size.block_size
    requests = [stage.request(length, sampling=LOGPROBS) for length in (block_size + 1, 1, 2, block_size)]
    scheduler = stage.scheduler()
    scheduler.run(requests, chunk=1)
    stage.verify(*requests)


@scenario
def lengths_around_block_boundaries(stage: Stage) -> None:
    """Prompts and chunks of a multiple of the block size, and one more or less, give the same as whole ones."""
    block_size = stage.size.block_size
    lengths = [length for k in (1, 2, 3) for length in (k * block_size - 1, k * block_size, k * block_size + 1)]
    scheduler = stage.scheduler(seed=1)
    whole = [stage.request(length, 2, LOGPROBS) for length in (1, *lengths)]
    scheduler.run(whole)
    prompt = stage.prompt(3 * block_size + 1)
    chunked = [ScriptedRequest(prompt, 2, LOGPROBS) for _ in range(3)]
    for request, chunk in zip(chunked, (block_size - 1, block_size, block_size + 1), strict=True):
        scheduler.run([request], chunk=chunk)
    stage.verify(*whole, *chunked)


@scenario
def prompts_beside_decodes(stage: Stage) -> None:
    """Chunks of prompts and decodes of other rows share every step without a change in either."""
    size = stage.size
    lengths = (3, 2 * size.block_size, size.block_size + 5, 1, 3 * size.block_size - 1, 7)
    requests = [stage.request(length, size.num_output + place, LOGPROBS) for place, length in enumerate(lengths)]
    stage.scheduler().run(requests, budget=size.block_size + 3)
    stage.verify(*requests)


@scenario
def the_largest_step(stage: Stage) -> None:
    """A step of exactly ``max_num_batched_tokens`` tokens runs, with long and short rows in it."""
    size = stage.size
    left = size.max_num_batched_tokens
    requests: list[ScriptedRequest] = []
    while left:
        length = left if len(requests) == size.max_num_seqs - 1 else min(left, max(1, left * 2 // 5))
        requests.append(stage.request(min(length, size.max_model_len - 2), 2, LOGPROBS))
        left -= len(requests[-1].prompt)
    scheduler = stage.scheduler()
    for request in requests:
        scheduler.admit(request)
    scheduler.step_whole()
    scheduler.run()
    stage.verify(*requests)


@scenario
def the_longest_sequence(stage: Stage) -> None:
    """A row reaches ``max_model_len`` and draws one last token there; its neighbour is not disturbed."""
    size = stage.size
    longest = stage.request(size.max_model_len - 3, 4, LOGPROBS)
    neighbour = stage.request(5, 6, LOGPROBS)
    stage.scheduler().run([longest, neighbour], budget=size.max_model_len - size.block_size - 1)
    stage.verify(longest, neighbour)


SCENARIOS = (
    every_split_of_a_prompt,
    chunks_of_one_token,
    lengths_around_block_boundaries,
    prompts_beside_decodes,
    the_largest_step,
    the_longest_sequence,
)
