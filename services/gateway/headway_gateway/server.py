"""One gateway process's gRPC server. Must not know: signals, exit codes, logging."""

import asyncio
import contextlib
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import msgspec
import structlog
from grpc_health.v1 import health, health_pb2_grpc

from headway_gateway.admin import AdminServicer
from headway_gateway.authentication import (
    HEALTH_PREFIX,
    REFLECTION_PREFIX,
    VLLM_ENGINE_PREFIX,
    AuthenticationInterceptor,
    Doorkeeper,
)
from headway_gateway.certificates import CertificateFiles
from headway_gateway.config import GatewayConfig, serves_vllm_engine, split_address, token_file
from headway_gateway.constraint_check import ConstraintChecker
from headway_gateway.encoding_lanes import EncodingLanes
from headway_gateway.health import HealthReporter
from headway_gateway.interceptors import CallCountingInterceptor, ErrorInterceptor, OpenCalls, OpenCallsInterceptor
from headway_gateway.link_keys import load_link_keys
from headway_gateway.load_reports import LoadMonitor, add_load_reports
from headway_gateway.metrics import GatewaySnapshot, families_of, take_snapshot
from headway_gateway.preflight import problem_of_listening
from headway_gateway.prompt_encoding import PromptEncoder
from headway_gateway.reflection import add_reflection
from headway_gateway.scheduler_client import SchedulerClient
from headway_gateway.servicer import GenerationServicer
from headway_gateway.statistics import GatewayStatistics
from headway_gateway.tokenization import TextModel
from headway_gateway.tracing import Tracing
from headway_process.metrics_endpoint import MetricsEndpoint
from headway_process.snapshots import Snapshots
from headway_proto import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc
from headway_proto.orca_pb2 import OrcaLoadReport

if TYPE_CHECKING:
    from headway_gateway.openai.listener import HttpListener

GENERATION_SERVICE = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
VLLM_ENGINE_SERVICE = VLLM_ENGINE_PREFIX.strip("/")
_CANCEL_GRACE_S = 0.5
_MOST_OTHER_CALLS = 1024
"""Open calls besides generations."""

_MOST_UNSEEN_CALLS = 32_768
"""Calls that gRPC holds for this process. It ends more without a message."""

_MOST_UNSEEN_S = 600

_log = structlog.get_logger("headway.gateway.server")


class AddressInUseError(Exception):
    """The gRPC address is unusable."""


