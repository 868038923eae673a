"""The calls with several inputs and one answer: vectors, and log probabilities of continuations.

Must not know: ZeroMQ, checks that need no tokens, deadlines. Each input is a sequence of its own, so the scheduler queues
and limits it like any other. Once one is refused or fails, the call fails and the others are aborted.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc
import numpy as np

from headway_gateway.calls.generation import refused
from headway_gateway.figures.statistics import GatewayStatistics
from headway_gateway.figures.tracing import EndedInput, RequestTrace
from headway_gateway.link.live_sequence import LiveSequence
from headway_gateway.link.scheduler_client import SchedulerClient
from headway_gateway.requests.input_checks import CheckedInputs, is_reranker
from headway_gateway.requests.prompt_encoding import PromptEncoder
from headway_gateway.requests.validation import check_prompt
from headway_gateway.statuses import CallRefusedError
from headway_gateway.wakeup import Wakeup
from headway_proto import generation_pb2 as api
from headway_proto.columns import Float32Array, decode_column, decode_floats, encode_column
from headway_proto.ingress import (
    FINISH_ABORT,
    FINISH_ERROR,
    PRIORITY_NORMAL,
    Finished,
    ModelInfo,
    Rejected,
    Submit,
    SubmitPooled,
)
from headway_proto.pooling import POOL_SCORE
from headway_proto.sampling import SamplingParams

_GREEDY = SamplingParams(temperature=0.0)
_SCORED = SamplingParams(temperature=0.0, prompt_logprobs=0)


class BatchCalls:
    """Runs checked requests."""

    def __init__(self, client: SchedulerClient, prompts: PromptEncoder, statistics: GatewayStatistics) -> None:
        self._client = client
        self._prompts = prompts
        self._statistics = statistics

    async def embed(
        self, request: api.EmbedRequest, checked: CheckedInputs, model: ModelInfo, trace: RequestTrace
    ) -> api.EmbedResponse:
        """Make the vectors.

        Raises:
            CallRefusedError: an input is wrong, or the scheduler refused or failed one.
        """
        trace.record_inputs("embeddings", request, checked.request_id, model.name)
        began_at = time.monotonic()
        prompts = [
            await self._encoded(one, f"inputs[{place}]", model, with_special_tokens=True)
            for place, one in enumerate(request.inputs)
        ]
        trace.record_prompt(sum(map(len, prompts)), began_at, time.monotonic())

        sequences = await self._pooled(request, checked, prompts, request.pooling or model.default_pooling, trace)
        is_normalized = request.normalize if request.HasField("normalize") else True
        size = request.dimensions or model.embedding_size
        embeddings = [
            api.Embedding(
                values=_cut(_vector_of(sequence, model), size, is_normalized=is_normalized),
                prompt_tokens=len(prompt),
                cached_tokens=sequence.num_cached_tokens or 0,
            )
            for sequence, prompt in zip(sequences, prompts, strict=True)
        ]
        return api.EmbedResponse(request_id=checked.request_id, embeddings=embeddings)

    async def score(
        self, request: api.ScoreRequest, checked: CheckedInputs, model: ModelInfo, trace: RequestTrace
    ) -> api.ScoreResponse:
        """Score the continuations. Raises ``CallRefusedError`` as ``embed``."""
        trace.record_inputs("score", request, checked.request_id, model.name)
        if is_reranker(model):
            return await self._score_pairs(request, checked, model, trace)
        began_at = time.monotonic()
        prompt = await self._encoded(request.prompt, "prompt", model, with_special_tokens=True)
        prompts = []
        for place, one in enumerate(request.continuations):
            field = f"continuations[{place}]"
            prompts.append(prompt + await self._encoded(one, field, model, with_special_tokens=False))
            check_prompt(prompts[-1], field, model)
        trace.record_prompt(sum(map(len, prompts)), began_at, time.monotonic())

        def submission(index: int, handle: int, whole: Sequence[int]) -> Submit:
            # The prompt's own log probabilities are not wanted, so that it may come from the prefix cache.
            return Submit(
                **_common(request, checked, index, handle, whole),
                traceparent=trace.traceparent,
                sampling=_SCORED,
                num_prompt_logprobs=len(prompt) - 1,
            )

        sequences = await self._run(prompts, submission, trace)
        scores = [_score(sequence) for sequence in sequences]
        return api.ScoreResponse(request_id=checked.request_id, prompt_tokens=len(prompt), scores=scores)

    async def _score_pairs(
        self, request: api.ScoreRequest, checked: CheckedInputs, model: ModelInfo, trace: RequestTrace
    ) -> api.ScoreResponse:
        began_at = time.monotonic()
        pairs = []
        for place, one in enumerate(request.continuations):
            field = f"continuations[{place}].text"
            pairs.append(await self._prompts.encode_pair(request.prompt.text, one.text, field, model))
            check_prompt(pairs[-1], field, model)
        num_tokens = sum(map(len, pairs))
        trace.record_prompt(num_tokens, began_at, time.monotonic())
        sequences = await self._pooled(request, checked, pairs, POOL_SCORE, trace)
        scores = [api.Score(relevance=float(_vector_of(sequence, model)[0])) for sequence in sequences]
        return api.ScoreResponse(request_id=checked.request_id, prompt_tokens=num_tokens, scores=scores)

    async def _pooled(
        self,
        request: api.EmbedRequest | api.ScoreRequest,
        checked: CheckedInputs,
        prompts: Iterable[Sequence[int]],
        pooling: int,
        trace: RequestTrace,
    ) -> list[LiveSequence]:
        def submission(index: int, handle: int, prompt: Sequence[int]) -> Submit:
            return SubmitPooled(
                **_common(request, checked, index, handle, prompt),
                traceparent=trace.traceparent,
                sampling=_GREEDY,
                pooling=pooling,
            )

        return await self._run(prompts, submission, trace)

    async def _encoded(self, one: api.Input, field: str, model: ModelInfo, *, with_special_tokens: bool) -> list[int]:
        token_ids = await self._prompts.encode_input(one, field, model, with_special_tokens=with_special_tokens)
        kind = "token_ids.ids" if one.HasField("token_ids") else "text"
        check_prompt(token_ids, f"{field}.{kind}", model)
        return token_ids

    async def _run(
        self,
        prompts: Iterable[Sequence[int]],
        submission: Callable[[int, int, Sequence[int]], Submit],
        trace: RequestTrace,
    ) -> list[LiveSequence]:
        wakeup = Wakeup()
        sequences = [
            LiveSequence(submission(index, self._client.next_handle(), prompt), (), wakeup.ring)
            for index, prompt in enumerate(prompts)
        ]
        ended: list[EndedInput] = []
        try:
            self._client.submit(sequences)
            waiting = sequences
            while waiting:
                await wakeup.wait()
                now = time.monotonic()
                for sequence in waiting:
                    if sequence.end is not None:
                        ended.append(EndedInput(sequence, now))
                        self._count(sequence.end)
                waiting = [sequence for sequence in waiting if sequence.end is None]
        finally:
            self._client.abort(sequences)
            trace.record_ended(ended)
        return sequences

    def _count(self, end: Finished | Rejected) -> None:
        """Raises ``CallRefusedError`` for an end without an answer."""
        if isinstance(end, Rejected):
            raise refused(end)
        self._statistics.ends[end.reason,] += 1
        if end.reason == FINISH_ABORT:
            raise CallRefusedError(grpc.StatusCode.ABORTED, "an operator cancelled the request", reason="cancelled")
        if end.reason == FINISH_ERROR:
            raise CallRefusedError(grpc.StatusCode.INTERNAL, f"an input failed: {end.error}", reason="request_failed")


def num_scored_tokens(response: api.ScoreResponse, model: ModelInfo) -> int:
    """Return how many tokens of prompts a score took, those that continuations share counted for each."""
    if is_reranker(model):
        return response.prompt_tokens
    return sum(response.prompt_tokens + len(one.tokens) for one in response.scores)


def _common(
    request: api.EmbedRequest | api.ScoreRequest,
    checked: CheckedInputs,
    index: int,
    handle: int,
    prompt: Sequence[int],
) -> dict[str, Any]:
    """The fields of a submission that samples one token, which nobody sees."""
    return {
        "handle": handle,
        "request_id": checked.request_id,
        "index": index,
        "token_ids": encode_column(prompt),
        "num_prompt_tokens": len(prompt),
        "max_tokens": 1,
        "priority": request.priority or PRIORITY_NORMAL,
        "tenant": request.tenant,
        "ttft_slo_ms": request.ttft_slo_ms,
        "adapter": checked.adapter,
    }


def _vector_of(sequence: LiveSequence, model: ModelInfo) -> Float32Array:
    vector = decode_floats(sequence.vector)
    if len(vector) != model.embedding_size:
        message = f"the executor sent {len(vector)} numbers where its model has {model.embedding_size}"
        raise CallRefusedError(grpc.StatusCode.INTERNAL, message, reason="request_failed")
    return vector


def _cut(vector: Float32Array, size: int, *, is_normalized: bool) -> list[float]:
    """The first ``size`` numbers; a vector of zeros has no direction and stays."""
    kept = vector[:size].astype(np.float64)
    length = float(np.linalg.norm(kept)) if is_normalized else 0.0
    values: list[float] = (kept / length if length else kept).tolist()
    return values


def _score(sequence: LiveSequence) -> api.Score:
    values = np.concatenate([decode_floats(part.logprobs) for part in sequence.prompt_logprobs])
    submission = sequence.submission
    token_ids = decode_column(submission.token_ids)[submission.num_prompt_logprobs + 1 :]
    return api.Score(
        logprob=float(values.sum(dtype=np.float64)),
        tokens=[
            api.TokenLogprob(token_id=token_id, logprob=logprob)
            for token_id, logprob in zip(token_ids.tolist(), values.tolist(), strict=True)
        ],
        cached_tokens=sequence.num_cached_tokens or 0,
    )
