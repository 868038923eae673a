"""The values of a generation."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """An output token's log probability. ``top`` has (token id, log probability), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of continuation ``index``, from the output's token ``first_token_index`` on."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    first_token_index: int
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one continuation."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds since the request reached the scheduler."""

    queue_ms: float
    ttft_ms: float
    mean_itl_ms: float
    preemptions: int


@dataclass(slots=True)
class PromptTokens:
    """The prompt, if ``echo`` or ``prompt_logprobs`` asked for it. Its first token has no log probability."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True)
class Completion:
    """One continuation. ``finish_reason`` is None while it runs; ``error`` explains the reason "error".

    ``mean_logprob`` and ``seed`` are set with ``best_of``.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | None = None
    stop_token_id: int | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    error: str = ""
    mean_logprob: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished stream's continuations."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    seeds: tuple[int, ...]
    completions: tuple[Completion, ...]
    prompt: PromptTokens = field(default_factory=PromptTokens)

    @property
    def text(self) -> str:
        """The first continuation's text."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first continuation's tokens."""
        return self.completions[0].token_ids
