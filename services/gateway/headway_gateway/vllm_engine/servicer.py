"""The VllmEngine service, on the parts that serve ``headway.v1``."""

# ruff: noqa: D102 (the .proto of VllmEngine describes the calls)

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from headway_gateway.access.authentication import TENANT_METADATA_KEY
from headway_gateway.calls.servicer import GenerationServicer
from headway_gateway.grpc_server.call import Call
from headway_gateway.link.scheduler_client import SchedulerClient
from headway_gateway.operators.operator_calls import ask
from headway_gateway.statuses import CallRefusedError, invalid_argument
from headway_gateway.vllm_engine.answers import AnswerWriter
from headway_gateway.vllm_engine.cache_events import MOST_START, kv_event_batches
from headway_gateway.vllm_engine.loads import OutputRate, scheduler_load
from headway_gateway.vllm_engine.requests import in_callers_words, translate, translate_embed
from headway_gateway.vllm_engine.tokenizer_files import TokenizerArchive, tokenizer_archive
from headway_gateway.wall_clock import now
from headway_proto.ingress import STATE_PAUSED
from headway_proto.operations import AdminCall, Status

_FLUSH_INTERVAL_S = 0.1
_MOST_FLUSH_S = 3600.0


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Serves ``vllm.grpc.engine.VllmEngine``."""

    def __init__(
        self,
        *,
        generation: GenerationServicer,
        client: SchedulerClient,
        problem: Callable[[], str | None],
        model_directory: Path,
        publishes_kv_events: bool,
    ) -> None:
        """``problem`` returns the reason to send no requests."""
        self._generation = generation
        self._client = client
        self._problem = problem
        self._model_directory = model_directory
        self._publishes_kv_events = publishes_kv_events
        self._archive: asyncio.Task[TokenizerArchive] | None = None
        self._output_rate = OutputRate()
        self._tenants_by_live_id: dict[str, str] = {}
        self._started_at = time.monotonic()
        self._last_request_at = 0.0

    async def Generate(self, request: vllm.GenerateRequest, context: Call) -> None:  # noqa: N802
        metadata = _metadata(context)
        self._last_request_at = now().timestamp()
        native = translate(request, metadata)
        try:
            with self._abortable(request.request_id, native.tenant):
                await self._generation.generate(native, context, AnswerWriter(request, context.write).write)
        except CallRefusedError as refusal:
            raise in_callers_words(refusal) from refusal

    async def Abort(self, request: vllm.AbortRequest, context: Call) -> vllm.AbortResponse:  # noqa: N802
        tenant = _metadata(context).get(TENANT_METADATA_KEY)
        for request_id in request.request_ids:
            owner = self._tenants_by_live_id.get(request_id)
            if owner is not None and tenant in {None, owner}:
                await self._ask("cancel", context, request_id)
        return vllm.AbortResponse()

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: Call) -> vllm.HealthCheckResponse:  # noqa: ARG002, N802
        """UNAVAILABLE until a model is known: smg asks a responding engine for its model only once."""
        problem = self._problem()
        if problem is not None and self._client.serving is None:
            raise CallRefusedError(grpc.StatusCode.UNAVAILABLE, problem)
        return vllm.HealthCheckResponse(healthy=problem is None, message=problem or "serving")

    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: Call) -> vllm.GetModelInfoResponse:  # noqa: ARG002, N802
        model = await self._generation.serving_model()
        config = await asyncio.to_thread(_model_config, self._model_directory)
        return vllm.GetModelInfoResponse(
            model_path=model.name,
            served_model_name=model.name,
            is_generation=model.generates,
            max_context_length=model.max_model_len,
            max_req_input_len=min(model.max_model_len, model.max_request_tokens) - 1,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            **config,
        )

    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: Call) -> vllm.GetServerInfoResponse:  # noqa: ARG002, N802
        model = await self._generation.serving_model()
        status = await self._status(context)
        return vllm.GetServerInfoResponse(
            active_requests=self._generation.streams.num_open,
            is_paused=self._client.link.scheduler_state == STATE_PAUSED,
            last_receive_timestamp=self._last_request_at,
            uptime_seconds=time.monotonic() - self._started_at,
            server_type="headway",
            data_parallel_size=1,
            model_dtype=model.dtype,
            max_num_seqs=status.max_num_seqs,
            constrained_decoding_start="first_token" if model.supports_constraints else "",
        )

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Call) -> vllm.GetLoadsResponse:  # noqa: ARG002, N802
        status = await self._status(context)
        rate = self._output_rate.read(status.num_output_tokens, time.monotonic())
        return vllm.GetLoadsResponse(
            timestamp=now().isoformat(),
            version=version("headway"),
            dp_rank_count=1,
            loads=[scheduler_load(status, rate)],
        )

    async def GetTokenizer(  # noqa: N802
        self,
        request: common_pb2.GetTokenizerRequest,  # noqa: ARG002
        context: Call,  # noqa: ARG002
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        if self._archive is None or (self._archive.done() and self._archive.exception() is not None):
            self._archive = asyncio.create_task(asyncio.to_thread(tokenizer_archive, self._model_directory))
        archive = await asyncio.shield(self._archive)  # other calls may wait for it too
        for chunk in archive.chunks():
            yield chunk

    async def Embed(self, request: vllm.EmbedRequest, context: Call) -> vllm.EmbedResponse:  # noqa: N802
        metadata = _metadata(context)
        self._last_request_at = now().timestamp()
        native = translate_embed(request, metadata)
        try:
            with self._abortable(request.request_id, native.tenant):
                (embedding,) = (await self._generation.Embed(native, context)).embeddings
        except CallRefusedError as refusal:
            raise in_callers_words(refusal) from refusal
        return vllm.EmbedResponse(
            embedding=embedding.values, prompt_tokens=embedding.prompt_tokens, embedding_dim=len(embedding.values)
        )

    async def FlushCache(  # noqa: N802
        self, request: common_pb2.FlushCacheRequest, context: Call
    ) -> common_pb2.FlushCacheResponse:
        """Drop unused cached blocks within ``timeout_s``."""
        if not 0 <= request.timeout_s <= _MOST_FLUSH_S:
            raise invalid_argument(
                "timeout_s", f"{request.timeout_s:g} is not allowed; allowed: 0 to {_MOST_FLUSH_S:g} seconds"
            )
        deadline = time.monotonic() + request.timeout_s
        while True:
            num_left = (await self._status(context, "flush")).num_cached_blocks
            if not num_left:
                return common_pb2.FlushCacheResponse(success=True, message="the cache is empty")
            if time.monotonic() >= deadline:
                message = f"{num_left} blocks are in use and stay cached; all others were dropped"
                return common_pb2.FlushCacheResponse(success=False, message=message)
            await asyncio.sleep(_FLUSH_INTERVAL_S)

    async def StartProfile(self, request: common_pb2.StartProfileRequest, context: Call) -> NoReturn:  # noqa: ARG002, N802
        raise _unimplemented("a running server takes no profiles")

    async def StopProfile(self, request: common_pb2.StopProfileRequest, context: Call) -> NoReturn:  # noqa: ARG002, N802
        raise _unimplemented("a running server takes no profiles")

    async def SubscribeKvEvents(  # noqa: N802
        self,
        request: common_pb2.SubscribeKvEventsRequest,
        context: Call,  # noqa: ARG002
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        """Events contain prompts, so the operator must allow them."""
        if not self._publishes_kv_events:
            raise _unimplemented("cache events are off; allowed: with --kv-events")
        start = request.start_sequence_number
        if start > MOST_START:
            raise invalid_argument("start_sequence_number", f"{start} is not allowed; allowed: at most {MOST_START}")
        async for batch in kv_event_batches(self._client, start):
            yield batch

    @contextmanager
    def _abortable(self, request_id: str, tenant: str) -> Iterator[None]:
        if not request_id or request_id in self._tenants_by_live_id:
            yield
            return
        self._tenants_by_live_id[request_id] = tenant
        try:
            yield
        finally:
            del self._tenants_by_live_id[request_id]

    async def _status(self, context: Call, method: str = "status") -> Status:
        status = await self._ask(method, context)
        if status is None:
            raise CallRefusedError(grpc.StatusCode.UNAVAILABLE, "the scheduler sent no status")
        return status

    async def _ask(self, method: str, context: Call, request_id: str = "") -> Status | None:
        reply = await ask(self._client, context, AdminCall(method=method, request_id=request_id))
        if reply.error and method == "flush":
            raise CallRefusedError(grpc.StatusCode.FAILED_PRECONDITION, reply.error)
        return reply.status


def _metadata(context: Call) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def _model_config(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    kinds = {"model_type": str, "bos_token_id": int, "pad_token_id": int}
    known = {name: config[name] for name, kind in kinds.items() if isinstance(config.get(name), kind)}
    architectures = config.get("architectures")
    if isinstance(architectures, list) and all(isinstance(name, str) for name in architectures):
        known["architectures"] = architectures
    return known


def _unimplemented(message: str) -> CallRefusedError:
    return CallRefusedError(grpc.StatusCode.UNIMPLEMENTED, message)
