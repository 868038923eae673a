"""The Generation service: checks a request, has its sequences generated, and streams what comes.

Owns: the life of a call, from arrival to the one ``finished`` per continuation, or to the abort of what nobody reads.
Must not know: ZeroMQ, how tokens become text, how errors are written on the wire (it raises ``CallRefusedError``).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Protocol, TypeAlias
from urllib.parse import quote

import grpc
import msgspec
import structlog

from headway_gateway.best_outputs import HeldOutput, ranked
from headway_gateway.client_patience import ClientPatience
from headway_gateway.constraint_check import Beginning, ConstraintChecker
from headway_gateway.continuation import Continuation, OutputText
from headway_gateway.encoding_lanes import EncodingLanes
from headway_gateway.ingress_link import LiveSequence
from headway_gateway.load_reports import trailer_of
from headway_gateway.pacing import WritePace
from headway_gateway.prompt_encoding import PromptEncoder
from headway_gateway.prompt_events import PromptEvents
from headway_gateway.scheduler_client import SchedulerClient, SchedulerUnavailableError
from headway_gateway.statistics import GatewayStatistics
from headway_gateway.statuses import CallRefusedError, invalid_argument, invalid_arguments, shown
from headway_gateway.tenant_rates import TenantRates
from headway_gateway.tokenization import TextModel
from headway_gateway.tracing import RequestTrace, Tracing, Untraced
from headway_gateway.validation import (
    GenerationSpec,
    chat_violations,
    check_prompt,
    check_request,
    require_token_ids,
    resolve_max_tokens,
)
from headway_gateway.wakeup import Wakeup
from headway_proto import generation_pb2 as api
from headway_proto import generation_pb2_grpc as api_grpc
from headway_proto.columns import encode_column
from headway_proto.ingress import (
    FINISH_LENGTH,
    FINISH_STOP,
    REJECT_ALREADY_EXISTS,
    REJECT_INVALID,
    REJECT_OUT_OF_RANGE,
    REJECT_OVERLOADED,
    REJECT_UNSUPPORTED,
    STATE_DRAINING,
    Finished,
    ModelInfo,
    Rejected,
    Submit,
)
from headway_proto.orca_pb2 import OrcaLoadReport
from headway_proto.sampling import NO_LOGPROBS

REQUEST_ID_METADATA_KEY = "headway-request-id"
_RETRY_S = 1.0
_PRINTABLE_ASCII = "".join(map(chr, range(0x20, 0x7F)))

_log = structlog.get_logger("headway.gateway.generation")

GenerateContext: TypeAlias = "grpc.aio.ServicerContext[api.GenerateRequest, api.GenerateResponse]"

_REFUSAL_CODES = {
    REJECT_INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    REJECT_OUT_OF_RANGE: grpc.StatusCode.OUT_OF_RANGE,
    REJECT_ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    REJECT_OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    REJECT_UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
}


class EventStream(Protocol):
    """What a generation needs of the call that it answers: a gRPC context, or what turns the events into another API's."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """What came with the call."""
        ...

    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, bytes], ...], /) -> None:
        """What goes with its end."""
        ...

    def time_remaining(self) -> float | None:
        """Seconds until the call's deadline, None without one."""
        ...

    def peer(self) -> str:
        """The connection that the call came by."""
        ...

    async def send_initial_metadata(self, initial_metadata: tuple[tuple[str, str], ...], /) -> None:
        """Tell the request's id, before any event."""
        ...

    async def write(self, message: api.GenerateResponse, /) -> None:
        """Take the next event; returns when there is room for another."""
        ...


class ServingLimits(msgspec.Struct, frozen=True):
    """What one gateway process takes on."""

    max_concurrent_streams: int
    unavailable_grace_s: float
    slow_client_s: float = 30.0
    max_tenant_requests_per_s: float = 0.0


