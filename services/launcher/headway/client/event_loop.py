"""The client for asyncio."""

# ruff: noqa: D102 (``Client`` describes the same methods)

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc
import grpc.aio

from headway.client import calls
from headway.client.answers import Delta, GenerationResult, PromptTokens
from headway.client.calls import AnswerT, Call
from headway.client.connection import DEFAULT_ADDRESS, DEFAULT_RETRY_S, Connection, Endpoint
from headway.client.errors import StreamCancelledError, own_errors
from headway.client.generation import Generation, Patience
from headway.client.requests import BatchOptions, ChatMessage, EmbedOptions, GenerateOptions, Input, Prompt
from headway_proto import admin_pb2, generation_pb2


class AsyncGenerationStream:
    """The asyncio form of ``GenerationStream``."""

    def __init__(self, connection: Connection, generation: Generation) -> None:
        self._connection = connection
        self._generation = generation
        self._call = connection.open_stream(generation)

    @property
    def request_id(self) -> str:
        return self._generation.request_id

    @property
    def prompt(self) -> PromptTokens:
        return self._generation.prompt

    def cancel(self) -> None:
        self._generation.is_cancelled = True
        self._call.cancel()

    async def text(self) -> str:
        return (await self.result()).text

    async def result(self) -> GenerationResult:
        async for _ in self:
            pass
        return self._generation.result()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while True:
            try:
                while (response := await self._call.read()) is not grpc.aio.EOF:
                    delta = self._generation.accept(response)
                    if delta is not None:
                        return delta
            except grpc.RpcError as error:
                await asyncio.sleep(self._generation.delay_before_resuming(error))
                self._generation.require_not_cancelled()
                self._call = self._connection.open_stream(self._generation)
            except asyncio.CancelledError:
                if not self._generation.is_cancelled:
                    self._call.cancel()
                    raise
                raise StreamCancelledError(grpc.StatusCode.CANCELLED, "the stream was cancelled") from None
            else:
                raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class AsyncClient:
    """The asyncio form of ``Client``, for one event loop."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        token: str | None = None,
        tls: bool = False,
        root_certificates: bytes | None = None,
        client_certificate: tuple[bytes, bytes] | None = None,
        retry_s: float = DEFAULT_RETRY_S,
    ) -> None:
        patience = Patience(retry_s)
        endpoint = Endpoint(address, token, tls, root_certificates, client_certificate)
        self._channel = endpoint.aio_channel()
        self._connection = Connection(self._channel, endpoint.metadata(), patience)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncGenerationStream:
        return AsyncGenerationStream(self._connection, self._connection.generation(prompt, options))

    async def embed(self, inputs: Sequence[Input], **options: Unpack[EmbedOptions]) -> generation_pb2.EmbedResponse:
        return await self._call(calls.embed(inputs, options))

    async def score(
        self, prompt: Input, continuations: Sequence[Input], **options: Unpack[BatchOptions]
    ) -> generation_pb2.ScoreResponse:
        return await self._call(calls.score(prompt, continuations, options))

    async def tokenize(self, text: str | Sequence[ChatMessage]) -> list[int]:
        return await self._call(calls.tokenize(text))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return await self._call(calls.detokenize(token_ids))

    async def model(self) -> generation_pb2.GetModelResponse:
        return await self._call(calls.model())

    async def status(self) -> admin_pb2.GetStatusResponse:
        return await self._call(calls.status())

    async def requests(self) -> list[admin_pb2.RequestState]:
        return await self._call(calls.requests())

    async def explain(self, request_id: str) -> admin_pb2.ExplainResponse:
        return await self._call(calls.explain(request_id))

    async def pause(self) -> None:
        await self._call(calls.pause())

    async def resume(self) -> None:
        await self._call(calls.resume())

    async def drain(self) -> None:
        await self._call(calls.drain())

    async def drain_executor(self, executor: int) -> None:
        await self._call(calls.drain_executor(executor))

    async def undrain_executor(self, executor: int) -> None:
        await self._call(calls.undrain_executor(executor))

    async def set_executor_role(self, executor: int, role: str) -> None:
        await self._call(calls.set_executor_role(executor, role))

    async def load_adapter(self, name: str, directory: str) -> None:
        await self._call(calls.load_adapter(name, directory))

    async def unload_adapter(self, name: str) -> None:
        await self._call(calls.unload_adapter(name))

    async def adapters(self) -> tuple[admin_pb2.LoadedAdapter, ...]:
        return await self._call(calls.adapters())

    async def cancel(self, request_id: str) -> None:
        await self._call(calls.cancel(request_id))

    async def pin_prefix(self, name: str, prefix: Prompt, *, tenant: str = "") -> admin_pb2.PinnedPrefix:
        return await self._call(calls.pin_prefix(name, prefix, tenant))

    async def unpin_prefix(self, name: str) -> None:
        await self._call(calls.unpin_prefix(name))

    async def pinned_prefixes(self, *, executor: int = 0) -> list[admin_pb2.PinnedPrefix]:
        return await self._call(calls.pinned_prefixes(executor))

    async def read_flight_log(self) -> AsyncIterator[admin_pb2.ReadFlightLogResponse]:
        with own_errors():
            async for piece in self._connection.open_flight_log():
                yield piece

    async def wait_ready(self, timeout_s: float = 60.0) -> None:
        poll = calls.ReadinessPoll(timeout_s)
        while not await self._is_ready(poll):
            poll.require_time_left()
            await asyncio.sleep(calls.READY_POLL_S)

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, call: Call[AnswerT]) -> AnswerT:
        with own_errors():
            response = await self._connection.start(call)
        return self._connection.answer(call, response)

    async def _is_ready(self, poll: calls.ReadinessPoll) -> bool:
        call = poll.next_call()
        try:
            return self._connection.answer(call, await self._connection.start(call))
        except grpc.RpcError as error:
            calls.require_may_wait(error)
            return False
