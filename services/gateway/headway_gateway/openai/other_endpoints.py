"""The endpoints with one short answer: models, vectors, tokens, health. Must not know: generations."""

import base64
import struct
from collections.abc import Callable, Iterable
from typing import Any, Literal

import grpc
import msgspec

from headway_gateway.calls.servicer import GenerationServicer
from headway_gateway.openai.bodies import NOTHING, DetokenizeBody, EmbeddingsBody, ResponsesBody, TokenizeBody, read
from headway_gateway.openai.http_call import HttpCall
from headway_gateway.openai.outputs import new_id
from headway_gateway.openai.translation import (
    CHAT_PROMPT_NAMES,
    RESPONSES_NAMES,
    add_chat,
    embed_parts,
    responses_request,
)
from headway_gateway.requests.validation import served_adapter
from headway_gateway.statuses import CallRefusedError, invalid_argument, renamed
from headway_gateway.wall_clock import now
from headway_proto import generation_pb2 as api
from headway_proto.ingress import ModelInfo
from headway_proto.wording import shown

_MODEL_PATH = "/v1/models/"
_OF_CHATS = (
    *("tools", "tool_choice", "chat_template_kwargs", "reasoning_effort"),
    *("add_generation_prompt", "continue_final_message"),
)
_TOKENIZE_NAMES = (*CHAT_PROMPT_NAMES, ("text", "prompt"), ("token_ids", "tokens"))


class ModelCard(msgspec.Struct):
    """A model, or an adapter of it (``parent``)."""

    id: str
    created: int
    max_model_len: int
    parent: str | None = None
    object: Literal["model"] = "model"
    owned_by: Literal["headway"] = "headway"


class ModelList(msgspec.Struct):
    """What is served."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class Vector(msgspec.Struct):
    """One input's vector; as text, float32 in base64, little-endian."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class PromptUsage(msgspec.Struct):
    """Tokens of the inputs."""

    prompt_tokens: int
    total_tokens: int


class VectorList(msgspec.Struct):
    """The vectors, in the order of the inputs."""

    model: str
    data: list[msgspec.Raw]
    """Of ``Vector``, as JSON."""
    usage: PromptUsage
    object: Literal["list"] = "list"


class TokenList(msgspec.Struct):
    """Token ids."""

    count: int
    max_model_len: int
    tokens: list[int]


