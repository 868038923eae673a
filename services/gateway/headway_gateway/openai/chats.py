"""``POST /v1/chat/completions``: messages in, a message out, whole or as events.

Must not know: how chats are rendered, how a generation runs.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from headway_gateway.calls.servicer import GenerationServicer
from headway_gateway.openai.bodies import ChatBody, ResponsesBody, read
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
from headway_gateway.openai.pieces import Piece, PieceMaker, Pieces, Wanted
from headway_gateway.openai.thinking import Thought
from headway_gateway.openai.tool_calls import ToolCall
from headway_gateway.openai.tool_choice import forced_tools, offered_tools
from headway_gateway.openai.translation import (
    CHAT_NAMES,
    chat_request,
)
from headway_gateway.requests.validation import MAX_CONTINUATIONS
from headway_gateway.wall_clock import now
from headway_proto import generation_pb2 as api

TokenBytes = Callable[[int], bytes]
"""A token's text in UTF-8, which may be a part of a character."""


class TokenEntry(msgspec.Struct):
    """A token. A part of a character is U+FFFD in ``token``; ``bytes`` has it."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: "list[TokenEntry] | msgspec.UnsetType" = msgspec.UNSET


class ChatLogprobs(msgspec.Struct):
    """The tokens of an output, or of a piece of it."""

    content: list[TokenEntry]
    refusal: None = None


class FunctionCall(msgspec.Struct):
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


class MessageCall(msgspec.Struct, omit_defaults=True):
    """A tool call. ``index`` is for events only."""

    id: str
    type: str
    function: FunctionCall
    index: int | msgspec.UnsetType = msgspec.UNSET


class AnswerMessage(msgspec.Struct):
    """A whole output. ``content`` is null if there are calls alone."""

    content: str | None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[MessageCall] | msgspec.UnsetType = msgspec.UNSET


class MessageDelta(msgspec.Struct, omit_defaults=True):
    """A piece of an output; empty in the last."""

    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[MessageCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """A whole output with its index."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChoiceDelta(msgspec.Struct):
    """A piece with its index."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct):
    """A whole answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    object: Literal["chat.completion"] = "chat.completion"


class ChatCompletionChunk(msgspec.Struct):
    """An event."""

    id: str
    created: int
    model: str
    choices: list[ChatChoiceDelta]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class Tokens(NamedTuple):
    """Those that came with a piece of text. What is not wanted is None."""

    entries: list[TokenEntry] | None = None
    token_ids: list[int] | None = None

    def __bool__(self) -> bool:
        return bool(self.entries or self.token_ids)

    @property
    def are_wanted(self) -> bool:
        """Whether anything of them is."""
        return self.entries is not None or self.token_ids is not None


class ChatSink(Protocol):
    """Takes the outputs' pieces."""

    async def begin(self, prompt_token_ids: list[int] | None) -> None:
        """The chat runs. The prompt's tokens are None if they are not wanted."""
        ...

    async def add(self, index: int, piece: Piece, tokens: Tokens) -> None:
        """Add to an output."""
        ...

    async def end(self, index: int, reason: str) -> None:
        """An output has ended."""
        ...


_NO_TOKENS = Tokens()