class GenerationServicer(api_grpc.GenerationServicer):
    """Serves ``headway.v1.Generation`` for one model directory and one scheduler."""

    def __init__(
        self,
        *,
        client: SchedulerClient,
        text_model: TextModel,
        lanes: EncodingLanes,
        limits: ServingLimits,
        statistics: GatewayStatistics,
        tracing: Tracing | None = None,
        load_report: Callable[[], OrcaLoadReport] | None = None,
        constraints: ConstraintChecker,
    ) -> None:
        """``load_report`` is told with the end of each generation, where there is one."""
        self._tracing = tracing
        self._load_report = load_report
        self._client = client
        self._constraints = constraints
        self._text_model = text_model
        self._lanes = lanes
        self._prompts = PromptEncoder(text_model, lanes)
        self._limits = limits
        self._statistics = statistics
        self._live_request_ids: set[str] = set()
        self.num_open_streams = 0
        """Generate calls that are open."""
        self._is_draining = False
        self._became_idle = Wakeup()
        self.pace = WritePace()
        """How the streams keep up."""
        self._tenant_rates = TenantRates(limits.max_tenant_requests_per_s)

    def begin_drain(self) -> None:
        """Refuse new generations from now on; open ones go on."""
        self._is_draining = True

    async def wait_until_idle(self) -> None:
        """Return when no generation is open."""
        while self.num_open_streams:
            await self._became_idle.wait()

    async def Generate(self, request: api.GenerateRequest, context: GenerateContext) -> None:  # noqa: N802
        """Stream the continuations of one prompt. See generation.proto."""
        await self.generate(request, context)

    async def generate(
        self, request: api.GenerateRequest, events: EventStream, *, keeps_special_tokens: bool = False
    ) -> None:
        """Write the events of one generation; for ``Generate``, and for other APIs that are told in its words.

        With ``keeps_special_tokens``, text (in which stop strings are looked for) has the special tokens in it.

        Raises:
            CallRefusedError: why the call ends without all its events.
        """
        arrived_at = time.monotonic()
        with self._begin_trace(events, arrived_at) as trace:
            try:
                async with asyncio.timeout(events.time_remaining()):
                    async with self._counted():
                        await self._generate(
                            request, events, trace, arrived_at, keeps_special_tokens=keeps_special_tokens
                        )
            except TimeoutError:
                raise CallRefusedError(
                    grpc.StatusCode.DEADLINE_EXCEEDED, "the call's deadline passed before the output was complete"
                ) from None

    async def Tokenize(  # noqa: N802
        self,
        request: api.TokenizeRequest,
        context: "grpc.aio.ServicerContext[api.TokenizeRequest, api.TokenizeResponse]",  # noqa: ARG002
    ) -> api.TokenizeResponse:
        """Tokenise as Generate would. Texts longer than the model's context are refused, as Generate would."""
        kind = request.WhichOneof("input")
        if kind is None:
            raise invalid_argument("input", "there is none; allowed: one of text, chat")
        model = await self.serving_model()
        if kind == "text":
            return api.TokenizeResponse(token_ids=await self._prompts.encode_text(request.text, model))
        wrong = dict(chat_violations(request.chat))
        if wrong:
            raise invalid_arguments(wrong)
        return api.TokenizeResponse(token_ids=await self._prompts.encode_chat(request.chat, model))

    async def Detokenize(  # noqa: N802
        self,
        request: api.DetokenizeRequest,
        context: "grpc.aio.ServicerContext[api.DetokenizeRequest, api.DetokenizeResponse]",  # noqa: ARG002
    ) -> api.DetokenizeResponse:
        """The text that Generate would give for these output tokens."""
        model = await self.serving_model()
        require_token_ids(request.token_ids, "token_ids", model.vocab_size)
        return api.DetokenizeResponse(text=await self._lanes.decode(request.token_ids))

    async def GetModel(  # noqa: N802
        self,
        request: api.GetModelRequest,  # noqa: ARG002
        context: "grpc.aio.ServicerContext[api.GetModelRequest, api.GetModelResponse]",  # noqa: ARG002
    ) -> api.GetModelResponse:
        """What is served."""
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
        )

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        if self._is_draining:
            raise CallRefusedError(grpc.StatusCode.UNAVAILABLE, "this gateway is draining", reason="draining")
        if self.num_open_streams >= self._limits.max_concurrent_streams:
            raise CallRefusedError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self.num_open_streams} streams are open; allowed: {self._limits.max_concurrent_streams}",
                retry_after_s=_RETRY_S,
                reason="too_many_streams",
            )
        self.num_open_streams += 1
        try:
            with self.pace.writing():
                yield
        finally:
            self.num_open_streams -= 1
            if not self.num_open_streams:
                self._became_idle.ring()

    def _begin_trace(self, events: EventStream, arrived_at: float) -> RequestTrace:
        if self._tracing is None:
            return Untraced()
        return self._tracing.begin(tuple(events.invocation_metadata() or ()), arrived_at)

    async def _generate(
        self,
        request: api.GenerateRequest,
        events: EventStream,
        trace: RequestTrace,
        arrived_at: float,
        *,
        keeps_special_tokens: bool,
    ) -> None:
        model = await self.serving_model(for_new_work=True)
        spec = check_request(request, model)
        if spec.request_id in self._live_request_ids:
            raise CallRefusedError(
                grpc.StatusCode.ALREADY_EXISTS, f"request_id: {shown(spec.request_id)} is the id of a live request"
            )
        structlog.contextvars.bind_contextvars(request_id=spec.request_id)
        trace.note_spec(spec, model.name, is_chat=request.HasField("chat"))
        self._require_rate(spec.tenant)
        self._live_request_ids.add(spec.request_id)
        beginning = Beginning()
        try:
            prompt_ids = await self._timed_encoding(request, model, trace)
            max_tokens = resolve_max_tokens(spec, len(prompt_ids), model)
            prompt_text = await self._text_of(request, prompt_ids) if spec.echoes else ""
            if spec.sampling.constraint is not None:
                began_at = time.monotonic()
                # Without tenants, what comes by one connection is one caller's.
                beginning = await self._constraints.begin(spec.sampling.constraint, model, spec.tenant or events.peer())
                self._statistics.constraint_s.observe(time.monotonic() - began_at)
            call = GenerationCall(
                client=self._client,
                text_model=self._text_model,
                events=events,
                pace=self.pace,
                statistics=self._statistics,
                arrived_at=arrived_at,
                trace=trace,
                slow_client_s=self._limits.slow_client_s,
                spec=spec,
                prompt_ids=prompt_ids,
                prompt_text=prompt_text,
                max_tokens=max_tokens,
                end_ids=frozenset(() if spec.ignore_eos else model.eos_token_ids)
                | frozenset(spec.sampling.stop_token_ids),
                keeps_special_tokens=keeps_special_tokens,
                beginning=beginning,
            )
            await call.run()
            if self._load_report is not None:
                events.set_trailing_metadata((trailer_of(self._load_report(), **call.cost()),))
        finally:
            beginning.is_over()
            self._live_request_ids.discard(spec.request_id)

    def _require_rate(self, tenant: str) -> None:
        wait_s = self._tenant_rates.take(tenant, time.monotonic())
        if wait_s:
            raise CallRefusedError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"tenant: {shown(tenant)} begins more requests than allowed; "
                f"allowed: {self._limits.max_tenant_requests_per_s:g} per second",
                retry_after_s=wait_s,
                reason="tenant_rate",
            )

    async def serving_model(self, *, for_new_work: bool = False) -> ModelInfo:
        """The model, waiting a short while for one.

        Raises:
            CallRefusedError: UNAVAILABLE, there is none.
        """
        try:
            model = await self._client.wait_until_serving(self._limits.unavailable_grace_s)
        except SchedulerUnavailableError as error:
            raise CallRefusedError(grpc.StatusCode.UNAVAILABLE, str(error), retry_after_s=_RETRY_S) from error
        if for_new_work and self._client.link.scheduler_state == STATE_DRAINING:
            raise CallRefusedError(grpc.StatusCode.UNAVAILABLE, "the scheduler is draining", reason="draining")
        if self._text_model.vocab_size > model.vocab_size:
            raise CallRefusedError(
                grpc.StatusCode.UNAVAILABLE, "the gateway's tokenizer does not belong to the served model"
            )
        return model

    async def _timed_encoding(self, request: api.GenerateRequest, model: ModelInfo, trace: RequestTrace) -> list[int]:
        began_at = time.monotonic()
        prompt_ids = await self._encode_prompt(request, model)
        ended_at = time.monotonic()
        if request.WhichOneof("prompt") != "token_ids":
            self._statistics.encoding_s.observe(ended_at - began_at)
        trace.note_prompt(len(prompt_ids), began_at, ended_at)
        return prompt_ids

    async def _encode_prompt(self, request: api.GenerateRequest, model: ModelInfo) -> list[int]:
        kind = request.WhichOneof("prompt")
        if kind == "text":
            field, prompt_ids = "text", await self._prompts.encode_text(request.text, model)
        elif kind == "chat":
            field, prompt_ids = "chat", await self._prompts.encode_chat(request.chat, model)
        else:
            field, prompt_ids = "token_ids.ids", list(request.token_ids.ids)
        check_prompt(prompt_ids, field, model)
        return prompt_ids

    async def _text_of(self, request: api.GenerateRequest, prompt_ids: list[int]) -> str:
        """The prompt as text: what came, or what its tokens spell."""
        return request.text if request.HasField("text") else await self._lanes.decode(prompt_ids)


