"""A Headway gateway as a target, over gRPC.

It uses the stub, because a bench must see a stream break. One channel is one TCP connection and one lock, so several
share the load.
"""

# ruff: noqa: D102 (``Target`` describes the methods)

import itertools
from typing import Any

import grpc
import grpc.aio

from headway.client import Endpoint
from headway_lab.bench.records import CUT_SHORT, Answer, RequestFailed, ServerTimings
from headway_lab.bench.target import TargetError, TargetInfo
from headway_lab.workload.requests import PRIORITY_NAMES, PlannedRequest, PromptSource
from headway_proto import generation_pb2 as api
from headway_proto import generation_pb2_grpc as api_grpc

_GENERATE = "/headway.v1.Generation/Generate"
_OPEN_TIMEOUT_S = 10.0
# Without this option all channels to one address are one connection.
_OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
_PRIORITIES = {number: f"PRIORITY_{name.upper()}" for number, name in PRIORITY_NAMES.items()}
_GOOD_ENDS = frozenset({api.FINISH_REASON_STOP, api.FINISH_REASON_LENGTH})


class HeadwayTarget:
    """See ``Target``."""

    def __init__(
        self, endpoint: Endpoint, *, num_connections: int, seed: int, temperature: float, ignore_eos: bool
    ) -> None:
        self._endpoint = endpoint
        self._num_connections = num_connections
        self._seed = seed
        self._temperature = temperature
        self._ignore_eos = ignore_eos
        self._channels: list[grpc.aio.Channel] = []

    async def open(self) -> TargetInfo:
        self._channels = [self._endpoint.aio_channel(_OWN_CONNECTION) for _ in range(self._num_connections)]
        stub: Any = api_grpc.GenerationStub(self._channels[0])  # type: ignore[no-untyped-call]
        try:
            model: api.GetModelResponse = await stub.GetModel(
                api.GetModelRequest(), timeout=_OPEN_TIMEOUT_S, metadata=self._endpoint.metadata()
            )
        except grpc.aio.AioRpcError as error:
            raise TargetError(
                f"{self._endpoint.address}: {error.code().name}: {' '.join((error.details() or '').split())}"
            ) from None
        self._prompts = PromptSource(self._seed, model.vocab_size)
        calls: list[Any] = [
            channel.unary_stream(_GENERATE, response_deserializer=api.GenerateResponse.FromString)
            for channel in self._channels
        ]
        self._calls = itertools.cycle(calls)
        return TargetInfo(
            model=model.name,
            address=self._endpoint.address,
            runs_on=f"{model.backend}/{model.device}/{model.dtype}",
            context_length=model.max_model_len,
            counted_by="token ids",
        )

    def prepare(self, request: PlannedRequest) -> bytes:
        message = api.GenerateRequest(
            token_ids=api.TokenIds(ids=self._prompts.prompt(request).tolist()),
            sampling=api.SamplingParams(
                max_tokens=request.num_output_tokens,
                temperature=self._temperature,
                ignore_eos=self._ignore_eos,
                seed=request.number,
            ),
            priority=_PRIORITIES[request.priority],
            ttft_slo_ms=request.objectives.ttft_slo_ms,
            itl_slo_ms=request.objectives.itl_slo_ms,
            tenant=request.tenant,
        )
        return message.SerializeToString()

    async def send(self, prepared: bytes, answer: Answer) -> None:
        call = next(self._calls)(prepared, metadata=self._endpoint.metadata())
        finished: api.Finished | None = None
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                if message.HasField("delta"):
                    if num_tokens := len(message.delta.token_ids):
                        answer.tokens_came(num_tokens)
                elif message.HasField("finished"):
                    finished = message.finished
        except grpc.aio.AioRpcError as error:
            raise RequestFailed(error.code().name, error.details() or "") from None
        finally:
            call.cancel()  # if it has not ended
        if finished is None:
            raise RequestFailed(CUT_SHORT, "the stream ended before the answer")
        _take_end(finished, answer)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


def _take_end(finished: api.Finished, answer: Answer) -> None:
    usage, timings = finished.usage, finished.timings
    answer.num_prompt_tokens, answer.num_output_tokens = usage.prompt_tokens, usage.output_tokens
    answer.num_cached_tokens = usage.cached_tokens
    answer.server = ServerTimings(queue_ms=timings.queue_ms, ttft_ms=timings.ttft_ms, mean_itl_ms=timings.mean_itl_ms)
    if finished.reason not in _GOOD_ENDS:
        raise RequestFailed(api.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_"), finished.error)
