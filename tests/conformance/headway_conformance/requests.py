"""One request of a script: what is asked, where it is, and what came of it.

Owns: the fields of a request and the arithmetic of rule 3. Must not know: steps, or who runs it.
"""

from dataclasses import dataclass, field

from headway_proto.sampling import SamplingParams
from headway_proto.step import RowLogprobs

GREEDY = SamplingParams(temperature=0.0)


@dataclass(eq=False)
class ScriptedRequest:
    """One request; ``output``, ``logprobs`` and ``error`` are what results told of it.

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
