"""``POST /v1/responses``: text in, text out, whole or as events; nothing is kept.

Must not know: how chats are rendered, how a generation runs.
"""

from typing import Any, Literal, TypeAlias

import msgspec

from headway_gateway.calls.servicer import GenerationServicer
from headway_gateway.openai.bodies import ResponsesBody, read
from headway_gateway.openai.chats import ChatReader, TokenBytes, TokenEntry, divides_thoughts
from headway_gateway.openai.http_call import HttpCall
from headway_gateway.openai.outputs import PromptTokensDetails, Tally, new_id, run
from headway_gateway.openai.pieces import Piece, PieceMaker, Wanted
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


OutputItem: TypeAlias = OutputMessage | OutputThought


class ReasoningTokens(msgspec.Struct):
    """Not told apart."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
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
    tool_choice: Literal["none"] = "none"
    tools: list[Any] = []
    store: Literal[False] = False
    object: Literal["response"] = "response"


class ResponseOutput:
    """Gathers thoughts and messages, in the order in which they come."""

    def __init__(self, frame: Response, tally: Tally) -> None:
        """``frame`` is a response without output."""
        self._frame = frame
        self._tally = tally
        self._items: list[tuple[type[OutputItem], list[str]]] = []
        self._reason = ""

    async def begin(self) -> None:
        """See ``ChatSink``."""

    async def add(self, index: int, piece: Piece, tokens: list[TokenEntry] | None) -> None:  # noqa: ARG002
        """See ``ChatSink``."""
        assert not isinstance(piece, ToolCall), "a response has no tools"
        kind = OutputThought if isinstance(piece, Thought) else OutputMessage
        if not self._items or self._items[-1][0] is not kind:
            await self.end_item("completed")
            self._items.append((kind, []))
            await self.begin_item()
        text = piece.text if isinstance(piece, Thought) else piece
        self._items[-1][1].append(text)
        await self.add_text(text)

    async def end(self, index: int, reason: str) -> None:
        """See ``ChatSink``."""
        if not self._items:
            await self.add(index, "", None)
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
        kind, texts = self._items[place]
        name = self._frame.id.removeprefix("resp_") + (f"-{place}" if place else "")
        text = "".join(texts)
        if kind is OutputThought:
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
                input_tokens_details=PromptTokensDetails(self._tally.num_cached),
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

    async def begin(self) -> None:
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
        await self._send(
            self._event("response.output_item.added", output_index=place, item=item),
            self._part_event("response.content_part.added", part=self.item(place, "in_progress").content[0]),
        )

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
        await self._send(
            self._text_event("done", text=item.content[0].text),
            self._part_event("response.content_part.done", part=item.content[0]),
            self._event("response.output_item.done", output_index=place, item=item),
        )

    async def end(self, index: int, reason: str) -> None:
        """See ``ChatSink``."""
        await super().end(index, reason)
        whole = self.response()
        await self._send(self._event(f"response.{whole.status}", response=whole))

    def _text_event(self, what: str, **fields: Any) -> bytes:
        if self._items[-1][0] is OutputThought:
            return self._part_event(f"response.reasoning_text.{what}", **fields)
        return self._part_event(f"response.output_text.{what}", logprobs=[], **fields)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        place = len(self._items) - 1
        item_id = self.item(place, "in_progress", has_content=False).id
        return self._event(kind, item_id=item_id, output_index=place, content_index=0, **fields)

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
        )
        tally = Tally()
        wanted = Wanted(thoughts=divides_thoughts(body, request))
        output = StreamedResponse(call, frame, tally) if body.stream else ResponseOutput(frame, tally)
        pieces = await self._piece_maker.make(1, wanted, request, model)
        reader = ChatReader(output, tally, self._token_bytes, wants_logprobs=False, pieces=pieces)
        await run(self._generation, call, [(request, reader.write)], names=RESPONSES_NAMES)
        if body.stream:
            await call.end_events()
        else:
            await call.answer(msgspec.json.encode(output.response()))
