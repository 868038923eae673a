"""The Generation service: checks a request, encodes its prompts, and runs it."""

# ruff: noqa: D102 (generation.proto describes the calls)

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import islice

import grpc
import structlog

from headway_gateway.calls.batch_calls import BatchCalls, num_scored_tokens
from headway_gateway.calls.call_context import CallContext
from headway_gateway.calls.generation import Generation, GenerationParts, OpenCall, Prompt, at_once
from headway_gateway.calls.open_streams import OpenStreams
from headway_gateway.calls.pacing import WritePace
from headway_gateway.calls.tenant_rates import TenantRates
from headway_gateway.config import GatewayConfig
from headway_gateway.figures.load_reports import trailer_of
from headway_gateway.figures.statistics import GatewayStatistics
from headway_gateway.figures.tracing import RequestTrace, Tracing, Untraced
from headway_gateway.grpc_server.call import Call
from headway_gateway.link.scheduler_client import SchedulerClient, SchedulerUnavailableError
from headway_gateway.requests.input_checks import check_embed, check_score, is_reranker, require_generates
from headway_gateway.requests.prompt_encoding import PromptEncoder
from headway_gateway.requests.validation import (
    MOST_TOLD,
    chat_violations,
    check_prompt,
    check_request,
    require_token_ids,
    resolve_max_tokens,
)
from headway_gateway.statuses import CallRefusedError, invalid_argument, invalid_arguments, try_later
from headway_gateway.text.constraint_check import Beginning, ConstraintChecker
from headway_gateway.text.encoding_lanes import EncodingLanes
from headway_gateway.text.tokenization import TextModel
from headway_proto import generation_pb2 as api
from headway_proto import generation_pb2_grpc as api_grpc
from headway_proto.ingress import STATE_DRAINING, ModelInfo
from headway_proto.orca_pb2 import OrcaLoadReport
from headway_proto.pooling import NO_POOLING
from headway_proto.sampling import Constraint
from headway_proto.wording import shown

MAX_DETOKENIZED = 1 << 20
"""Ids of one call; a context may have more."""

_UNTRACED = Untraced()