class GatewayServer:
    """A gateway inside one event loop."""

    def __init__(self, config: GatewayConfig, text_model: TextModel) -> None:
        """Make the parts.

        Raises:
            ValueError: the link's keys or its socket's directory are unusable.
        """
        self._config = config
        self._client = SchedulerClient(
            config.ingress_address,
            incarnation=secrets.randbits(63),
            silence_timeout_s=config.silence_timeout_s,
            keys=load_link_keys(Path(config.curve_keys)) if config.curve_keys else None,
        )
        self._lanes = EncodingLanes(text_model, config.tokenizer_threads)
        self._constraints = ConstraintChecker(Path(config.model))
        self._statistics = GatewayStatistics()
        self._metrics: MetricsEndpoint | None = None
        self._tracing: Tracing | None = None
        if config.otel_endpoint:
            self._tracing = Tracing(config.otel_endpoint, config.grpc_address, config.otel_sample_ratio)
        self._generation = GenerationServicer(
            client=self._client,
            text_model=text_model,
            lanes=self._lanes,
            config=config,
            statistics=self._statistics,
            tracing=self._tracing,
            load_report=self._load_report if config.load_reports else None,
            constraints=self._constraints,
        )
        self._load = LoadMonitor(self._client.link, self._statistics)
        self._more_services = (VLLM_ENGINE_SERVICE,) if serves_vllm_engine(config) else ()
        health_service = health.aio.HealthServicer()
        self._health = self._health_reporter(health_service, text_model.vocab_size)
        self._tokens = token_file(config)
        self._doorkeeper = Doorkeeper(self._tokens.table) if self._tokens is not None else None
        self._open_calls = OpenCalls(config.max_concurrent_streams + _MOST_OTHER_CALLS)
        self._text_model = text_model
        self._http: HttpListener | None = None
        self._server = grpc.aio.server(interceptors=self._interceptors(), options=_channel_options(config))
        health_pb2_grpc.add_HealthServicer_to_server(health_service, self._server)
        self._add_services(AdminServicer(self._client, PromptEncoder(text_model, self._lanes)))

    @property
    def client(self) -> SchedulerClient:
        """The connection to the scheduler."""
        return self._client

    @property
    def http_port(self) -> int:
        """The port of OpenAI's API; 0 without one."""
        return 0 if self._http is None else self._http.port

    async def start(self) -> int:
        """Listen and serve; return the port.

        Raises:
            AddressInUseError: the address is taken or not this machine's.
            ValueError: certificate and key are unusable, or metrics cannot be served.
        """
        port = self._listen()
        self._http = self._http_listener()
        self._metrics = self._metrics_endpoint()
        self._client.start()
        self._load.start()
        await self._health.start()
        await self._server.start()
        if self._http is not None:
            await self._http.start()
            _log.info("OpenAI API", port=self._http.port, tls=bool(self._config.tls_cert_file))
        host, _ = split_address(self._config.grpc_address)
        if self._tracing is not None:
            self._tracing.server_address = f"{host}:{port}"
        _log.info("listening", address=f"{host}:{port}", tls=bool(self._config.tls_cert_file))
        if self._metrics is not None:
            _log.info("metrics", port=self._metrics.port)
        return port

    def reload_tokens(self) -> None:
        """Read the token file again."""
        if self._tokens is not None:
            self._tokens.reload()

    async def drain(self, grace_s: float) -> bool:
        """Refuse new generations; return whether open ones finished."""
        await self._health.shut_down()
        self._generation.begin_drain()
        try:
            async with asyncio.timeout(grace_s):
                await self._generation.wait_until_idle()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """End open calls and release everything."""
        if self._http is not None:
            await asyncio.gather(self._server.stop(_CANCEL_GRACE_S), self._http.close())
        else:
            await self._server.stop(_CANCEL_GRACE_S)
        await self._health.close()
        await self._load.close()
        await self._client.close()
        self._lanes.close()
        await asyncio.to_thread(self._constraints.close)
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        _log.info("stopped", **msgspec.structs.asdict(self._client.link.counters))

    def _load_report(self) -> OrcaLoadReport:
        return self._load.report()

    def _health_reporter(self, service: health.aio.HealthServicer, tokenizer_width: int) -> HealthReporter:
        own_names = (self._config.launcher_health_name,) if self._config.launcher_health_name else ()
        return HealthReporter(
            service=service,
            service_names=(health.OVERALL_HEALTH, GENERATION_SERVICE, *self._more_services, *own_names),
            client=self._client,
            tokenizer_width=tokenizer_width,
            stall_s=self._config.stall_s,
        )

    def _add_services(self, admin: AdminServicer) -> None:
        generation_pb2_grpc.add_GenerationServicer_to_server(self._generation, self._server)  # type: ignore[no-untyped-call]
        admin_pb2_grpc.add_AdminServicer_to_server(admin, self._server)  # type: ignore[no-untyped-call]
        if self._config.load_reports:
            add_load_reports(self._server, self._load_report)
        if self._more_services:
            self._add_vllm_engine()
        add_reflection(self._server, (GENERATION_SERVICE, ADMIN_SERVICE, health.SERVICE_NAME, *self._more_services))

    def _add_vllm_engine(self) -> None:
        from smg_grpc_proto.generated import vllm_engine_pb2_grpc

        from headway_gateway.vllm_engine.servicer import VllmEngineServicer

        servicer = VllmEngineServicer(
            generation=self._generation,
            client=self._client,
            problem=lambda: self._health.problem,
            model_directory=Path(self._config.model),
            publishes_kv_events=self._config.kv_events,
        )
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, self._server)  # type: ignore[no-untyped-call]

    def _interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        interceptors: list[grpc.aio.ServerInterceptor] = [
            CallCountingInterceptor(self._statistics),
            ErrorInterceptor(self._statistics),
            OpenCallsInterceptor(self._open_calls),
        ]
        if self._doorkeeper is not None:
            exempt = (
                (HEALTH_PREFIX, self._config.open_health),
                (f"{VLLM_ENGINE_PREFIX}HealthCheck", self._config.open_health),
                (REFLECTION_PREFIX, self._config.open_reflection),
            )
            interceptors.append(
                AuthenticationInterceptor(self._doorkeeper, tuple(prefix for prefix, is_open in exempt if is_open))
            )
        return interceptors

    def _metrics_endpoint(self) -> MetricsEndpoint | None:
        if not self._config.metrics_address:
            return None
        snapshots: Snapshots[GatewaySnapshot] = Snapshots()
        loop = asyncio.get_running_loop()

        def answer_reader() -> None:
            if snapshots.wanted:
                snapshots.give(take_snapshot(self._client, self._generation, self._statistics))

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                loop.call_soon_threadsafe(answer_reader)

        snapshots.wake = wake
        return MetricsEndpoint(
            self._config.metrics_address, self._config.metrics_token_file, lambda: families_of(snapshots.ask())
        )

    def _http_listener(self) -> "HttpListener | None":
        config = self._config
        if not config.http_address:
            return None
        from headway_gateway.openai.door import make_application
        from headway_gateway.openai.listener import HttpListener, listening_socket

        application = make_application(
            generation=self._generation,
            text_model=self._text_model,
            problem=lambda: self._health.problem,
            doorkeeper=self._doorkeeper,
            open_calls=self._open_calls,
            statistics=self._statistics,
            config=config,
        )
        tls = CertificateFiles(config).context() if config.tls_cert_file else None
        try:
            listening = listening_socket(config.http_address, reuse_port=config.reuse_port)
        except OSError as error:
            raise AddressInUseError(
                f"http_address: cannot listen on {config.http_address[:64]!r} ({error.strerror}); "
                "allowed: a free address"
            ) from error
        return HttpListener(application, listening, tls=tls, slow_client_s=config.slow_client_s)

    def _listen(self) -> int:
        address = self._config.grpc_address
        # gRPC's own message would take several lines.
        problem = "" if self._config.reuse_port else problem_of_listening(address)
        if problem:
            raise AddressInUseError(
                f"grpc_address: cannot listen on {address[:64]!r} ({problem}); allowed: a free address"
            )
        try:
            if self._config.tls_cert_file:
                return self._server.add_secure_port(address, CertificateFiles(self._config).credentials())
            return self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise AddressInUseError(
                f"grpc_address: cannot listen on {address[:64]!r}; allowed: a free address"
            ) from error


def _channel_options(config: GatewayConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", int(config.reuse_port)),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # The limit is per connection, and counts ended streams that gRPC still remembers. Beyond it gRPC resets streams.
        # So it lies far above the server's own limit, which refuses with a message.
        ("grpc.max_concurrent_streams", config.max_concurrent_streams + _MOST_UNSEEN_CALLS),
        # By default gRPC cancels waiting calls beyond 1,000, or after 30 s. We refuse them with a time to try again,
        # which takes a millisecond.
        ("grpc.server.max_pending_requests", _MOST_UNSEEN_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MOST_UNSEEN_CALLS),
        ("grpc.server_max_unrequested_time_in_server", _MOST_UNSEEN_S),
        # Nothing else detects that a client's machine has stopped.
        ("grpc.keepalive_time_ms", 5_000),
        ("grpc.keepalive_timeout_ms", 2_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Clients may send keepalives as often.
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 0),
    ]
