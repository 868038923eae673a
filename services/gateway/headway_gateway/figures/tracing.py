"""OpenTelemetry traces of requests, with GenAI semantic conventions. Must not know: how requests are served.

docs/observability.md lists the spans. The scheduler reports durations, placed to end when the gateway got them. A
thread exports, and drops spans beyond its queue.
"""

import logging
import time
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import grpc
import structlog

from headway_gateway.link.live_sequence import LiveSequence
from headway_gateway.requests.validation import CheckedRequest
from headway_gateway.statuses import CallRefusedError
from headway_gateway.text.continuation import Continuation
from headway_process.installation import install_advice
from headway_proto import generation_pb2 as api
from headway_proto.ingress import PRIORITY_NORMAL, Finished
from headway_proto.wording import shown

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_EXPORT_TIMEOUT_S = 2.0
_SERVER_FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""A server's errors, by the gRPC conventions."""

_log = structlog.get_logger("headway.gateway.traces")

GRPC, HTTP = "grpc", "http"


InputsRequest = api.EmbedRequest | api.ScoreRequest


class EndedInput(NamedTuple):
    """One input of a call with several, and when its end came, in monotonic seconds."""

    sequence: LiveSequence
    ended_at: float


class RequestTrace(Protocol):
    """One call's trace."""

    @property
    def traceparent(self) -> str:
        """For the scheduler."""

    def record_request(self, checked: CheckedRequest, model_name: str) -> None:
        """Record the request's parameters."""

    def record_inputs(self, operation: str, request: InputsRequest, request_id: str, model_name: str) -> None:
        """Record the parameters of a call with several inputs."""

    def record_prompt(self, num_prompt_tokens: int, began_at: float, ended_at: float) -> None:
        """Record the encoding, in monotonic seconds."""

    def record_outputs(self, outputs: Iterable[Continuation], num_cached_tokens: int) -> None:
        """Record the continuations, ended or not."""

    def record_ended(self, inputs: Iterable[EndedInput]) -> None:
        """Record the inputs that have ended."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class Untraced:
    """No trace: every method does nothing."""

    traceparent = ""

    def record_request(self, checked: CheckedRequest, model_name: str) -> None:
        """Nothing."""

    def record_inputs(self, operation: str, request: InputsRequest, request_id: str, model_name: str) -> None:
        """Nothing."""

    def record_prompt(self, num_prompt_tokens: int, began_at: float, ended_at: float) -> None:
        """Nothing."""

    def record_outputs(self, outputs: Iterable[Continuation], num_cached_tokens: int) -> None:
        """Nothing."""

    def record_ended(self, inputs: Iterable[EndedInput]) -> None:
        """Nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing."""


class Tracing:
    """Sends traces to an OTLP receiver.

    Args:
        endpoint: http://HOST:PORT, or https://HOST:PORT.
        server_address: HOST:PORT of the gateway's gRPC.
        sample_ratio: share of requests to trace, if the caller does not decide.

    Raises:
        ValueError: OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str, server_address: str, sample_ratio: float) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise ValueError(
                f"otel_endpoint: {shown(endpoint)} needs OpenTelemetry; allowed: '', or {install_advice('traces')}"
            ) from None
        _use_our_log()
        self.addresses = {GRPC: server_address, HTTP: server_address}
        """HOST:PORT by protocol; set again once the ports are known."""
        self._propagator = TraceContextTextMapPropagator()
        exporter = OTLPSpanExporter(
            endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=_EXPORT_TIMEOUT_S
        )
        self._processor = BatchSpanProcessor(exporter)
        self._providers: dict[str, TracerProvider] = {}
        for service in ("gateway", "scheduler", "executor"):
            provider = TracerProvider(
                sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
                resource=Resource.create({"service.name": f"headway-{service}"}),
                shutdown_on_exit=False,
            )
            provider.add_span_processor(self._processor)
            self._providers[service] = provider

    def begin(
        self, method: str, peer: str, metadata: Iterable[tuple[str, str | bytes]], arrived_at: float
    ) -> RequestTrace:
        """Return the trace of a call of ``method``; ``peer`` names the connection."""
        carrier = {key: value for key, value in metadata if isinstance(value, str)}
        parent = self._propagator.extract(carrier)
        tracers = {name: provider.get_tracer("headway") for name, provider in self._providers.items()}
        protocol = HTTP if peer.startswith(HTTP) else GRPC
        host, _, port = self.addresses[protocol].rpartition(":")
        call: dict[str, Any] = {"server.address": host, "server.port": int(port)}
        if protocol == GRPC:
            call |= {"rpc.system": "grpc", "rpc.service": "headway.v1.Generation", "rpc.method": method}
        else:
            call |= {"network.protocol.name": "http", "http.request.method": "POST"}
        return _Traced(tracers, parent, arrived_at, method, call)

    def close(self) -> None:
        """Send the rest. This blocks."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]


class _Traced:
    def __init__(
        self, tracers: "dict[str, Tracer]", parent: Any, arrived_at: float, method: str, call: dict[str, Any]
    ) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._clock = _WallClock()
        self._tracers = tracers
        self._root = tracers["gateway"].start_span(
            method.lower(),
            context=parent,
            kind=SpanKind.SERVER,
            start_time=self._clock.ns(arrived_at),
            attributes={"gen_ai.provider.name": "headway", **call},
        )
        self._is_grpc = "rpc.system" in call
        self._context = set_span_in_context(self._root)
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, self._context)
        self.traceparent = carrier.get("traceparent", "")

    def record_request(self, checked: CheckedRequest, model_name: str) -> None:
        request, sampling = checked.request, checked.sampling
        operation = "chat" if request.HasField("chat") else "text_completion"
        self._name(operation, request, checked.request_id, model_name)
        attributes: dict[str, Any] = {
            "gen_ai.request.stream": True,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.choice.count": checked.num_continuations,
            "gen_ai.request.presence_penalty": sampling.presence_penalty,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        }
        if checked.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = checked.max_tokens
        self._root.set_attributes(attributes)

    def record_inputs(self, operation: str, request: InputsRequest, request_id: str, model_name: str) -> None:
        self._name(operation, request, request_id, model_name)

    def record_prompt(self, num_prompt_tokens: int, began_at: float, ended_at: float) -> None:
        self._root.set_attribute("gen_ai.usage.input_tokens", num_prompt_tokens)
        self._span("gateway", "tokenize", self._context, began_at, ended_at, {})

    def record_outputs(self, outputs: Iterable[Continuation], num_cached_tokens: int) -> None:
        outputs = list(outputs)
        self._root.set_attributes(
            {
                "gen_ai.usage.output_tokens": sum(output.num_sent for output in outputs),
                "gen_ai.usage.cache_read.input_tokens": num_cached_tokens,
                "gen_ai.response.finish_reasons": [output.reason for output in outputs if output.reason],
            }
        )
        first = min(
            (output.first_written_at for output in outputs if output.first_written_at is not None), default=None
        )
        if first is not None:
            self._root.add_event("first_token", timestamp=self._clock.ns(first))
        for output in outputs:
            if output.total_ms:
                end, timings = output.sequence.end, output.timings()
                times = _ScheduleTimes(
                    arrived_at=max(output.submitted_at, output.ended_at - output.total_ms / 1e3),
                    ended_at=output.ended_at,
                    queue_ms=timings.queue_ms,
                    ttft_ms=timings.ttft_ms,
                    preemptions=timings.preemptions,
                    prefill_device_ms=end.prefill_device_ms if isinstance(end, Finished) else 0.0,
                    decode_device_ms=end.decode_device_ms if isinstance(end, Finished) else 0.0,
                )
                self._record_schedule(output.index, output.num_sent, times)

    def record_ended(self, inputs: Iterable[EndedInput]) -> None:
        num_cached_tokens = 0
        for sequence, ended_at in inputs:
            num_cached_tokens += sequence.num_cached_tokens or 0
            end = sequence.end
            if isinstance(end, Finished):
                times = _ScheduleTimes(
                    arrived_at=ended_at - end.total_ms / 1e3,
                    ended_at=ended_at,
                    queue_ms=end.queue_ms,
                    ttft_ms=0.0,  # nobody sees the token that it samples: all of its time is the prompt's
                    preemptions=end.num_preemptions,
                    prefill_device_ms=end.prefill_device_ms + end.decode_device_ms,
                    decode_device_ms=0.0,
                )
                self._record_schedule(sequence.submission.index, 0, times)
        self._root.set_attribute("gen_ai.usage.cache_read.input_tokens", num_cached_tokens)

    def __enter__(self) -> Self:
        context = self._root.get_span_context()
        structlog.contextvars.bind_contextvars(trace_id=f"{context.trace_id:032x}", span_id=f"{context.span_id:016x}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        from opentelemetry.trace import Status, StatusCode

        code = _status_of(error)
        if self._is_grpc:
            self._root.set_attribute("rpc.grpc.status_code", code.value[0])
        if code is not grpc.StatusCode.OK:
            self._root.set_attribute("error.type", code.name)
        if code in _SERVER_FAULTS:
            self._root.set_status(Status(StatusCode.ERROR, str(error) if isinstance(error, CallRefusedError) else ""))
        self._root.end()

    def _name(
        self, operation: str, request: api.GenerateRequest | InputsRequest, request_id: str, model_name: str
    ) -> None:
        self._root.update_name(f"{operation} {model_name}")
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": model_name,
            "gen_ai.response.model": model_name,
            "gen_ai.response.id": request_id,
            "headway.priority": request.priority or PRIORITY_NORMAL,
        }
        if request.tenant:
            attributes["headway.tenant"] = request.tenant
        self._root.set_attributes(attributes)

    def _record_schedule(self, index: int, num_output_tokens: int, times: "_ScheduleTimes") -> None:
        from opentelemetry.trace import set_span_in_context

        arrived_at, ended_at = times.arrived_at, times.ended_at
        started_at = min(arrived_at + times.queue_ms / 1e3, ended_at)
        first_at = min(arrived_at + times.ttft_ms / 1e3, ended_at) if times.ttft_ms else ended_at
        attributes = {
            "headway.continuation": index,
            "headway.preemptions": times.preemptions,
            "gen_ai.usage.output_tokens": num_output_tokens,
        }
        span = self._begun("scheduler", "schedule", self._context, arrived_at, attributes)
        within = set_span_in_context(span)
        self._span("scheduler", "queue", within, arrived_at, started_at, {})
        self._span("executor", "prefill", within, started_at, first_at, {"headway.device_ms": times.prefill_device_ms})
        if times.ttft_ms and ended_at > first_at:
            device = {"headway.device_ms": times.decode_device_ms}
            self._span("executor", "decode", within, first_at, ended_at, device)
        span.end(self._clock.ns(ended_at))

    def _begun(self, service: str, name: str, parent: Any, began_at: float, attributes: dict[str, Any]) -> "Span":
        return self._tracers[service].start_span(
            name, context=parent, start_time=self._clock.ns(began_at), attributes=attributes
        )

    def _span(
        self, service: str, name: str, parent: Any, began_at: float, ended_at: float, attributes: dict[str, Any]
    ) -> None:
        self._begun(service, name, parent, began_at, attributes).end(self._clock.ns(ended_at))


class _ScheduleTimes(NamedTuple):
    """A sequence's times at the scheduler: monotonic seconds, and durations in ms. ``ttft_ms`` 0: no token came."""

    arrived_at: float
    ended_at: float
    queue_ms: float
    ttft_ms: float
    preemptions: int
    prefill_device_ms: float
    decode_device_ms: float


class _ToStructlog(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _log.warning("traces", message=record.getMessage())


class _WallClock:
    """Wall-clock time; a change of the clock breaks no trace."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def ns(self, monotonic_s: float) -> int:
        return self._offset_ns + round(monotonic_s * 1e9)


def _status_of(error: BaseException | None) -> grpc.StatusCode:
    if error is None:
        return grpc.StatusCode.OK
    if isinstance(error, CallRefusedError):
        return error.code
    # Other exceptions (cancellation) mean that the caller has left.
    return grpc.StatusCode.INTERNAL if isinstance(error, Exception) else grpc.StatusCode.CANCELLED


def _use_our_log() -> None:
    logger = logging.getLogger("opentelemetry")
    if not any(isinstance(handler, _ToStructlog) for handler in logger.handlers):
        logger.addHandler(_ToStructlog())
        logger.propagate = False