class GenerationServicer(api_grpc.GenerationServicer):
    """Serves ``headway.v1.Generation``."""

    def __init__(
        self,
        *,
        client: SchedulerClient,
        text_model: TextModel,
        lanes: EncodingLanes,
        config: GatewayConfig,
        statistics: GatewayStatistics,
        tracing: Tracing | None = None,
        load_report: Callable[[], OrcaLoadReport] | None = None,
        constraints: ConstraintChecker,
    ) -> None:
        """``load_report`` follows each generation."""
        self._tracing = tracing
        self._load_report = load_report
        self._client = client
        self._constraints = constraints
        self._text_model = text_model
        self._lanes = lanes
        self._prompts = PromptEncoder(text_model, lanes)
        self._batches = BatchCalls(client, self._prompts, statistics)
        self._config = config
        self._statistics = statistics
        self._live_request_ids: set[str] = set()
        self.streams = OpenStreams(config.max_concurrent_streams)
        self.pace = WritePace()
        self._parts = GenerationParts(client, text_model, self.pace, statistics, config.slow_client_s)
        self._tenant_rates = TenantRates(config.max_tenant_requests_per_s)

    async def Generate(self, request: api.GenerateRequest, context: Call) -> None:  # noqa: N802
        await self.generate(request, context, context.write)

    async def generate(
        self,
        request: api.GenerateRequest,
        context: CallContext,
        write: Callable[[api.GenerateResponse], Awaitable[None]],
        once_checked: Callable[[], Awaitable[object]] = at_once,
    ) -> None:
        """Run one generation and ``write`` its events. ``once_checked`` is awaited before any of it runs.

        Raises:
            CallRefusedError: the call ends without all its events.
        """
        arrived_at = time.monotonic()
        with self._begin_trace("Generate", context, arrived_at) as trace:
            async with self.streams.one_more(context):
                await self._generate(request, OpenCall(context, write, trace, arrived_at, once_checked))

    async def Embed(self, request: api.EmbedRequest, context: CallContext) -> api.EmbedResponse:  # noqa: N802
        async with self._open_batch("Embed", context) as (trace, model):
            checked = check_embed(request, model)
            with self._begun(checked.request_id, request.tenant):
                response = await self._batches.embed(request, checked, model, trace)
            self._report_load(context, sum(one.prompt_tokens for one in response.embeddings))
            return response

    async def Score(self, request: api.ScoreRequest, context: CallContext) -> api.ScoreResponse:  # noqa: N802
        async with self._open_batch("Score", context) as (trace, model):
            checked = check_score(request, model)
            with self._begun(checked.request_id, request.tenant):
                response = await self._batches.score(request, checked, model, trace)
            self._report_load(context, num_scored_tokens(response, model))
            return response

    async def Tokenize(  # noqa: N802
        self,
        request: api.TokenizeRequest,
        context: CallContext,  # noqa: ARG002
    ) -> api.TokenizeResponse:
        kind = request.WhichOneof("input")
        if kind is None:
            raise invalid_argument("input", "there is none; allowed: one of text, chat")
        model = await self.serving_model()
        if kind == "chat":
            wrong = dict(islice(chat_violations(request.chat), MOST_TOLD))
            if wrong:
                raise invalid_arguments(wrong)
        return api.TokenizeResponse(token_ids=await self._prompts.encode(request, kind, model))

    async def Detokenize(  # noqa: N802
        self,
        request: api.DetokenizeRequest,
        context: CallContext,  # noqa: ARG002
    ) -> api.DetokenizeResponse:
        model = await self.serving_model()
        most = max(MAX_DETOKENIZED, model.max_model_len)
        if len(request.token_ids) > most:
            described = f"{len(request.token_ids)} ids are not allowed; allowed: at most {most}"
            raise invalid_argument("token_ids", described)
        require_token_ids(request.token_ids, "token_ids", model.vocab_size)
        return api.DetokenizeResponse(text=await self._lanes.decode(request.token_ids))

    async def GetModel(  # noqa: N802
        self,
        request: api.GetModelRequest,  # noqa: ARG002
        context: CallContext,  # noqa: ARG002
    ) -> api.GetModelResponse:
        model = await self.serving_model()
        return api.GetModelResponse(
            name=model.name,
            fingerprint=model.fingerprint,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            backend=model.backend,
            device=model.device,
            dtype=model.dtype,
            has_chat_template=self._text_model.has_chat_template,
            supports_constraints=model.supports_constraints,
            adapters=model.adapters,
            embedding_size=0 if is_reranker(model) else model.embedding_size,
            default_pooling=api.Pooling.Name(NO_POOLING if is_reranker(model) else model.default_pooling),
            is_encoder=not model.generates,
            is_reranker=is_reranker(model),
        )

    @asynccontextmanager
    async def _open_batch(self, method: str, context: CallContext) -> AsyncIterator[tuple[RequestTrace, ModelInfo]]:
        with self._begin_trace(method, context, time.monotonic()) as trace:
            async with self.streams.one_more(context):
                yield trace, await self.serving_model(for_new_work=True)

    @contextmanager
    def _begun(self, request_id: str, tenant: str) -> Iterator[None]:
        if request_id in self._live_request_ids:
            raise CallRefusedError(
                grpc.StatusCode.ALREADY_EXISTS,
                f"request_id: {shown(request_id)} is the id of a live request; allowed: another, or none",
            )
        structlog.contextvars.bind_contextvars(request_id=request_id)
        self._require_rate(tenant)
        self._live_request_ids.add(request_id)
        try:
            yield
        finally:
            self._live_request_ids.discard(request_id)

    def _report_load(self, context: CallContext, num_tokens: int) -> None:
        if self._load_report is not None:
            cost = {"prompt_tokens": float(num_tokens), "output_tokens": 0.0}
            context.set_trailing_metadata((trailer_of(self._load_report(), **cost),))

    def _begin_trace(self, method: str, context: CallContext, arrived_at: float) -> RequestTrace:
        if self._tracing is None:
            return _UNTRACED
        return self._tracing.begin(method, context.peer(), context.invocation_metadata() or (), arrived_at)

    async def _generate(self, request: api.GenerateRequest, call: OpenCall) -> None:
        model = await self.serving_model(for_new_work=True)
        require_generates(model, "Generate")
        checked = check_request(request, model)
        with self._begun(checked.request_id, request.tenant):
            call.trace.record_request(checked, model.name)
            prompt_ids = await self._encoded(request, model, call.trace)
            max_tokens = resolve_max_tokens(checked, len(prompt_ids), model)
            prompt = Prompt(prompt_ids, await self._text_of(request, prompt_ids) if request.echo else "")
            beginning = Beginning()
            if (constraint := checked.sampling.constraint) is not None:
                # Without tenants, all calls of one connection count as one caller's.
                beginning = await self._begin_constraint(constraint, model, request.tenant or call.context.peer())
            try:
                generation = Generation(
                    self._parts,
                    call,
                    checked,
                    prompt=prompt,
                    max_tokens=max_tokens,
                    end_ids=checked.end_ids(model),
                    beginning=beginning,
                )
                await call.once_checked()
                await generation.run()
                if self._load_report is not None:
                    call.context.set_trailing_metadata((trailer_of(self._load_report(), **generation.cost()),))
            finally:
                beginning.is_over()

    def _require_rate(self, tenant: str) -> None:
        wait_s = self._tenant_rates.take(tenant, time.monotonic())
        if wait_s:
            message = (
                f"tenant: {shown(tenant)} begins more requests than allowed; "
                f"allowed: {self._config.max_tenant_requests_per_s:g} per second"
            )
            raise try_later(grpc.StatusCode.RESOURCE_EXHAUSTED, message, reason="tenant_rate", after_s=wait_s)

    async def serving_model(self, *, for_new_work: bool = False) -> ModelInfo:
        """Return the served model, or wait a short while.

        Raises:
            CallRefusedError: UNAVAILABLE.
        """
        try:
            model = await self._client.wait_until_serving(self._config.unavailable_grace_s)
        except SchedulerUnavailableError as error:
            raise try_later(grpc.StatusCode.UNAVAILABLE, str(error)) from error
        if for_new_work and self._client.link.scheduler_state == STATE_DRAINING:
            raise CallRefusedError(grpc.StatusCode.UNAVAILABLE, "the scheduler is draining", reason="draining")
        if self._text_model.vocab_size > model.vocab_size:
            raise CallRefusedError(
                grpc.StatusCode.UNAVAILABLE, "the gateway's tokenizer does not belong to the served model"
            )
        return model

    async def _encoded(self, request: api.GenerateRequest, model: ModelInfo, trace: RequestTrace) -> list[int]:
        began_at = time.monotonic()
        kind = request.WhichOneof("prompt") or "token_ids"
        prompt_ids = await self._prompts.encode(request, kind, model)
        check_prompt(prompt_ids, "token_ids.ids" if kind == "token_ids" else kind, model)
        ended_at = time.monotonic()
        if kind != "token_ids":
            self._statistics.encoding_s.observe(ended_at - began_at)
        trace.record_prompt(len(prompt_ids), began_at, ended_at)
        return prompt_ids

    async def _text_of(self, request: api.GenerateRequest, prompt_ids: list[int]) -> str:
        if request.HasField("text"):
            return request.text
        return await self._lanes.decode(prompt_ids, keeps_special_tokens=request.keep_special_tokens)

    async def _begin_constraint(self, constraint: Constraint, model: ModelInfo, caller: str) -> Beginning:
        began_at = time.monotonic()
        beginning = await self._constraints.begin(constraint, model, caller)
        self._statistics.constraint_s.observe(time.monotonic() - began_at)
        return beginning
