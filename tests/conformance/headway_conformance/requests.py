"""One request of a script: what is asked, where it is, and what came of it.

Owns: the fields of a request and the arithmetic of rule 3. Must not know: steps, or who runs it.
"""

from dataclasses import dataclass, field

from headway_proto.prompt_logprobs import PromptLogprobColumns
from headway_proto.sampling import SamplingParams
from headway_proto.step import RowLogprobs

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class PromptToken:
    """What was told of one token of a prompt."""

    logprob: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(eq=False)
class ScriptedRequest:
    """One request; ``output``, ``logprobs``, ``prompt_logprobs`` (by position) and ``error`` are what results told of it.

    A request that is not ``foreseen`` ends as if by a stop token: that it has had ``max_tokens`` is only known from its
    results, and steps that are in flight by then draw surplus tokens for it.

    ``row`` is -1 while it has none. ``num_computed`` and ``num_tokens`` run ahead of the results, as a scheduler's do.
    ``life`` changes whenever what is in flight for the request no longer counts.
    """

    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    foreseen: bool = True
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
        """Prompt and output, as far as results told."""
        return self.prompt + self.output

    @property
    def remaining(self) -> int:
        """Tokens that are known or in flight and not yet computed; 1 in decode."""
        return self.num_tokens - self.num_computed

    @property
    def ended(self) -> bool:
        """Whether results told that it has what it asked for, or failed."""
        return self.error is not None or len(self.output) >= self.max_tokens

    @property
    def fully_scheduled(self) -> bool:
        """Whether no further step is needed, as far as can be foreseen."""
        return self.foreseen and self.num_tokens >= len(self.prompt) + self.max_tokens

    def note_prompt(self, values: PromptLogprobColumns) -> None:
        """Take in what a result told of the prompt."""
        own, top_ids, tops = (column.tolist() for column in values.values())
        for place, (logprob, ids, alternatives) in enumerate(zip(own, top_ids, tops, strict=True)):
            told = PromptToken(logprob, tuple(ids), tuple(alternatives))
            self.prompt_logprobs[values.first_position + place] = told
