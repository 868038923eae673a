"""The sequences of a gateway's link that have no end yet, and what messages bring them.

Owns: which token comes next. Must not know: frames, epochs, what becomes of a gap, text. A known token is dropped.
"""

from collections.abc import Iterable, Iterator

from headway_gateway.link.link_counters import LinkCounters
from headway_gateway.link.live_sequence import LiveSequence
from headway_proto.columns import decode_columns
from headway_proto.ingress import Finished, PromptLogprobs, Rejected, Tokens, TokensAndVectors, Vector


class LiveSequences:
    """By handle. ``counters`` gets the tokens that come twice."""

    def __init__(self, counters: LinkCounters) -> None:
        self._counters = counters
        self._live: dict[int, LiveSequence] = {}
        self._news: list[LiveSequence] = []

    def __iter__(self) -> Iterator[LiveSequence]:
        return iter(self._live.values())

    def get(self, handle: int) -> LiveSequence | None:
        """The sequence of a handle."""
        return self._live.get(handle)

    def add(self, sequence: LiveSequence) -> None:
        """Take messages about it from now on."""
        self._live[sequence.handle] = sequence

    def remove(self, sequence: LiveSequence) -> bool:
        """Ignore messages about it from now on. Return whether it was there."""
        return self._live.pop(sequence.handle, None) is not None

    def end(self, sequence: LiveSequence, end: Finished | Rejected) -> None:
        """It has its end, which is news."""
        del self._live[sequence.handle]
        sequence.end = end
        self._add_news(sequence)

    def take_news(self) -> list[LiveSequence]:
        """Return each sequence with news once."""
        news, self._news = self._news, []
        for sequence in news:
            sequence.has_news = False
        return news

    def take_in(self, body: Tokens) -> bool:
        """Give the sequences what a message has for them. Return False if something before it is missing."""
        if isinstance(body, TokensAndVectors):
            self._take_in_vectors(body.vectors)
        for admitted in body.admitted:
            sequence = self._live.get(admitted.handle)
            if sequence is not None and sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = admitted.num_cached_tokens
                self._add_news(sequence)
        if body.prompt_logprobs and not self._take_in_prompts(body.prompt_logprobs):
            return False
        if body.columns and not self._append_tokens(body.columns):
            return False
        for logprobs in body.logprobs:
            sequence = self._live.get(logprobs.handle)
            if sequence is not None and logprobs.index == sequence.num_held + len(sequence.logprobs):
                sequence.logprobs.append(logprobs)
        return self._take_in_ends(body.finished)

    def _take_in_ends(self, ends: Iterable[Finished]) -> bool:
        for finished in ends:
            sequence = self._live.get(finished.handle)
            if sequence is None:
                continue
            if finished.num_output_tokens > len(sequence.tokens):
                return False
            self.end(sequence, finished)
        return True

    def _take_in_vectors(self, vectors: Iterable[Vector]) -> None:
        for vector in vectors:
            sequence = self._live.get(vector.handle)
            if sequence is not None:
                sequence.vector = vector.values

    def _take_in_prompts(self, prompts: Iterable[PromptLogprobs]) -> bool:
        for prompt in prompts:
            sequence = self._live.get(prompt.handle)
            if sequence is None:
                continue
            if not sequence.take_prompt_logprobs(prompt.values):
                return False
            self._add_news(sequence)
        return True

    def _append_tokens(self, columns: bytes) -> bool:
        # This loop is hot, once per token: only a lookup, a comparison and an append.
        try:
            handles, indices, token_ids = decode_columns(columns, 3)
        except ValueError:
            return False
        live = self._live
        news = self._news
        for handle, index, token_id in zip(handles.tolist(), indices.tolist(), token_ids.tolist(), strict=True):
            sequence = live.get(handle)
            if sequence is None:
                continue
            tokens = sequence.tokens
            if index == len(tokens):
                tokens.append(token_id)
                if not sequence.has_news:
                    sequence.has_news = True
                    news.append(sequence)
            elif index > len(tokens):
                return False
            else:
                self._counters.duplicate_tokens += 1
        return True

    def _add_news(self, sequence: LiveSequence) -> None:
        if not sequence.has_news:
            sequence.has_news = True
            self._news.append(sequence)