class GenerationCall:
    """One accepted-to-be Generate call: its continuations, and the writing of their news."""

    def __init__(
        self,
        *,
        client: SchedulerClient,
        text_model: TextModel,
        events: EventStream,
        pace: WritePace,
        statistics: GatewayStatistics,
        arrived_at: float,
        trace: RequestTrace,
        slow_client_s: float,
        spec: GenerationSpec,
        prompt_ids: list[int],
        prompt_text: str,
        max_tokens: int,
        end_ids: frozenset[int],
        keeps_special_tokens: bool,
        beginning: Beginning,
    ) -> None:
        """``end_ids`` are the tokens that end an output; ``arrived_at`` is when the call came, in monotonic seconds."""
        self._client = client
        self._text_model = text_model
        self._events = events
        self._pace = pace
        self._statistics = statistics
        self._arrived_at = arrived_at
        self._trace = trace
        self._slow_client_s = slow_client_s
        self._spec = spec
        self._num_prompt_tokens = len(prompt_ids)
        self._prompt_column = encode_column(prompt_ids)
        self._max_tokens = max_tokens
        self._end_ids = end_ids
        self._keeps_special_tokens = keeps_special_tokens
        self._beginning = beginning
        self._wakeup = Wakeup()
        self._continuations = [self._continuation(index) for index in range(spec.num_continuations)]
        self._prompt: PromptEvents | None = None
        tells_logprobs = spec.sampling.prompt_logprobs != NO_LOGPROBS
        if tells_logprobs or spec.echoes:
            sequence = self._continuations[0].sequence if tells_logprobs else None
            self._prompt = PromptEvents(prompt_ids, prompt_text, sequence)

    async def run(self) -> None:
        """Stream until every continuation has ended.

        Raises:
            CallRefusedError: the scheduler refused a continuation before any had begun.
        """
        sequences = [continuation.sequence for continuation in self._continuations]
        try:
            self._client.submit([sequence for sequence in sequences if sequence.end is None])
            # Only now, so that the scheduler works meanwhile.
            await self._events.send_initial_metadata(((REQUEST_ID_METADATA_KEY, _ascii(self._spec.request_id)),))
            await self._until_begun()
            await self._events.write(api.GenerateResponse(accepted=self._accepted()))
            _log.debug("generation accepted", prompt_tokens=self._num_prompt_tokens, tenant=self._spec.tenant)
            await self._stream()
        finally:
            # Whatever ended the call (its client, its deadline, an error): the scheduler hears of it before the
            # sequences are forgotten here, or it would go on for nobody. Ended ones are passed over.
            self._client.abort(sequences)
            self._trace.note_outputs(
                (continuation.times() for continuation in self._continuations), self._num_cached_tokens
            )

    def cost(self) -> dict[str, float]:
        """What it came to, in tokens."""
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "output_tokens": sum(continuation.num_told for continuation in self._continuations),
        }

    async def _until_begun(self) -> None:
        while not any(continuation.has_begun for continuation in self._continuations):
            for continuation in self._continuations:
                if continuation.refusal is not None:
                    raise _refused(continuation.refusal)
            await self._wakeup.wait()

    async def _stream(self) -> None:
        """Write what comes.

        Raises:
            CallRefusedError: the client has not read for too long. Until then what comes is joined, so it never grows
                beyond one output; but it keeps its blocks and its place.
        """
        try:
            async with ClientPatience(self._slow_client_s) as patience:
                await (self._write_best(patience) if self._spec.is_choice else self._write_all(patience))
        except TimeoutError:
            if not patience.has_ended:
                raise
            raise CallRefusedError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the client has read nothing for {self._slow_client_s:g} s",
                reason="slow_client",
            ) from None

    async def _write_all(self, patience: ClientPatience) -> None:
        open_continuations = list(self._continuations)
        while open_continuations:
            for continuation in open_continuations:
                responses = self._news_of(continuation)
                if continuation.is_over and continuation.sequence.end is None:
                    self._client.abort((continuation.sequence,))  # A stop string: the scheduler cannot know of it.
                await self._write(continuation, responses, patience)
            patience.rest()
            open_continuations = [one for one in open_continuations if not one.is_over]
            if open_continuations:
                pause_s = self._pace.pause_s
                if pause_s:
                    await asyncio.sleep(pause_s)
                await self._wakeup.wait()

    async def _write_best(self, patience: ClientPatience) -> None:
        """Write the prompt as it comes, and the best outputs when all have ended."""
        shows_logprobs = self._spec.sampling.logprobs != NO_LOGPROBS
        outputs = [
            HeldOutput(one, self._spec.sampling_of(one.index).seed, shows_logprobs=shows_logprobs)
            for one in self._continuations
        ]
        left = outputs
        while left:
            for output in left:
                responses = self._news_of(output.continuation)
                if output.continuation.is_over and output.continuation.sequence.end is None:
                    self._client.abort((output.continuation.sequence,))
                of_prompt = [response for response in responses if response.HasField("prompt")]
                output.hold(responses[len(of_prompt) :])
                await self._write(output.continuation, of_prompt, patience)
            patience.rest()
            left = [output for output in left if not output.continuation.is_over]
            if left:
                await self._wakeup.wait()
        for index, output in enumerate(ranked(outputs)[: self._spec.num_told]):
            await self._write(output.continuation, output.responses(index), patience)

    async def _write(
        self, continuation: Continuation, responses: Iterable[api.GenerateResponse], patience: ClientPatience
    ) -> None:
        for response in responses:
            patience.begin_write()
            await self._events.write(response)
            self._note_written(continuation, response)

    def _news_of(self, continuation: Continuation) -> list[api.GenerateResponse]:
        """What the client must be told of a continuation now, and of the prompt before the first."""
        responses = continuation.take()
        if self._prompt is not None and continuation.index == 0:
            return [*self._prompt.take(), *responses]
        return responses

    def _note_written(self, continuation: Continuation, response: api.GenerateResponse) -> None:
        if response.HasField("prompt"):
            return
        if response.HasField("delta"):
            now = time.monotonic()
            gap_s = continuation.note_written(now)
            self._statistics.note_delta(len(response.delta.token_ids), gap_s, now - self._arrived_at)
            return
        finished, reason = response.finished, continuation.reason
        self._statistics.ends[reason,] += 1
        if finished.error:
            _log.warning("generation failed", continuation=finished.index, error=finished.error)
        else:
            _log.debug(
                "generation finished",
                continuation=finished.index,
                reason=reason,
                output_tokens=finished.usage.output_tokens,
                ttft_ms=finished.timings.ttft_ms,
            )

    def _continuation(self, index: int) -> Continuation:
        spec = self._spec
        held = spec.held_tokens or ()
        submission = Submit(
            handle=self._client.next_handle(),
            request_id=spec.request_id,
            index=index,
            token_ids=self._prompt_column,
            num_prompt_tokens=self._num_prompt_tokens,
            max_tokens=self._max_tokens,
            sampling=spec.sampling_of(index),
            ignore_eos=spec.ignore_eos,
            priority=spec.priority,
            tenant=spec.tenant,
            ttft_slo_ms=spec.ttft_slo_ms,
            itl_slo_ms=spec.itl_slo_ms,
            traceparent=self._trace.traceparent,
        )
        sequence = LiveSequence(submission, held, self._wakeup.ring)
        detokenizer = self._text_model.new_detokenizer(keeps_special_tokens=self._keeps_special_tokens)
        text = OutputText(detokenizer, spec.stops, spec.sampling.min_tokens)
        text.push(sequence.tokens)
        sequence.end = self._end_of_held(held, text)
        continuation = Continuation(
            index=index, sequence=sequence, text=text, num_prompt_tokens=self._num_prompt_tokens
        )

        def on_news() -> None:
            continuation.note_arrival()
            if len(sequence.tokens) > sequence.num_held:
                self._beginning.has_begun()
            self._wakeup.ring()

        sequence.on_news = on_news
        return continuation

    def _end_of_held(self, held: tuple[int, ...], text: OutputText) -> Finished | None:
        """How resumed tokens end the output already, if they do: then only the end is left to tell.

        Raises:
            CallRefusedError: OUT_OF_RANGE, tokens are held beyond the end.
        """
        end_place = next((place for place, token_id in enumerate(held) if token_id in self._end_ids), len(held))
        num_until_end = min(text.num_tokens, end_place + 1)
        if num_until_end < len(held):
            raise CallRefusedError(
                grpc.StatusCode.OUT_OF_RANGE,
                f"resume.token_ids: {len(held)} tokens are held; the output ended after {num_until_end}",
            )
        handle = 0
        if end_place < len(held):
            return Finished(
                handle=handle, reason=FINISH_STOP, num_output_tokens=len(held), stop_token_id=held[end_place]
            )
        if text.matched_stop is not None:
            return Finished(handle=handle, reason=FINISH_STOP, num_output_tokens=len(held))
        if held and len(held) == self._max_tokens:
            return Finished(handle=handle, reason=FINISH_LENGTH, num_output_tokens=len(held))
        return None

    @property
    def _num_cached_tokens(self) -> int:
        cached = (continuation.sequence.num_cached_tokens or 0 for continuation in self._continuations)
        return min(max(cached), self._num_prompt_tokens)

    def _accepted(self) -> api.Accepted:
        return api.Accepted(
            request_id=self._spec.request_id,
            prompt_tokens=self._num_prompt_tokens,
            cached_tokens=self._num_cached_tokens,
            seeds=[self._spec.sampling_of(index).seed for index in range(self._spec.num_continuations)],
        )


def _ascii(request_id: str) -> str:
    """Metadata values are ASCII; what is beyond is percent-encoded."""
    return quote(request_id, safe=_PRINTABLE_ASCII)


def _refused(rejected: Rejected) -> CallRefusedError:
    message = rejected.message or rejected.reason
    retry_after_s = rejected.retry_after_ms / 1000 if rejected.retry_after_ms else None
    if rejected.reason == REJECT_OVERLOADED and retry_after_s is None:
        retry_after_s = _RETRY_S
    return CallRefusedError(
        _REFUSAL_CODES.get(rejected.reason, grpc.StatusCode.UNAVAILABLE),
        f"{rejected.field}: {message}" if rejected.field else message,
        violations=((rejected.field, message),) if rejected.field and rejected.reason == REJECT_INVALID else (),
        retry_after_s=retry_after_s,
        reason=f"scheduler_{rejected.reason}",
    )
