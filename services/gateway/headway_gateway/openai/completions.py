"""``POST /v1/completions``: outputs, echoed prompts, log probabilities, whole or as events.

Must not know: chats, how a generation runs.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from headway_gateway.calls.servicer import GenerationServicer
from headway_gateway.openai.bodies import CompletionBody, read
from headway_gateway.openai.constraints import constraint_names
from headway_gateway.openai.event_frame import TEXT, EventFrame
from headway_gateway.openai.http_call import HttpCall
from headway_gateway.openai.outputs import (
    LEAST_LOGPROB,
    PromptFirst,
    StreamUsage,
    Tally,
    Usage,
    new_id,
    reason_of,
    run,
)
from headway_gateway.openai.translation import completion_names, completion_requests, drops_output
from headway_gateway.requests.validation import MAX_CONTINUATIONS
from headway_gateway.statuses import invalid_argument
from headway_gateway.text.detokenization import Detokenizer
from headway_gateway.text.tokenization import TextModel
from headway_gateway.wall_clock import now
from headway_proto import generation_pb2 as api

TokenText = Callable[[int], str]
Token = tuple[int, api.TokenLogprob | None]
"""An id, and its log probability; a prompt's first token has none."""


class Logprobs(msgspec.Struct):
    """Columns over tokens. ``text_offset`` counts characters of the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]

    def extend(self, more: "Logprobs") -> None:
        """Add later tokens."""
        self.text_offset += more.text_offset
        self.token_logprobs += more.token_logprobs
        self.tokens += more.tokens
        self.top_logprobs += more.top_logprobs


class Choice(msgspec.Struct):
    """One output, or a piece of it."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: str | None
    prompt_logprobs: list[dict[str, dict[str, float | str]] | None] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct):
    """A whole answer, or an event. ``usage`` is absent from events of clients that have not asked for it."""

    id: str
    model: str
    created: int
    choices: list[Choice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    object: Literal["text_completion"] = "text_completion"


class Piece(NamedTuple):
    """New text of a choice. ``tokens`` is None where no log probabilities are wanted, and so are ids that are not wanted.

    Those of the prompt come in the first piece.
    """

    choice: int
    text: str
    tokens: Sequence[Token] | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Sink(Protocol):
    """Takes the pieces of all choices."""

    async def begin(self) -> None:
        """A prompt runs."""
        ...

    async def add(self, piece: Piece) -> None:
        """Add text."""
        ...

    async def end(self, index: int, reason: str) -> None:
        """A choice has ended."""
        ...


class LogprobColumns:
    """Makes one choice's columns, piece by piece."""

    def __init__(
        self, token_text: TokenText, detokenizer: Detokenizer, special_tokens: Collection[str] = frozenset()
    ) -> None:
        """``detokenizer``: it makes the choice's text once more, to count its characters. Of ``special_tokens`` an echoed
        prompt may have those that it was given, but not those that were put before it.
        """
        self._token_text = token_text
        self._detokenizer = detokenizer
        self._special_tokens = special_tokens
        self._offset = 0

    def of(self, tokens: Iterable[Token], choice_text: str) -> Logprobs:
        """Return the columns of the next tokens; ``choice_text`` is the choice's with which they came."""
        columns = Logprobs([], [], [], [])
        prompt_text: str | None = None
        for place, (token_id, entry) in enumerate(tokens):
            text = self._token_text(token_id)
            if place == 0 and entry is None:
                prompt_text = choice_text
            columns.text_offset.append(self._next_offset(token_id, text, choice_text, prompt_text))
            columns.tokens.append(text)
            if entry is None:
                columns.token_logprobs.append(None)
                columns.top_logprobs.append(None)
                continue
            own = max(entry.logprob, LEAST_LOGPROB)
            columns.token_logprobs.append(own)
            columns.top_logprobs.append(self._top(text, own, entry))
        return columns

    def _next_offset(self, token_id: int, own: str, choice_text: str, prompt_text: str | None) -> int:
        before, more = self._offset, self._detokenizer.push((token_id,))
        if prompt_text is not None and own in self._special_tokens:
            more = own if prompt_text.startswith(own, before) else ""
        if not before and choice_text.startswith(own) and own.lstrip(" ") == more.lstrip(" "):
            more = own  # some decoders drop spaces before a first word, and none of one that stands behind a prompt
        self._offset += len(more)
        # What this token completes may begin before it.
        return max(before, self._offset - len(own))

    def _top(self, text: str, own: float, entry: api.TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        # Different tokens may have one text (parts of characters); the likeliest stays.
        for one in entry.top:
            top.setdefault(self._token_text(one.token_id), max(one.logprob, LEAST_LOGPROB))
        top.setdefault(text, own)
        return top


class PromptReader:
    """Reads the events of one prompt's generation into ``sink``."""

    def __init__(self, body: CompletionBody, first_index: int, sink: Sink, tally: Tally) -> None:
        """``first_index`` is the index of its first choice."""
        self._num_choices = 1 if body.n is None else body.n
        self._first_index = first_index
        self._sink = sink
        self._tally = tally
        self._echoes = bool(body.echo)
        self._wants_logprobs = body.logprobs is not None
        self._drops_output = drops_output(body)
        self._wants_ids = bool(body.return_token_ids)
        self._prompt = PromptFirst(is_wanted=self._echoes or self._wants_ids or body.prompt_logprobs is not None)

    @property
    def prompt(self) -> list[Token]:
        """The prompt's tokens."""
        return list(zip(self._prompt.token_ids, self._prompt.logprobs, strict=True))

    async def write(self, event: api.GenerateResponse) -> None:
        """Take the next event."""
        for one in self._prompt.push(event):
            kind = one.WhichOneof("event")
            if kind == "accepted":
                self._tally.count(one.accepted)
                await self._sink.begin()
            elif kind == "prompt":
                await self._add_prompt()
            elif kind == "delta":
                await self._take_delta(one.delta)
            else:
                await self._end(one.finished)

    async def _add_prompt(self) -> None:
        if not self._echoes and not self._wants_ids:
            return
        text = self._prompt.text if self._echoes else ""
        tokens = self.prompt if self._echoes and self._wants_logprobs else None
        ids = self._prompt.token_ids if self._wants_ids else None
        for index in range(self._num_choices):
            own_ids: list[int] | None = None if ids is None else []
            await self._sink.add(Piece(self._first_index + index, text, tokens, own_ids, ids))

    async def _take_delta(self, delta: api.Delta) -> None:
        if self._drops_output:
            return
        self._tally.count_tokens(delta)
        tokens = list(zip(delta.token_ids, delta.logprobs, strict=True)) if self._wants_logprobs else None
        ids = list(delta.token_ids) if self._wants_ids else None
        if delta.text or tokens or ids:
            await self._sink.add(Piece(self._first_index + delta.index, delta.text, tokens, ids))

    async def _end(self, finished: api.Finished) -> None:
        reason = reason_of(finished)
        await self._sink.end(self._first_index + finished.index, "length" if self._drops_output else reason)


class WholeChoices:
    """Gathers choices."""

    def __init__(self, columns: Sequence[LogprobColumns]) -> None:
        """``columns``: of each choice."""
        self.choices = [Choice(index, "", None, None) for index in range(len(columns))]
        self._texts: list[list[str]] = [[] for _ in self.choices]
        self._columns = columns

    async def begin(self) -> None:
        """See ``Sink``."""

    async def add(self, piece: Piece) -> None:
        """See ``Sink``."""
        self._texts[piece.choice].append(piece.text)
        choice = self.choices[piece.choice]
        if piece.prompt_token_ids is not None:
            choice.prompt_token_ids, choice.token_ids = piece.prompt_token_ids, []
        if piece.token_ids:
            assert isinstance(choice.token_ids, list)
            choice.token_ids += piece.token_ids
        if piece.tokens is None:
            return
        columns = self._columns[piece.choice].of(piece.tokens, piece.text)
        if choice.logprobs is None:
            choice.logprobs = columns
        else:
            choice.logprobs.extend(columns)

    async def end(self, index: int, reason: str) -> None:
        """See ``Sink``."""
        self.choices[index].text = "".join(self._texts[index])
        self.choices[index].finish_reason = reason


class StreamedChoices:
    """Sends each piece as an event."""

    def __init__(
        self, call: HttpCall, frame: Completion, columns: Sequence[LogprobColumns], usage: StreamUsage
    ) -> None:
        """``frame`` is an event without choices. ``columns``: of each choice."""
        self._call = call
        self._events = EventFrame(call, frame, usage)
        self._columns = columns
        self._texts = [self._events.around_text(Choice(index, TEXT, None, None)) for index in range(len(columns))]

    async def begin(self) -> None:
        """See ``Sink``."""
        if not self._call.has_begun:
            await self._call.begin_events()

    async def add(self, piece: Piece) -> None:
        """See ``Sink``."""
        if piece.tokens is None and piece.token_ids is None and self._events.is_constant:
            await self._events.send_text(self._texts[piece.choice], piece.text)
            return
        columns = None if piece.tokens is None else self._columns[piece.choice].of(piece.tokens, piece.text)
        choice = Choice(piece.choice, piece.text, columns, None)
        if piece.token_ids is not None:
            choice.token_ids = piece.token_ids
        if piece.prompt_token_ids is not None:
            choice.prompt_token_ids = piece.prompt_token_ids
        await self._events.send(choice)

    async def end(self, index: int, reason: str) -> None:
        """See ``Sink``."""
        await self._events.send(Choice(index, "", None, reason))

    async def close(self) -> None:
        """Send the last event."""
        await self._events.close()


class Completions:
    """The endpoint."""

    def __init__(self, generation: GenerationServicer, text_model: TextModel) -> None:
        self._generation = generation
        self._text_model = text_model
        self._token_text = text_model.text_of_token

    async def answer(self, call: HttpCall, content: bytes) -> None:
        """Answer a request.

        Raises:
            CallRefusedError: it is wrong, or is refused.
        """
        body = read(content, CompletionBody)
        body.request_id = call.request_id = body.request_id or new_id()
        if body.stream and body.prompt_logprobs is not None:
            raise invalid_argument("prompt_logprobs", "not allowed together with stream; allowed: echo with logprobs")
        requests = completion_requests(body, call.tenant)
        model = await self._generation.serving_model()
        frame = Completion(f"cmpl-{call.request_id}", body.model or model.name, int(now().timestamp()), [])
        num_each = 1 if body.n is None else body.n
        num_choices = min(num_each, MAX_CONTINUATIONS) * len(requests)
        columns = [self._columns(body) for _ in range(num_choices)]
        tally = Tally()
        if body.stream:
            usage = StreamUsage.of(tally, body.stream_options)
            stream = StreamedChoices(call, frame, columns, usage)
            await self._run(call, body, requests, stream, tally)
            await stream.close()
            return
        whole = WholeChoices(columns)
        readers = await self._run(call, body, requests, whole, tally)
        if body.prompt_logprobs is not None:
            for choice in whole.choices:
                choice.prompt_logprobs = self._prompt_logprobs(readers[choice.index // num_each].prompt)
        await call.answer(
            msgspec.json.encode(msgspec.structs.replace(frame, choices=whole.choices, usage=tally.usage()))
        )

    def _columns(self, body: CompletionBody) -> LogprobColumns:
        detokenizer = self._text_model.new_detokenizer(keeps_special_tokens=body.skip_special_tokens is False)
        return LogprobColumns(self._token_text, detokenizer, self._text_model.special_tokens)

    async def _run(
        self, call: HttpCall, body: CompletionBody, requests: Sequence[api.GenerateRequest], sink: Sink, tally: Tally
    ) -> list[PromptReader]:
        num_each = 1 if body.n is None else body.n
        readers = [PromptReader(body, place * num_each, sink, tally) for place in range(len(requests))]
        of_constraint = tuple(constraint_names(body))
        await run(
            self._generation,
            call,
            [
                (request, reader.write, (*of_constraint, *completion_names(body, place)))
                for place, (request, reader) in enumerate(zip(requests, readers, strict=True))
            ],
        )
        return readers

    def _prompt_logprobs(self, prompt: Iterable[Token]) -> list[dict[str, dict[str, float | str]] | None]:
        return [None if entry is None else self._alternatives(entry) for _, entry in prompt]

    def _alternatives(self, entry: api.TokenLogprob) -> dict[str, dict[str, float | str]]:
        entries: list[api.TokenLogprob | api.TopLogprob] = [entry, *entry.top]
        return {
            str(one.token_id): {
                "logprob": max(one.logprob, LEAST_LOGPROB),
                "decoded_token": self._token_text(one.token_id),
            }
            for one in entries
        }
