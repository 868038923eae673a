"""Traces: what an OTLP receiver gets of a request, under the caller's own trace, and that serving does without it."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

import headway
from headway import AsyncClient, Client
from headway_executor.backend import BackendConfig
from headway_executor.backends.simulated import SimulatedBackend
from headway_executor.backends.torch_backend import TorchBackend
from headway_gateway.config import GatewayConfig
from headway_proto import generation_pb2 as api
from headway_proto import generation_pb2_grpc as api_grpc
from headway_scheduler.core.state.limits import SchedulerLimits
from threaded_headway import running

DEMO = Path(headway.__file__).parent / "demo_model"
CONFIG = BackendConfig(
    model=str(DEMO), block_size=16, num_kv_blocks=64, max_num_seqs=4, options={"step_base_us": "2000"}
)
LIMITS = SchedulerLimits(max_num_seqs=4)
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLERS_SPAN = "b7ad6b7169203331"
TRACEPARENT = (("traceparent", f"00-{TRACE_ID}-{CALLERS_SPAN}-01"),)


class Receiver(otlp_grpc.TraceServiceServicer):
    """Keeps every span with the name of its service."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []

    def Export(self, request, context):  # noqa: N802
        for resource_spans in request.resource_spans:
            attributes = {entry.key: entry.value.string_value for entry in resource_spans.resource.attributes}
            for scope_spans in resource_spans.scope_spans:
                self.spans += [(attributes["service.name"], span) for span in scope_spans.spans]
        return otlp.ExportTraceServiceResponse()


@contextmanager
def receiver() -> Iterator[tuple[Receiver, str]]:
    kept = Receiver()
    server = grpc.server(ThreadPoolExecutor(2))
    otlp_grpc.add_TraceServiceServicer_to_server(kept, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield kept, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None)


def values_of(span: Span) -> dict[str, object]:
    found: dict[str, object] = {}
    for entry in span.attributes:
        kind = entry.value.WhichOneof("value")
        value = getattr(entry.value, kind)
        found[entry.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


def by_name(kept: Receiver) -> dict[str, tuple[str, Span]]:
    return {span.name: (service, span) for service, span in kept.spans}


async def generate(
    address: str, *, metadata: tuple[tuple[str, str], ...] = (), **fields: object
) -> list[api.GenerateResponse]:
    async with AsyncClient(address) as client, grpc.aio.insecure_channel(address) as channel:
        await client.wait_ready(20)
        call = api_grpc.GenerationStub(channel).Generate(api.GenerateRequest(**fields), metadata=metadata)
        return [response async for response in call]


def test_a_request_is_one_trace_through_all_three_services(tmp_path: Path) -> None:
    sampling = api.SamplingParams(max_tokens=20, ignore_eos=True)
    with receiver() as (kept, endpoint):
        with running(tmp_path, DEMO, SimulatedBackend(), CONFIG, LIMITS, otel_endpoint=endpoint) as served:
            before = time.time_ns()
            asyncio.run(
                generate(
                    served.address,
                    metadata=TRACEPARENT,
                    text="once",
                    sampling=sampling,
                    request_id="mine",
                    tenant="them",
                )
            )
            after = time.time_ns()
        spans = by_name(kept)
    parents = {
        "text_completion demo_model": ("headway-gateway", None),
        "tokenize": ("headway-gateway", "text_completion demo_model"),
        "schedule": ("headway-scheduler", "text_completion demo_model"),
        "queue": ("headway-scheduler", "schedule"),
        "prefill": ("headway-executor", "schedule"),
        "decode": ("headway-executor", "schedule"),
    }
    assert spans.keys() == parents.keys()
    for name, (service, parent) in parents.items():
        told_by, span = spans[name]
        assert told_by == service, name
        assert span.trace_id.hex() == TRACE_ID, name
        assert span.parent_span_id.hex() == (spans[parent][1].span_id.hex() if parent else CALLERS_SPAN), name
        assert before <= span.start_time_unix_nano <= span.end_time_unix_nano <= after, name
        if parent:
            within = spans[parent][1]
            assert within.start_time_unix_nano <= span.start_time_unix_nano, name
            assert span.end_time_unix_nano <= within.end_time_unix_nano, name
    # Queue, prefill and decode follow each other and fill the scheduler's span; 19 gaps of 2 ms at least.
    _, schedule = spans["schedule"]
    (_, queue), (_, prefill), (_, decode) = spans["queue"], spans["prefill"], spans["decode"]
    assert queue.start_time_unix_nano == schedule.start_time_unix_nano
    assert queue.end_time_unix_nano == pytest.approx(prefill.start_time_unix_nano, abs=1e6)
    assert prefill.end_time_unix_nano == pytest.approx(decode.start_time_unix_nano, abs=1e6)
    assert decode.end_time_unix_nano == pytest.approx(schedule.end_time_unix_nano, abs=1e6)
    assert decode.end_time_unix_nano - decode.start_time_unix_nano >= 19 * 1.9e6
    assert values_of(decode)["headway.device_ms"] >= 19 * 1.9

    _, root = spans["text_completion demo_model"]
    assert root.kind == Span.SPAN_KIND_SERVER
    assert [event.name for event in root.events] == ["first_token"]
    values = values_of(root)
    host, _, port = served.address.rpartition(":")
    assert (
        values.items()
        >= {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "headway",
            "gen_ai.request.model": "demo_model",
            "gen_ai.request.max_tokens": 20,
            "gen_ai.response.id": "mine",
            "gen_ai.usage.output_tokens": 20,
            "server.address": host,
            "server.port": int(port),
            "headway.tenant": "them",
            "rpc.grpc.status_code": 0,
        }.items()
    )
    assert values["gen_ai.usage.input_tokens"] > 0
    assert values["gen_ai.response.finish_reasons"] == ["length"]


def test_a_refusal_and_a_stop_string_are_traced_too(tmp_path: Path) -> None:
    with receiver() as (kept, endpoint):
        with running(tmp_path, DEMO, SimulatedBackend(), CONFIG, LIMITS, otel_endpoint=endpoint) as served:
            with pytest.raises(grpc.aio.AioRpcError):
                asyncio.run(generate(served.address, text="x", sampling=api.SamplingParams(top_p=7.0)))
            sampling = api.SamplingParams(max_tokens=60, ignore_eos=True, n=2)
            asyncio.run(
                generate(served.address, chat=api.Chat(messages=[{"role": "user", "content": "x"}]), sampling=sampling)
            )
        refused = [span for _, span in kept.spans if values_of(span).get("error.type")]
        assert [values_of(span)["error.type"] for span in refused] == ["INVALID_ARGUMENT"]
        assert refused[0].status.code == Status.STATUS_CODE_UNSET  # it is the caller's fault, not the server's
        names = [span.name for _, span in kept.spans]
        assert names.count("chat demo_model") == 1
        assert names.count("schedule") == names.count("prefill") == names.count("decode") == 2
        assert len({span.trace_id for _, span in kept.spans}) == 2


def test_a_call_over_http_is_not_told_as_grpcs(tmp_path: Path) -> None:
    with receiver() as (kept, endpoint):
        settings = {"otel_endpoint": endpoint, "http_address": "127.0.0.1:0"}
        with running(tmp_path, DEMO, SimulatedBackend(), CONFIG, LIMITS, **settings) as served:
            url = f"http://127.0.0.1:{served.http_port}/v1/completions"
            response = httpx2.post(url, json={"prompt": "x", "max_tokens": 3}, headers=dict(TRACEPARENT), timeout=30)
            assert response.status_code == 200
        _, root = by_name(kept)["text_completion demo_model"]
        assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE_ID, CALLERS_SPAN)
        values = values_of(root)
        assert (values["network.protocol.name"], values["server.port"]) == ("http", served.http_port)
        assert [name for name in values if name.startswith("rpc.")] == []


