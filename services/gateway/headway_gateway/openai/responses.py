"""``POST /v1/responses``: text in, text out, whole or as events; nothing is kept.

Must not know: how chats are rendered, how a generation runs.
"""

from typing import Any, Literal

import msgspec

from headway_gateway.calls.servicer import GenerationServicer
from headway_gateway.openai.bodies import ResponsesBody, read
from headway_gateway.openai.chats import ChatReader, ChatSink, TokenBytes, TokenEntry, WholeMessages
from headway_gateway.openai.http_call import HttpCall
from headway_gateway.openai.outputs import PromptTokensDetails, Tally, new_id, run
from headway_gateway.openai.pieces import Piece
from headway_gateway.openai.translation import RESPONSES_NAMES, responses_request
from headway_gateway.wall_clock import now
from headway_proto import generation_pb2 as api

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
    output: list[OutputMessage]
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


def _ended(frame: Response, text: str, reason: str, tally: Tally) -> Response:
    """Return the whole response."""
    status: _Status = "incomplete" if reason == "length" else "completed"
    return msgspec.structs.replace(
        frame,
        status=status,
        output=[_message(frame, status, [OutputText(text)])],
        incomplete_details=Incomplete() if reason == "length" else None,
        usage=ResponseUsage(
            input_tokens=tally.num_prompt,
            input_tokens_details=PromptTokensDetails(tally.num_cached),
            output_tokens=tally.num_output,
            total_tokens=tally.num_prompt + tally.num_output,
            output_tokens_details=ReasoningTokens(),
        ),
    )


def _message(frame: Response, status: _Status, content: list[OutputText]) -> OutputMessage:
    return OutputMessage(frame.id.replace("resp_", "msg_", 1), status, content)


class StreamedResponse:
    """Sends a response's events."""

    def __init__(self, call: HttpCall, frame: Response, tally: Tally) -> None:
        self._call = call
        self._frame = frame
        self._tally = tally
        self._message = _message(frame, "in_progress", [])
        self._place = {"item_id": self._message.id, "output_index": 0, "content_index": 0}
        self._texts: list[str] = []
        self._number = 0

    async def begin(self) -> None:
        """See ``ChatSink``."""
        await self._call.begin_events()
        first = (
            self._event("response.created", response=self._frame),
            self._event("response.in_progress", response=self._frame),
            self._event("response.output_item.added", output_index=0, item=self._message),
            self._event("response.content_part.added", part=OutputText(""), **self._place),
        )
        await self._call.send_event(b"".join(first))

    async def add(self, index: int, piece: Piece, tokens: list[TokenEntry] | None) -> None:  # noqa: ARG002
        """See ``ChatSink``."""
        assert isinstance(piece, str), "a response is not divided"
        text = piece
        self._texts.append(text)
        await self._call.send_event(self._event("response.output_text.delta", delta=text, logprobs=[], **self._place))

    async def end(self, index: int, reason: str) -> None:  # noqa: ARG002
        """See ``ChatSink``."""
        text = "".join(self._texts)
        whole = _ended(self._frame, text, reason, self._tally)
        last = (
            self._event("response.output_text.done", text=text, logprobs=[], **self._place),
            self._event("response.content_part.done", part=OutputText(text), **self._place),
            self._event("response.output_item.done", output_index=0, item=whole.output[0]),
            self._event(f"response.{whole.status}", response=whole),
        )
        await self._call.send_event(b"".join(last))

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = msgspec.json.encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"


class Responses:
    """The endpoint."""

    def __init__(self, generation: GenerationServicer, token_bytes: TokenBytes) -> None:
        self._generation = generation
        self._token_bytes = token_bytes

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
        if body.stream:
            await self._run(call, body, request, StreamedResponse(call, frame, tally), tally)
            await call.end_events()
            return
        whole = WholeMessages(1)
        await self._run(call, body, request, whole, tally)
        ended = _ended(frame, whole.texts()[0], whole.reasons[0], tally)
        await call.answer(msgspec.json.encode(ended))

    async def _run(
        self, call: HttpCall, body: ResponsesBody, request: api.GenerateRequest, sink: ChatSink, tally: Tally
    ) -> None:
        reader = ChatReader(sink, tally, self._token_bytes, wants_logprobs=False)
        await run(
            self._generation,
            call,
            [(request, reader.write)],
            names=RESPONSES_NAMES,
            keeps_special_tokens=body.skip_special_tokens is False,
        )