class InputTokens(msgspec.Struct):
    """How many tokens the prompt of a response has."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class Text(msgspec.Struct):
    """A text."""

    prompt: str


class Health(msgspec.Struct):
    """Whether requests are served, and why not."""

    status: Literal["serving", "not serving"]
    reason: str | None = None


class OtherEndpoints:
    """Answers them."""

    def __init__(self, generation: GenerationServicer, problem: Callable[[], str | None]) -> None:
        """``problem`` returns the reason to send no requests."""
        self._generation = generation
        self._problem = problem
        self._created = int(now().timestamp())

    async def models(self, call: HttpCall, content: bytes) -> None:  # noqa: ARG002
        """List the model and its adapters."""
        model = await self._generation.serving_model()
        await call.answer(msgspec.json.encode(ModelList(self._cards(model))))

    async def model(self, call: HttpCall, content: bytes) -> None:  # noqa: ARG002
        """Show one of them.

        Raises:
            CallRefusedError: NOT_FOUND.
        """
        name = call.path.removeprefix(_MODEL_PATH)
        served = self._cards(await self._generation.serving_model())
        for card in served:
            if card.id == name:
                await call.answer(msgspec.json.encode(card))
                return
        names = ", ".join(shown(card.id) for card in served)
        raise CallRefusedError(
            grpc.StatusCode.NOT_FOUND, f"model: {shown(name)} is not served here; served: {names}", reason="not_found"
        )

    def _cards(self, model: ModelInfo) -> list[ModelCard]:
        return [
            ModelCard(model.name, self._created, model.max_model_len),
            *(ModelCard(name, self._created, model.max_model_len, model.name) for name in model.adapters),
        ]

    async def embeddings(self, call: HttpCall, content: bytes) -> None:
        """Make vectors.

        Raises:
            CallRefusedError: the request is wrong, or is refused.
        """
        body = read(content, EmbeddingsBody)
        body.request_id = call.request_id = body.request_id or new_id()
        in_base64 = body.encoding_format == "base64"
        data: list[msgspec.Raw] = []
        num_tokens = 0
        parts = embed_parts(body, call.tenant)
        with self._generation.streams.in_parts(call):
            for part in parts:
                made = await _asked(self._generation.Embed, part.request, call, part.names)
                for one in made.embeddings:
                    # Written part by part, so that many vectors do not hold up other calls.
                    vector = Vector(len(data), _numbers(one, in_base64=in_base64))
                    data.append(msgspec.Raw(msgspec.json.encode(vector)))
                    num_tokens += one.prompt_tokens
        model = body.model or (await self._generation.serving_model()).name
        await call.answer(msgspec.json.encode(VectorList(model, data, PromptUsage(num_tokens, num_tokens))))

    async def tokenize(self, call: HttpCall, content: bytes) -> None:
        """Return the tokens of a text or a chat.

        Raises:
            CallRefusedError: the request is wrong.
        """
        body = read(content, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise invalid_argument("prompt", "not allowed with messages, nor without; allowed: one of prompt, messages")
        request = api.TokenizeRequest()
        if body.messages is not None:
            add_chat(request.chat, body)
        else:
            request.text = body.prompt or ""
            for name in _OF_CHATS:
                if getattr(body, name) not in (None, NOTHING):
                    raise invalid_argument(name, "not allowed with prompt; allowed: with messages")
        model = await self._served(body.model)
        tokens = list((await _asked(self._generation.Tokenize, request, call)).token_ids)
        await call.answer(msgspec.json.encode(TokenList(len(tokens), model.max_model_len, tokens)))

    async def input_tokens(self, call: HttpCall, content: bytes) -> None:
        """Count the tokens of what would be the prompt of a response.

        Raises:
            CallRefusedError: the request is wrong.
        """
        body = read(content, ResponsesBody)
        chat = responses_request(body, call.tenant).chat
        await self._served(body.model)
        tokens = (
            await _asked(self._generation.Tokenize, api.TokenizeRequest(chat=chat), call, RESPONSES_NAMES)
        ).token_ids
        await call.answer(msgspec.json.encode(InputTokens(len(tokens))))

    async def detokenize(self, call: HttpCall, content: bytes) -> None:
        """Return the text of tokens.

        Raises:
            CallRefusedError: the request is wrong.
        """
        body = read(content, DetokenizeBody)
        await self._served(body.model)
        request = api.DetokenizeRequest(token_ids=body.tokens)
        answer = await _asked(self._generation.Detokenize, request, call)
        await call.answer(msgspec.json.encode(Text(answer.text)))

    async def health(self, call: HttpCall, content: bytes) -> None:  # noqa: ARG002
        """Say whether requests are served: 200, or 503 with the reason."""
        problem = self._problem()
        health = Health("serving") if problem is None else Health("not serving", problem)
        await call.answer(msgspec.json.encode(health), status=200 if problem is None else 503)

    async def _served(self, name: str | None) -> ModelInfo:
        model = await self._generation.serving_model()
        served_adapter(api.GenerateRequest(model=name or ""), model)
        return model


async def _asked(
    ask: Callable[[Any, Any], Any], request: Any, call: HttpCall, names: Iterable[tuple[str, str]] = _TOKENIZE_NAMES
) -> Any:
    try:
        return await ask(request, call)
    except CallRefusedError as refusal:
        raise renamed(refusal, names) from refusal


def _numbers(one: api.Embedding, *, in_base64: bool) -> list[float] | str:
    if not in_base64:
        return list(one.values)
    return base64.b64encode(struct.pack(f"<{len(one.values)}f", *one.values)).decode()
