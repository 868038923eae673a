"""The prompt's own events, in bounded messages."""

from collections.abc import Iterator

from headway_gateway.link.live_sequence import LiveSequence
from headway_proto import generation_pb2 as api
from headway_proto.prompt_logprobs import PromptLogprobColumns

_MOST_ENTRIES = 1 << 14
"""Tokens in one message: some 50 KB."""
_MOST_LOGPROBS = 1 << 11
"""Log probabilities in one message. Each is an object, and while a message is made, nothing else is served."""


class PromptEvents:
    """One request's prompt. ``sequence`` brings its log probabilities."""

    def __init__(self, token_ids: list[int], text: str, sequence: LiveSequence | None) -> None:
        self._token_ids = token_ids
        self._text = text
        self._sequence = sequence
        self._num_sent = 0
        self._num_parts = 0

    def take(self) -> Iterator[api.GenerateResponse]:
        """Make the new events, one by one."""
        return (api.GenerateResponse(prompt=prompt) for prompt in self._new())

    def _new(self) -> Iterator[api.Prompt]:
        if self._sequence is None:
            while self._num_sent < len(self._token_ids):
                yield self._next(min(self._num_sent + _MOST_ENTRIES, len(self._token_ids)))
            return
        if len(self._token_ids) == 1 and not self._num_sent:
            yield self._next(1)
        parts = self._sequence.prompt_logprobs
        while self._num_parts < len(parts):
            part = parts[self._num_parts]
            self._num_parts += 1
            yield from self._with_logprobs(part)

    def _with_logprobs(self, part: PromptLogprobColumns) -> Iterator[api.Prompt]:
        own, top_ids, top_values = (column.tolist() for column in part.values())
        step = max(1, _MOST_LOGPROBS // (1 + part.num_alternatives))
        for start in range(0, part.num_positions, step):
            end = min(start + step, part.num_positions)
            first = part.first_position + start
            prompt = self._next(part.first_position + end)
            for place in range(start, end):
                alternatives = zip(top_ids[place], top_values[place], strict=True)
                prompt.logprobs.add(
                    token_id=self._token_ids[first + place - start],
                    logprob=own[place],
                    top=[api.TopLogprob(token_id=token_id, logprob=value) for token_id, value in alternatives],
                )
            yield prompt

    def _next(self, end: int) -> api.Prompt:
        first, self._num_sent = self._num_sent, end
        text = "" if first else self._text
        return api.Prompt(first_token_index=first, token_ids=self._token_ids[first:end], text=text)
