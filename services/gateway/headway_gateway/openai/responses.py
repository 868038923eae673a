"""``POST /v1/responses``: text and calls in, text and calls out, whole or as events; nothing is kept.

Must not know: how chats are rendered, how a generation runs.
"""

import secrets
from typing import Any, Literal, TypeAlias

import msgspec

from headway_gateway.calls.servicer import GenerationServicer
from headway_gateway.openai.bodies import ResponsesBody, ResponseTool, TextConfig, TextFormat, read
from headway_gateway.openai.chats import ChatReader, TokenBytes, Tokens, wanted_of
from headway_gateway.openai.constraints import constraint_names
from headway_gateway.openai.http_call import HttpCall
from headway_gateway.openai.outputs import PromptTokensDetails, Tally, new_id, run
from headway_gateway.openai.pieces import Piece, PieceMaker
from headway_gateway.openai.thinking import Thought
from headway_gateway.openai.tool_calls import ToolCall
from headway_gateway.openai.translation import RESPONSES_NAMES, responses_request
from headway_gateway.wall_clock import now

_Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """A message's text."""

    text: str
    annotations: list[Any] = []


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """The model's message."""

    id: str
    status: _Status
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ThoughtText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """A thought's text."""

    text: str


class OutputThought(msgspec.Struct, tag_field="type", tag="reasoning"):
    """What the model thinks before a message."""

    id: str
    status: _Status
    content: list[ThoughtText]
    summary: list[Any] = []


class OutputCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """A call of a tool. ``arguments`` is JSON."""

    id: str
    status: _Status
    call_id: str
    name: str
    arguments: str


OutputItem: TypeAlias = OutputMessage | OutputThought | OutputCall


class InputTokensDetails(PromptTokensDetails):
    """What the cache keeps is not counted."""

    cache_write_tokens: int = 0


