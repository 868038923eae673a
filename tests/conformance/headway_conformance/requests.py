"""One request of a script.

Owns: the arithmetic of rule 3. Must not know: steps.
"""

from dataclasses import dataclass, field

from headway_proto.columns import Float32Array
from headway_proto.pooling import NO_POOLING
from headway_proto.prompt_logprobs import PromptLogprobColumns
from headway_proto.sampling import SamplingParams
from headway_proto.step import RowLogprobs

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class PromptToken:
    logprob: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(eq=False)
class ScriptedRequest:
    """One request; results fill ``output``, ``logprobs``, ``prompt_logprobs`` (by position), ``vector`` and ``error``.

    With a ``pooling``, ``max_tokens`` is 1, and that token means nothing.

    If it is not ``foreseen``, only its results show the end, and steps in flight draw surplus tokens for it. ``row`` is
    -1 without a row. ``num_computed`` and ``num_tokens`` run ahead of the results. A new ``life`` makes steps in flight
    not count.
    """

    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    foreseen: bool = True
    pooling: int = NO_POOLING
    vector: Float32Array | None = None
    output: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs | None] = field(default_factory=list)
    prompt_logprobs: dict[int, "PromptToken"] = field(default_factory=dict)
    error: str | None = None
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_tokens: int = 0
    life: int = 0

    @property
    def history(self) -> list[int]:
        return self.prompt + self.output

    @property
    def remaining(self) -> int:
        """Tokens that are not computed yet; 1 in decode."""
        return self.num_tokens - self.num_computed

    @property
    def ended(self) -> bool:
        return self.error is not None or len(self.output) >= self.max_tokens

    @property
    def fully_scheduled(self) -> bool:
        return self.foreseen and self.num_tokens >= len(self.prompt) + self.max_tokens

    def record_prompt(self, values: PromptLogprobColumns) -> None:
        own, top_ids, tops = (column.tolist() for column in values.values())
        for place, (logprob, ids, alternatives) in enumerate(zip(own, top_ids, tops, strict=True)):
            reported = PromptToken(logprob, tuple(ids), tuple(alternatives))
            self.prompt_logprobs[values.first_position + place] = reported