class ChatReader:
    """Reads a generation's events into ``sink``."""

    def __init__(
        self,
        sink: ChatSink,
        tally: Tally,
        token_bytes: TokenBytes,
        *,
        wants_logprobs: bool,
        wants_ids: bool = False,
        pieces: Sequence[Pieces] = (),
        one_call: bool = False,
    ) -> None:
        """``pieces``: one for each output, if their text is divided. ``one_call``: only the first call of an output counts."""
        self._sink = sink
        self._one_call = one_call
        self._called: set[int] = set()
        self._pieces = pieces
        self._tally = tally
        self._token_bytes = token_bytes
        self._wants_logprobs = wants_logprobs
        self._wants_ids = wants_ids
        self._prompt = PromptFirst(is_wanted=wants_ids)

    async def write(self, event: api.GenerateResponse) -> None:
        """Take the next event."""
        for one in self._prompt.push(event) if self._wants_ids else (event,):
            kind = one.WhichOneof("event")
            if kind == "delta":
                await self._take_delta(one.delta)
            elif kind == "finished":
                await self._end(one.finished)
            elif kind == "accepted":
                self._tally.count(one.accepted)
                if not self._wants_ids:
                    await self._sink.begin(None)
            else:
                await self._sink.begin(self._prompt.token_ids)

    async def _take_delta(self, delta: api.Delta) -> None:
        self._tally.count_tokens(delta)
        tokens = _NO_TOKENS
        if self._wants_logprobs or self._wants_ids:
            tokens = Tokens(
                [self._entry(one) for one in delta.logprobs] if self._wants_logprobs else None,
                list(delta.token_ids) if self._wants_ids else None,
            )
        if self._pieces:
            await self._add(delta.index, self._pieces[delta.index].push(delta.text), tokens)
        elif delta.text or tokens:
            await self._sink.add(delta.index, delta.text, tokens)

    async def _end(self, finished: api.Finished) -> None:
        reason = reason_of(finished)
        if self._pieces:
            pieces = self._pieces[finished.index]
            await self._add(finished.index, pieces.finish(), _NO_TOKENS)
            reason = "tool_calls" if pieces.num_calls and reason == "stop" else reason
        await self._sink.end(finished.index, reason)

    async def _add(self, index: int, pieces: list[Piece], tokens: Tokens) -> None:
        if tokens:
            await self._sink.add(index, "", tokens)
        for piece in pieces:
            if isinstance(piece, ToolCall):
                if self._one_call and index in self._called:
                    continue
                self._called.add(index)
            await self._sink.add(index, piece, _NO_TOKENS)

    def _entry(self, entry: api.TokenLogprob) -> TokenEntry:
        whole = self._token(entry.token_id, entry.logprob)
        whole.top_logprobs = [self._token(one.token_id, one.logprob) for one in entry.top]
        return whole

    def _token(self, token_id: int, logprob: float) -> TokenEntry:
        content = self._token_bytes(token_id)
        return TokenEntry(content.decode(errors="replace"), max(logprob, LEAST_LOGPROB), list(content))


class WholeMessages:
    """Gathers the outputs."""

    def __init__(self, num_choices: int) -> None:
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._thoughts: list[list[str]] = [[] for _ in range(num_choices)]
        self._calls: list[list[MessageCall]] = [[] for _ in range(num_choices)]
        self._tokens: list[list[TokenEntry] | None] = [None] * num_choices
        self._token_ids: list[list[int]] = [[] for _ in range(num_choices)]
        self._reasons = [""] * num_choices
        self.prompt_token_ids: list[int] | None = None

    async def begin(self, prompt_token_ids: list[int] | None) -> None:
        """See ``ChatSink``."""
        self.prompt_token_ids = prompt_token_ids

    async def add(self, index: int, piece: Piece, tokens: Tokens) -> None:
        """See ``ChatSink``."""
        if isinstance(piece, str):
            self._texts[index].append(piece)
        elif isinstance(piece, Thought):
            self._thoughts[index].append(piece.text)
        else:
            self._calls[index].append(_message_call(piece))
        if tokens.entries is not None:
            so_far = self._tokens[index]
            if so_far is None:
                self._tokens[index] = so_far = []
            so_far += tokens.entries
        self._token_ids[index] += tokens.token_ids or ()

    async def end(self, index: int, reason: str) -> None:
        """See ``ChatSink``."""
        self._reasons[index] = reason

    def texts(self) -> list[str]:
        """Return the outputs."""
        return ["".join(texts) for texts in self._texts]

    def choices(self) -> list[ChatChoice]:
        """Return the outputs as choices."""
        choices = [
            ChatChoice(index, _answer(text, thoughts, calls), None if tokens is None else ChatLogprobs(tokens), reason)
            for index, (text, thoughts, calls, tokens, reason) in enumerate(
                zip(self.texts(), self._thoughts, self._calls, self._tokens, self._reasons, strict=True)
            )
        ]
        if self.prompt_token_ids is not None:
            for choice, token_ids in zip(choices, self._token_ids, strict=True):
                choice.token_ids = token_ids
        return choices

    @property
    def reasons(self) -> Sequence[str]:
        """Why each output ended."""
        return self._reasons


