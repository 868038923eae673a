"""``POST /v1/rerank``: documents in the order of their relevance to a query, as Jina's and Cohere's APIs have it.

Must not know: how relevances are computed.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import grpc
import msgspec

from headway_gateway.calls.servicer import GenerationServicer
from headway_gateway.openai.bodies import Body, UInt32, read
from headway_gateway.openai.http_call import HttpCall
from headway_gateway.openai.outputs import new_id
from headway_gateway.openai.translation import names_of
from headway_gateway.requests.input_checks import MAX_INPUTS, is_reranker
from headway_gateway.statuses import CallRefusedError, invalid_argument, renamed
from headway_gateway.text.tokenization import PromptError
from headway_proto import generation_pb2 as api

MAX_DOCUMENTS = 1024


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """One document."""

    text: str


class RerankBody(Body, kw_only=True):
    """A query and documents. ``top_n``: how many results; unset: all. Of longer documents the first tokens count."""

    query: str
    documents: list[str | Document]
    top_n: UInt32 | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: UInt32 | None = None


class Relevance(msgspec.Struct):
    """One document's, by its place in the request."""

    index: int
    relevance_score: float
    document: Document | msgspec.UnsetType = msgspec.UNSET


class RerankUsage(msgspec.Struct):
    """Tokens of all pairs."""

    prompt_tokens: int
    total_tokens: int


class Ranking(msgspec.Struct):
    """The most relevant documents first; of equals, the first."""

    id: str
    model: str
    results: list[Relevance]
    usage: RerankUsage
    object: Literal["list"] = "list"


class Reranking:
    """The endpoint."""

    def __init__(self, generation: GenerationServicer, first_tokens: Callable[[str, int], str]) -> None:
        """``first_tokens``: see ``TextModel.first_tokens``."""
        self._generation = generation
        self._first_tokens = first_tokens

    async def answer(self, call: HttpCall, content: bytes) -> None:
        """Order the documents.

        Raises:
            CallRefusedError: the request is wrong, or is refused, or the model is no reranker.
        """
        body = read(content, RerankBody)
        body.request_id = call.request_id = body.request_id or new_id()
        texts = [one if isinstance(one, str) else one.text for one in body.documents]
        if not 1 <= len(texts) <= MAX_DOCUMENTS:
            raise invalid_argument("documents", f"{len(texts)} are not allowed; allowed: 1 to {MAX_DOCUMENTS}")
        for name in ("top_n", "max_tokens_per_doc"):
            if getattr(body, name) == 0:
                raise invalid_argument(name, "0 is not allowed; allowed: at least 1, or unset")
        model = await self._generation.serving_model(for_new_work=True)
        if not is_reranker(model):
            raise CallRefusedError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the model {model.name} is no reranker, so it cannot order documents",
                reason="not_supported_by_model",
            )
        scores: list[float] = []
        num_tokens = 0
        most = body.max_tokens_per_doc
        scored = texts if most is None else await asyncio.to_thread(self._cut, texts, most)
        with self._generation.streams.in_parts(call):
            for first in range(0, len(texts), MAX_INPUTS):
                answer = await self._score(body, call, first, scored[first : first + MAX_INPUTS])
                scores += [one.relevance for one in answer.scores]
                num_tokens += answer.prompt_tokens
        best = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
        results = [Relevance(index, scores[index]) for index in best]
        if body.return_documents:
            for result in results:
                result.document = Document(texts[result.index])
        usage = RerankUsage(num_tokens, num_tokens)
        await call.answer(
            msgspec.json.encode(Ranking(f"rerank-{call.request_id}", body.model or model.name, results, usage))
        )

    def _cut(self, texts: list[str], most: int) -> list[str]:
        try:
            return [self._first_tokens(text, most) for text in texts]
        except PromptError as error:
            raise invalid_argument("documents", str(error)) from error

    async def _score(self, body: RerankBody, call: HttpCall, first: int, texts: list[str]) -> Any:
        request = api.ScoreRequest(**names_of(body, call.tenant), prompt=api.Input(text=body.query))
        if first:
            request.request_id = f"{request.request_id}-{first}"
        for text in texts:
            request.continuations.add(text=text)
        places = range(len(texts))
        names = [(f"continuations[{place}]", f"documents[{first + place}]") for place in places]
        try:
            return await self._generation.Score(request, call)
        except CallRefusedError as refusal:
            raise renamed(refusal, [("prompt", "query"), *names]) from refusal
