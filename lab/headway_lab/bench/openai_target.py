"""An OpenAI-compatible HTTP server as a target.

The number of an answer's tokens is the server's ``usage``, or else the number of chunks with text.
"""

# ruff: noqa: D102 (``Target`` describes the methods)

import contextlib
import ssl
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from headway_lab.bench.event_stream import EventStreamParser
from headway_lab.bench.records import CUT_SHORT, DISCONNECTED, MALFORMED, Answer, RequestFailed
from headway_lab.bench.target import UNKNOWN_CONTEXT, TargetError, TargetInfo
from headway_lab.bench.words import WordSource
from headway_lab.workload.requests import PlannedRequest
from headway_proto.ingress import PRIORITY_NORMAL
from headway_proto.wording import one_line

_DONE = b"[DONE]"
_HTTP_OK = 200
_SHOWN_BODY_BYTES = 300
_CALIBRATION_WORDS = (64, 320)
_OPEN_TIMEOUT_S = 60.0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.text or (self.delta and (self.delta.content or self.delta.reasoning_content)))


class _PromptTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptTokens | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class OpenAITarget:
    """See ``Target``. ``base_url`` is all before ``/completions``."""

    def __init__(
        self,
        base_url: str,
        *,
        is_chat: bool,
        model: str,
        token: str,
        tls: ssl.SSLContext | None,
        fields: Mapping[str, Any],
        seed: int,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._is_chat = is_chat
        self._model = model
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._tls = tls
        self._fields = fields
        self._seed = seed
        self._decoder = msgspec.json.Decoder(_Chunk)
        self._encoder = msgspec.json.Encoder()

    async def open(self) -> TargetInfo:
        self._session = aiohttp.ClientSession(
            # The load itself limits how many run at once.
            connector=aiohttp.TCPConnector(limit=0, ssl=self._tls if self._tls is not None else True),
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"Content-Type": "application/json", **self._headers},
        )
        try:
            model = await self._find_model()
            self._model = model.id
            tokens_per_word, counted_by = await self._calibrate()
        except (RequestFailed, TargetError) as error:
            await self.close()
            raise TargetError(f"{self._base_url}: {error}") from None
        self._words = WordSource(self._seed, tokens_per_word)
        return TargetInfo(
            model=model.id,
            address=self._base_url,
            runs_on="chat/completions" if self._is_chat else "completions",
            context_length=model.max_model_len or UNKNOWN_CONTEXT,
            counted_by=counted_by,
        )

    def prepare(self, request: PlannedRequest) -> bytes:
        return self._body(self._words.prompt(request), request.num_output_tokens, request)

    async def send(self, prepared: bytes, answer: Answer) -> None:
        path = "/chat/completions" if self._is_chat else "/completions"
        try:
            async with self._session.post(self._base_url + path, data=prepared) as response:
                if response.status != _HTTP_OK:
                    body = await response.content.read(_SHOWN_BODY_BYTES)
                    raise RequestFailed(f"HTTP {response.status}", body.decode("utf-8", "replace"))
                await self._follow(response.content, answer)
        except (aiohttp.ClientError, OSError) as error:
            raise RequestFailed(DISCONNECTED, str(error) or type(error).__name__) from None

    async def close(self) -> None:
        await self._session.close()

    async def _follow(self, content: aiohttp.StreamReader, answer: Answer) -> None:
        parser, has_ended = EventStreamParser(), False
        async for received in content.iter_any():
            for data in parser.feed(received):
                if data == _DONE:
                    return
                has_ended |= self._take(data, answer)
        if not has_ended:
            raise RequestFailed(CUT_SHORT, "the stream ended before the answer")

    def _take(self, data: bytes, answer: Answer) -> bool:
        """Return whether this is the answer's last text."""
        try:
            chunk = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise RequestFailed(MALFORMED, f"{error}: {data[:_SHOWN_BODY_BYTES]!r}") from None
        if chunk.error:
            raise RequestFailed("STREAM_ERROR", str(chunk.error))
        if any(choice.has_text for choice in chunk.choices):
            answer.tokens_came(1)
        if chunk.usage is not None:
            answer.num_prompt_tokens = chunk.usage.prompt_tokens
            answer.num_output_tokens = chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            answer.num_cached_tokens = (details.cached_tokens if details else None) or 0
        return any(choice.finish_reason for choice in chunk.choices)

    def _body(self, text: str, max_tokens: int, request: PlannedRequest | None) -> bytes:
        prompt: dict[str, Any] = (
            {"messages": [{"role": "user", "content": text}]} if self._is_chat else {"prompt": text}
        )
        own: dict[str, Any] = {}
        if request is not None and request.tenant:
            own["user"] = request.tenant
        if request is not None and request.priority != PRIORITY_NORMAL:
            own["priority"] = request.priority - PRIORITY_NORMAL  # For these servers 0 is usual, and lower comes first.
        return self._encoder.encode(
            {
                "model": self._model,
                **prompt,
                "max_tokens": max_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self._fields,
                **own,
            }
        )

    async def _find_model(self) -> _Model:
        try:
            async with self._session.get(
                self._base_url + "/models", timeout=aiohttp.ClientTimeout(total=_OPEN_TIMEOUT_S)
            ) as response:
                body = await response.read()
                status = response.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise TargetError(one_line(error)) from None
        models: list[_Model] = []
        with contextlib.suppress(msgspec.DecodeError, UnicodeError):
            models = msgspec.json.decode(body, type=_Models).data
        if status != _HTTP_OK or not models:
            if self._model:  # Not every server lists its models.
                return _Model(id=self._model)
            raise TargetError(f"/models answers HTTP {status} and names no model; name one with --model")
        wanted = self._model or models[0].id
        return next((model for model in models if model.id == wanted), _Model(id=wanted))

    async def _calibrate(self) -> tuple[float, str]:
        """Return the tokens per word, and how answers are counted."""
        source = WordSource(self._seed, 1.0)
        counts = []
        for number, num_words in enumerate(_CALIBRATION_WORDS):
            request = PlannedRequest(number=number, num_prompt_tokens=num_words, num_output_tokens=1)
            answer = Answer(lambda: 0.0)
            await self.send(self._body(source.prompt(request), 1, None), answer)
            counts.append(answer.num_prompt_tokens or 0)
        if not all(counts):
            return 1.0, "chunks"
        slope = (counts[1] - counts[0]) / (_CALIBRATION_WORDS[1] - _CALIBRATION_WORDS[0])
        return (slope if slope > 0 else 1.0), "usage"
