"""One gateway process's gRPC server. Must not know: signals, exit codes, logging."""

import asyncio
import contextlib
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import structlog
from grpc_health.v1 import health, health_pb2_grpc

from headway_gateway.accepting import Entrance
from headway_gateway.access.authentication import (
    HEALTH_PREFIX,
    REFLECTION_PREFIX,
    VLLM_ENGINE_PREFIX,
    Doorkeeper,
    authenticating,
)
from headway_gateway.access.interceptors import OpenCalls, counting
from headway_gateway.calls.servicer import GenerationServicer
from headway_gateway.certificates import CertificateFiles
from headway_gateway.config import GatewayConfig, serves_vllm_engine, split_address, token_file
from headway_gateway.figures.load_reports import LoadMonitor, add_load_reports
from headway_gateway.figures.statistics import GatewayStatistics
from headway_gateway.figures.tracing import GRPC, HTTP, Tracing
from headway_gateway.grpc_server.connection import Bounds
from headway_gateway.grpc_server.server import GrpcServer, Surrounding
from headway_gateway.link.link_keys import load_link_keys
from headway_gateway.link.scheduler_client import SchedulerClient
from headway_gateway.listening import listening_sockets
from headway_gateway.lost_connections import LostConnections
from headway_gateway.operators.admin import AdminServicer
from headway_gateway.operators.health import HealthReporter
from headway_gateway.operators.metrics import GatewaySnapshot, families_of, take_snapshot
from headway_gateway.operators.reflection import add_reflection
from headway_gateway.requests.prompt_encoding import PromptEncoder
from headway_gateway.text.constraint_check import ConstraintChecker
from headway_gateway.text.encoding_lanes import EncodingLanes
from headway_gateway.text.tokenization import TextModel
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
_SENT_POLL_S = 0.02
_MOST_OTHER_CALLS = 1024
"""Open calls besides generations."""

_PATIENCE = 2.0
"""A connection may be left unread for so many times the time of a stream, which ends with a status."""

_log = structlog.get_logger("headway.gateway.server")


class _Sender(Protocol):
    """A connection."""

    @property
    def is_sending(self) -> bool:
        """Whether an answer on it is not read yet."""
        ...


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
        most_calls = config.max_concurrent_streams + _MOST_OTHER_CALLS
        self._open_calls = OpenCalls(most_calls)
        self._text_model = text_model
        self._lost = LostConnections()
        self._http: HttpListener | None = None
        self._server = GrpcServer(
            self._surroundings(),
            Bounds(most_calls, config.slow_client_s * _PATIENCE, config.slow_client_s),
            most_message_bytes=config.max_message_bytes,
        )
        health_pb2_grpc.add_HealthServicer_to_server(health_service, self._server)  # type: ignore[arg-type]  # it is one
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
        sockets = listening_sockets("grpc_address", self._config.grpc_address, reuse_port=self._config.reuse_port)
        entrance = self._entrance(sockets, "h2")
        port: int = sockets[0].getsockname()[1]
        self._http = self._http_listener()
        self._metrics = self._metrics_endpoint()
        self._client.start()
        self._load.start()
        await self._health.start()
        self._server.start(entrance)
        if self._http is not None:
            await self._http.start()
            _log.info("OpenAI API", port=self._http.port, tls=bool(self._config.tls_cert_file))
        host, _ = split_address(self._config.grpc_address)
        if self._tracing is not None:
            self._tracing.addresses[GRPC] = f"{host}:{port}"
            if self._http is not None:
                http_host, _ = split_address(self._config.http_address)
                self._tracing.addresses[HTTP] = f"{http_host}:{self._http.port}"
        _log.info("listening", address=f"{host}:{port}", tls=bool(self._config.tls_cert_file))
        if self._metrics is not None:
            _log.info("metrics", port=self._metrics.port)
        return port

    def reload_tokens(self) -> None:
        """Read the token file again."""
        if self._tokens is not None:
            self._tokens.reload()

    async def drain(self, grace_s: float) -> bool:
        """Refuse new generations; return whether open ones finished, and clients have read what they were answered."""
        await self._health.shut_down()
        self._generation.streams.drain()
        try:
            async with asyncio.timeout(grace_s):
                await self._generation.streams.wait_until_idle()
                await self._until_sent()
        except TimeoutError:
            return False
        return True

    async def _until_sent(self) -> None:
        left: set[_Sender] = {*self._server.connections, *(() if self._http is None else self._http.connections)}
        while left := {one for one in left if one.is_sending}:  # noqa: ASYNC110 (neither kind has such an event)
            await asyncio.sleep(_SENT_POLL_S)

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

    def _surroundings(self) -> list[Surrounding]:
        surroundings: list[Surrounding] = [counting(self._statistics), self._open_calls.around]
        if self._doorkeeper is not None:
            exempt = (
                (HEALTH_PREFIX, self._config.open_health),
                (f"{VLLM_ENGINE_PREFIX}HealthCheck", self._config.open_health),
                (REFLECTION_PREFIX, self._config.open_reflection),
            )
            open_prefixes = tuple(prefix for prefix, is_open in exempt if is_open)
            surroundings.append(authenticating(self._doorkeeper, open_prefixes))
        return surroundings

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
        from headway_gateway.openai.listener import HttpListener

        application = make_application(
            generation=self._generation,
            text_model=self._text_model,
            problem=lambda: self._health.problem,
            doorkeeper=self._doorkeeper,
            open_calls=self._open_calls,
            statistics=self._statistics,
            config=config,
        )
        sockets = listening_sockets("http_address", config.http_address, reuse_port=config.reuse_port)
        return HttpListener(application, self._entrance(sockets, "http/1.1"), slow_client_s=config.slow_client_s)

    def _entrance(self, sockets: list[socket.socket], protocol: str) -> Entrance:
        has_tls = bool(self._config.tls_cert_file)
        tls = self._lost.context(CertificateFiles(self._config).context(protocol)) if has_tls else None
        return Entrance(sockets, self._lost.note_wait, tls)
