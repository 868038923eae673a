"""One continuation on the link, and everything received for it."""

from collections.abc import Callable, Iterable

import msgspec

from headway_proto.columns import encode_column
from headway_proto.ingress import Finished, Rejected, Submit, TokenLogprobs
from headway_proto.prompt_logprobs import PromptLogprobColumns


class LiveSequence:
    """One wanted continuation.

    ``tokens`` begins with ``num_held`` tokens from before; ``logprobs`` covers the others. ``num_cached_tokens`` is
    None until it runs.
    """

    __slots__ = (
        "end",
        "handle",
        "has_news",
        "logprobs",
        "num_cached_tokens",
        "num_held",
        "num_prompt_logprobs",
        "on_news",
        "prompt_logprobs",
        "submission",
        "tokens",
        "vector",
    )

    def __init__(self, submission: Submit, held_tokens: Iterable[int], on_news: Callable[[], None]) -> None:
        """``submission.token_ids`` is the prompt alone."""
        self.submission = submission
        self.handle = submission.handle
        self.tokens = list(held_tokens)
        self.num_held = len(self.tokens)
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[PromptLogprobColumns] = []
        self.num_prompt_logprobs = submission.num_prompt_logprobs
        self.vector = b""
        """A float32 column, which comes with the end of a pooled sequence."""
        self.num_cached_tokens: int | None = None
        self.end: Finished | Rejected | None = None
        self.on_news = on_news
        self.has_news = False

    @property
    def has_run(self) -> bool:
        """Whether it was accepted; then it gets no refusal."""
        return self.num_cached_tokens is not None or len(self.tokens) > self.num_held

    def to_submit(self) -> Submit:
        """Return the submission after these tokens."""
        if not self.tokens and not self.has_run:
            return self.submission
        token_ids = self.submission.token_ids + encode_column(self.tokens)
        return msgspec.structs.replace(
            self.submission,
            token_ids=token_ids,
            has_run=self.has_run,
            num_prompt_logprobs=self.num_prompt_logprobs,
        )

    def take_prompt_logprobs(self, values: PromptLogprobColumns) -> bool:
        """Return False if there is a gap."""
        first = self.num_prompt_logprobs + 1
        is_within = values.end <= self.submission.num_prompt_tokens
        if values.problem() is not None or not is_within or not 1 <= values.first_position <= first:
            return False
        new = values.behind(first)
        if new.num_positions:
            self.prompt_logprobs.append(new)
            self.num_prompt_logprobs += new.num_positions
        return True
