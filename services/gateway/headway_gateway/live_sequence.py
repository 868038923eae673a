"""One continuation as the link knows it: what was asked for, and everything that has come of it.

Owns: the tokens and log probabilities of one sequence, and what to submit again on a new link.
Must not know: frames, handles of others, text.
"""

from collections.abc import Callable, Iterable

import msgspec

from headway_proto.columns import encode_column
from headway_proto.ingress import Finished, Rejected, Submit, TokenLogprobs
from headway_proto.prompt_logprobs import PromptLogprobColumns


class LiveSequence:
    """One continuation that the gateway wants, and all that has come of it.

    ``tokens`` are its output token ids from index 0, those held at submission first. ``logprobs`` belong to the tokens
    behind the ``num_held`` first. ``prompt_logprobs`` are of its ``num_prompt_logprobs`` first prompt tokens behind the very
    first, in order. ``num_cached_tokens`` is None until the sequence has run. ``end`` tells how it ended.
    ``on_news`` is called (by the owner of the link's loop) after any of these have changed.
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
    )

    def __init__(self, submission: Submit, held_tokens: Iterable[int], on_news: Callable[[], None]) -> None:
        """``submission.token_ids`` is the prompt alone; held tokens are added each time it is sent."""
        self.submission = submission
        self.handle = submission.handle
        self.tokens = list(held_tokens)
        self.num_held = len(self.tokens)
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[PromptLogprobColumns] = []
        self.num_prompt_logprobs = 0
        self.num_cached_tokens: int | None = None
        self.end: Finished | Rejected | None = None
        self.on_news = on_news
        self.has_news = False

    @property
    def has_run(self) -> bool:
        """Whether the scheduler has taken it: from then on it is owed an end, not a refusal."""
        return self.num_cached_tokens is not None or len(self.tokens) > self.num_held

    def to_submit(self) -> Submit:
        """What to send so that generation goes on behind the tokens already here."""
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
        """Take in what is new of ``values``; False if they do not follow what is here."""
        first = self.num_prompt_logprobs + 1
        is_within = values.end <= self.submission.num_prompt_tokens
        if values.problem() is not None or not is_within or not 1 <= values.first_position <= first:
            return False
        new = values.behind(first)
        if new.num_positions:
            self.prompt_logprobs.append(new)
            self.num_prompt_logprobs += new.num_positions
        return True