class StreamedMessages:
    """Sends each piece as an event."""

    def __init__(self, call: HttpCall, frame: ChatCompletionChunk, num_choices: int, usage: StreamUsage) -> None:
        """``frame`` is an event without choices."""
        self._call = call
        self._events = EventFrame(call, frame, usage)
        self._num_choices = num_choices
        self._num_calls = [0] * num_choices
        marked = (ChatChoiceDelta(index, MessageDelta(content=TEXT)) for index in range(num_choices))
        self._texts = [self._events.around_text(choice) for choice in marked]

    async def begin(self, prompt_token_ids: list[int] | None) -> None:
        """See ``ChatSink``."""
        await self._call.begin_events()
        more = {} if prompt_token_ids is None else {"prompt_token_ids": prompt_token_ids}
        roles = (
            self._events.event(ChatChoiceDelta(index, MessageDelta(role="assistant", content="")), **more)
            for index in range(self._num_choices)
        )
        await self._call.send_event(b"".join(roles))

    async def add(self, index: int, piece: Piece, tokens: Tokens) -> None:
        """See ``ChatSink``."""
        if isinstance(piece, Thought):
            delta = MessageDelta(reasoning_content=piece.text)
            await self._events.send(ChatChoiceDelta(index, delta))
            return
        if isinstance(piece, ToolCall):
            call = _message_call(piece)
            call.index, self._num_calls[index] = self._num_calls[index], self._num_calls[index] + 1
            await self._events.send(ChatChoiceDelta(index, MessageDelta(tool_calls=[call])))
            return
        if not tokens.are_wanted and self._events.is_constant:
            await self._events.send_text(self._texts[index], piece)
            return
        logprobs = None if tokens.entries is None else ChatLogprobs(tokens.entries)
        token_ids = msgspec.UNSET if tokens.token_ids is None else tokens.token_ids
        await self._events.send(ChatChoiceDelta(index, MessageDelta(content=piece), logprobs, token_ids=token_ids))

    async def end(self, index: int, reason: str) -> None:
        """See ``ChatSink``."""
        await self._events.send(ChatChoiceDelta(index, MessageDelta(), None, reason))

    async def close(self) -> None:
        """Send the last event."""
        await self._events.close()


def _message_call(call: ToolCall) -> MessageCall:
    # Some templates accept ids of nine letters and digits only.
    return MessageCall(secrets.token_hex(5)[:9], "function", FunctionCall(call.name, call.arguments))


def _answer(text: str, thoughts: list[str], calls: list[MessageCall]) -> AnswerMessage:
    message = AnswerMessage(text or None if calls else text)
    if calls:
        message.tool_calls = calls
    if thoughts:
        message.reasoning_content = "".join(thoughts)
    return message


class Chats:
    """The endpoint."""

    def __init__(self, generation: GenerationServicer, token_bytes: TokenBytes, piece_maker: PieceMaker) -> None:
        self._generation = generation
        self._token_bytes = token_bytes
        self._piece_maker = piece_maker

    async def answer(self, call: HttpCall, content: bytes) -> None:
        """Answer a request.

        Raises:
            CallRefusedError: it is wrong, or is refused.
        """
        body = read(content, ChatBody)
        body.request_id = call.request_id = body.request_id or new_id()
        request = chat_request(body, call.tenant)
        model = await self._generation.serving_model()
        name, created = body.model or model.name, int(now().timestamp())
        answer_id = f"chatcmpl-{call.request_id}"
        num_choices = min(1 if body.n is None else body.n, MAX_CONTINUATIONS)
        tally = Tally()
        wanted = wanted_of(body, request)
        pieces = await self._piece_maker.make(num_choices, wanted, request, model)
        names = (*constraint_names(body, is_forced=bool(wanted.forced)), *CHAT_NAMES)

        async def run_into(sink: ChatSink) -> None:
            reader = ChatReader(
                sink,
                tally,
                self._token_bytes,
                wants_logprobs=bool(body.logprobs),
                wants_ids=bool(body.return_token_ids),
                pieces=pieces,
                one_call=body.parallel_tool_calls is False,
            )
            await run(self._generation, call, [(request, reader.write, names)])

        if body.stream:
            usage = StreamUsage.of(tally, body.stream_options)
            stream = StreamedMessages(call, ChatCompletionChunk(answer_id, created, name, []), num_choices, usage)
            await run_into(stream)
            await stream.close()
            return
        whole = WholeMessages(num_choices)
        await run_into(whole)
        answer = ChatCompletion(answer_id, created, name, whole.choices(), tally.usage())
        if whole.prompt_token_ids is not None:
            answer.prompt_token_ids = whole.prompt_token_ids
        await call.answer(msgspec.json.encode(answer))


def wanted_of(body: ChatBody | ResponsesBody, request: api.GenerateRequest) -> Wanted:
    """Return what is divided from the outputs. A grammar of the caller's own leaves no room for thoughts."""
    constraint = request.sampling.WhichOneof("constraint")
    return Wanted(
        thoughts=body.separate_reasoning is not False and constraint != "grammar",
        tools=offered_tools(body),
        forced=forced_tools(body),
        one_call=body.parallel_tool_calls is False,
        constraint=constraint,
    )
