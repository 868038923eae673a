"""Each family of models under mixed traffic."""

from headway_conformance.checkpoints import LLAMA, MISTRAL, QWEN2, QWEN3
from headway_conformance.scenario import Scenario
from headway_conformance.scenarios.kinds import LOGPROBS
from headway_conformance.stage import Stage

_PECULIARITIES = {
    LLAMA: "query heads that share key heads",
    MISTRAL: "a sliding window, shorter than its prompts and longer than a block",
    QWEN2: "biases of queries, keys and values",
    QWEN3: "queries and keys that are normalised per head",
}


def _run_family(stage: Stage) -> None:
    stage.require_numerics()
    size = stage.size
    lengths = (size.sliding_window, 3 * size.block_size + 2, 1, size.sliding_window - 1, 2 * size.sliding_window + 3)
    requests = [stage.request(length, 2 * size.num_output, LOGPROBS) for length in lengths]
    stage.scheduler(depth=2).run(requests, budget=2 * size.block_size + 1)
    stage.verify(*requests)


SCENARIOS = tuple(
    Scenario(name=f"family_{family}", proves=f"A {family} model computes: {what}.", run=_run_family, family=family)
    for family, what in _PECULIARITIES.items()
)