class ReasoningTokens(msgspec.Struct):
    """Not told apart."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    total_tokens: int
    output_tokens_details: ReasoningTokens


class Incomplete(msgspec.Struct):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class Response(msgspec.Struct, kw_only=True):
    """The answer."""

    id: str
    created_at: int
    model: str
    status: _Status
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    incomplete_details: Incomplete | None = None
    error: None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, str] = {}
    previous_response_id: None = None
    parallel_tool_calls: bool = False
    tool_choice: str | dict[str, Any] = "none"
    tools: list[ResponseTool] = []
    text: TextConfig
    store: Literal[False] = False
    object: Literal["response"] = "response"


class _Item:
    """An item that grows. ``call``: its name and id, if it is one."""

    def __init__(self, kind: type[OutputItem], call: tuple[str, str] = ("", "")) -> None:
        self.kind = kind
        self.name, self.call_id = call
        self.texts: list[str] = []


class ResponseOutput:
    """Gathers thoughts, messages and calls, in the order in which they come."""

    def __init__(self, frame: Response, tally: Tally) -> None:
        """``frame`` is a response without output."""
        self._frame = frame
        self._tally = tally
        self._items: list[_Item] = []
        self._reason = ""

    async def begin(self, prompt_token_ids: list[int] | None) -> None:
        """See ``ChatSink``."""

    async def add(self, index: int, piece: Piece, tokens: Tokens) -> None:  # noqa: ARG002
        """See ``ChatSink``."""
        if isinstance(piece, ToolCall):
            await self._begin(_Item(OutputCall, (piece.name, f"call_{secrets.token_hex(12)}")))
            text = piece.arguments
        else:
            kind = OutputThought if isinstance(piece, Thought) else OutputMessage
            if not self._items or self._items[-1].kind is not kind:
                await self._begin(_Item(kind))
            text = piece.text if isinstance(piece, Thought) else piece
        self._items[-1].texts.append(text)
        await self.add_text(text)

    async def _begin(self, item: _Item) -> None:
        await self.end_item("completed")
        self._items.append(item)
        await self.begin_item()

    async def end(self, index: int, reason: str) -> None:
        """See ``ChatSink``."""
        if not self._items:
            await self.add(index, "", Tokens())
        self._reason = reason
        await self.end_item(self._status)

    async def begin_item(self) -> None:
        """The last item begins."""

    async def add_text(self, text: str) -> None:
        """More of the last item."""

    async def end_item(self, status: _Status) -> None:
        """The last item is whole, if there is one."""

    @property
    def _status(self) -> _Status:
        return "incomplete" if self._reason == "length" else "completed"

    def item(self, place: int, status: _Status, *, has_content: bool = True) -> OutputItem:
        """Return an item as it is now."""
        item = self._items[place]
        name = self._frame.id.removeprefix("resp_") + (f"-{place}" if place else "")
        # Each piece of text asks for an item without content: a long text is not joined for each.
        text = "".join(item.texts) if has_content else ""
        if item.kind is OutputCall:
            return OutputCall(f"fc_{name}", status, item.call_id, item.name, text)
        if item.kind is OutputThought:
            return OutputThought(f"rs_{name}", status, [ThoughtText(text)] if has_content else [])
        return OutputMessage(f"msg_{name}", status, [OutputText(text)] if has_content else [])

    def response(self) -> Response:
        """Return the whole response."""
        last = len(self._items) - 1
        return msgspec.structs.replace(
            self._frame,
            status=self._status,
            output=[self.item(place, self._status if place == last else "completed") for place in range(last + 1)],
            incomplete_details=Incomplete() if self._status == "incomplete" else None,
            usage=ResponseUsage(
                input_tokens=self._tally.num_prompt,
                input_tokens_details=InputTokensDetails(self._tally.num_cached),
                output_tokens=self._tally.num_output,
                total_tokens=self._tally.num_prompt + self._tally.num_output,
                output_tokens_details=ReasoningTokens(),
            ),
        )


class StreamedResponse(ResponseOutput):
    """Sends a response's events, too."""

    def __init__(self, call: HttpCall, frame: Response, tally: Tally) -> None:
        super().__init__(frame, tally)
        self._call = call
        self._number = 0
        call.error_event = lambda error: self._event("error", **msgspec.json.decode(error))

    async def begin(self, prompt_token_ids: list[int] | None) -> None:  # noqa: ARG002
        """See ``ChatSink``."""
        await self._call.begin_events()
        await self._send(
            self._event("response.created", response=self._frame),
            self._event("response.in_progress", response=self._frame),
        )

    async def begin_item(self) -> None:
        """See ``ResponseOutput``."""
        place = len(self._items) - 1
        item = self.item(place, "in_progress", has_content=False)
        events = [self._event("response.output_item.added", output_index=place, item=item)]
        whole = self.item(place, "in_progress")
        if not isinstance(whole, OutputCall):
            events.append(self._part_event("response.content_part.added", part=whole.content[0]))
        await self._send(*events)

    async def add_text(self, text: str) -> None:
        """See ``ResponseOutput``."""
        if text:
            await self._send(self._text_event("delta", delta=text))

    async def end_item(self, status: _Status) -> None:
        """See ``ResponseOutput``."""
        if not self._items:
            return
        place = len(self._items) - 1
        item = self.item(place, status)
        if isinstance(item, OutputCall):
            events = [self._text_event("done", name=item.name, arguments=item.arguments)]
        else:
            events = [
                self._text_event("done", text=item.content[0].text),
                self._part_event("response.content_part.done", part=item.content[0]),
            ]
        await self._send(*events, self._event("response.output_item.done", output_index=place, item=item))

    async def end(self, index: int, reason: str) -> None:
        """See ``ChatSink``."""
        await super().end(index, reason)
        whole = self.response()
        await self._send(self._event(f"response.{whole.status}", response=whole))

    def _text_event(self, what: str, **fields: Any) -> bytes:
        kind = self._items[-1].kind
        if kind is OutputCall:
            return self._item_event(f"response.function_call_arguments.{what}", **fields)
        if kind is OutputThought:
            return self._part_event(f"response.reasoning_text.{what}", **fields)
        return self._part_event(f"response.output_text.{what}", logprobs=[], **fields)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        place = len(self._items) - 1
        item_id = self.item(place, "in_progress", has_content=False).id
        return self._event(kind, item_id=item_id, output_index=place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = msgspec.json.encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"

    async def _send(self, *events: bytes) -> None:
        await self._call.send_event(b"".join(events))


class Responses:
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
        body = read(content, ResponsesBody)
        body.request_id = call.request_id = body.request_id or new_id()
        request = responses_request(body, call.tenant)
        model = await self._generation.serving_model()
        text = body.text or TextConfig()
        text.format = text.format or TextFormat("text")
        frame = Response(
            id=f"resp_{call.request_id}",
            created_at=int(now().timestamp()),
            model=body.model or model.name,
            status="in_progress",
            output=[],
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            tools=body.tools or [],
            tool_choice=body.tool_choice or ("auto" if body.tools else "none"),
            parallel_tool_calls=bool(body.tools) and body.parallel_tool_calls is not False,
            text=text,
        )
        tally = Tally()
        wanted = wanted_of(body, request)
        output = StreamedResponse(call, frame, tally) if body.stream else ResponseOutput(frame, tally)
        pieces = await self._piece_maker.make(1, wanted, request, model)
        reader = ChatReader(
            output,
            tally,
            self._token_bytes,
            wants_logprobs=False,
            pieces=pieces,
            one_call=body.parallel_tool_calls is False,
        )
        names = (*constraint_names(body, is_forced=bool(wanted.forced)), *RESPONSES_NAMES)
        await run(self._generation, call, [(request, reader.write, names)])
        if body.stream:
            await call.end_events()
        else:
            await call.answer(msgspec.json.encode(output.response()))