def test_vectors_and_scores_are_traced_by_input(tmp_path: Path) -> None:
    config = BackendConfig(model=str(DEMO), block_size=16, num_kv_blocks=64, max_num_seqs=4)
    with receiver() as (kept, endpoint):
        with (
            running(tmp_path, DEMO, TorchBackend(), config, LIMITS, otel_endpoint=endpoint) as served,
            Client(served.address) as client,
        ):
            client.wait_ready(20)
            client.embed(["once upon", "a time"], pooling="mean", tenant="them")
            client.score("once upon", [" a time", " a tree", " no"])
        spans = [span for _, span in kept.spans]
    for name, method, num_inputs in (("embeddings demo_model", "Embed", 2), ("score demo_model", "Score", 3)):
        (root,) = (span for span in spans if span.name == name)
        values = values_of(root)
        assert values["rpc.method"] == method
        assert values["gen_ai.usage.input_tokens"] > num_inputs
        assert values["rpc.grpc.status_code"] == 0
        within = [span for span in spans if span.trace_id == root.trace_id]
        names = [span.name for span in within]
        assert names.count("tokenize") == 1
        assert names.count("schedule") == names.count("queue") == names.count("prefill") == num_inputs
        assert "decode" not in names
        for span in within:
            assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano, span.name
            assert span.end_time_unix_nano <= root.end_time_unix_nano, span.name


def test_who_asks_not_to_be_traced_is_not(tmp_path: Path) -> None:
    not_sampled = (("traceparent", f"00-{TRACE_ID}-{CALLERS_SPAN}-00"),)
    with receiver() as (kept, endpoint):
        with running(tmp_path, DEMO, SimulatedBackend(), CONFIG, LIMITS, otel_endpoint=endpoint) as served:
            asyncio.run(generate(served.address, metadata=not_sampled, text="x", sampling={"max_tokens": 3}))
        assert kept.spans == []


def test_a_receiver_that_is_down_changes_nothing(tmp_path: Path, unused_tcp_port: int) -> None:
    endpoint = f"http://127.0.0.1:{unused_tcp_port}"
    with running(tmp_path, DEMO, SimulatedBackend(), CONFIG, LIMITS, otel_endpoint=endpoint) as served:
        for _ in range(5):
            responses = asyncio.run(
                generate(served.address, text="x", sampling=api.SamplingParams(max_tokens=9, ignore_eos=True))
            )
            assert responses[-1].finished.usage.output_tokens == 9
        started = time.monotonic()
    assert time.monotonic() - started < 20, "it ends although its last spans go nowhere"


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        (
            {"otel_endpoint": "collector:4317"},
            "otel_endpoint: 'collector:4317' is not allowed; allowed: http://HOST:PORT",
        ),
        ({"otel_endpoint": "http://a:1/v1/traces"}, "otel_endpoint: "),
        ({"otel_endpoint": "http://user:secret@a:1"}, "otel_endpoint: "),
        ({"otel_sample_ratio": 1.5}, "otel_sample_ratio: 1.5 is not allowed; allowed: 0 to 1"),
    ],
)
def test_settings(setting, problem):
    with pytest.raises(ValueError, match=r"^otel_") as raised:
        GatewayConfig(model=str(DEMO), **setting).validate()
    assert str(raised.value).startswith(problem)
