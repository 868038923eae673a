"""The gateway's settings. Must not know: where values come from."""

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from headway_gateway.access.credentials import GENERATE, Caller, TokenFile
from headway_process.addresses import check_link_address, check_metrics_address, is_loopback
from headway_process.installation import install_advice
from headway_process.ranges import check_ranges
from headway_process.settings import ExitWithParent, LogFormat, LogLevel, MetricsTokenFile
from headway_proto.wording import shown

_LEAST_RATE = 0.001
_OTLP_ENDPOINT = re.compile(r"https?://[^/\s@]+:[0-9]{1,5}")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._\[\]:-]*[a-z0-9\]]")
_DIGEST = re.compile("[0-9a-f]{64}")


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway's settings. Durations are in seconds."""

    model: Annotated[str, Meta(description="directory with the checkpoint's tokenizer.json and tokenizer_config.json")]
    ingress_address: Annotated[
        str, Meta(description="ZeroMQ address of the scheduler's ingress: ipc://PATH or tcp://HOST:PORT")
    ] = "tcp://127.0.0.1:50053"
    curve_keys: Annotated[
        str,
        Meta(description="directory with scheduler.key and gateway.key_secret, as zmq.auth.create_certificates writes"),
    ] = ""
    grpc_address: Annotated[str, Meta(description="HOST:PORT to serve gRPC on; port 0 picks a free one")] = (
        "127.0.0.1:50051"
    )
    http_address: Annotated[
        str, Meta(description="HOST:PORT to serve OpenAI's API on, over HTTP; port 0 picks a free one; empty: none")
    ] = ""
    allowed_origins: Annotated[
        str,
        Meta(
            description="origins, separated by commas, whose web pages may call OpenAI's API from a browser, such as "
            "http://localhost:3000; empty: none"
        ),
    ] = ""
    workers: Annotated[int, Meta(description="gateway processes that share the port")] = 1
    max_concurrent_streams: Annotated[
        int,
        Meta(description="most generations open at one time, per worker; more end with RESOURCE_EXHAUSTED, or 429"),
    ] = 4096
    max_message_bytes: Annotated[int, Meta(description="largest gRPC message, or body over HTTP, in bytes")] = (
        16 * 1024 * 1024
    )
    tokenizer_threads: Annotated[int, Meta(description="threads that tokenise prompts of ordinary length")] = 2
    unavailable_grace_s: Annotated[
        float,
        Meta(description="seconds that a new request waits for a scheduler and a model; then it ends with UNAVAILABLE"),
    ] = 2.0
    stall_s: Annotated[
        float, Meta(description="seconds without a step, while work is pending, after which health reports NOT_SERVING")
    ] = 10.0
    slow_client_s: Annotated[
        float,
        Meta(
            description="seconds that a client may leave its stream unread after the buffers are full; then the gateway ends "
            "the stream (RESOURCE_EXHAUSTED); and that it may take to send the body of an HTTP request"
        ),
    ] = 30.0
    grace_s: Annotated[float, Meta(description="seconds that open calls get to finish after SIGTERM")] = 30.0
    silence_timeout_s: Annotated[
        float, Meta(description="seconds of silence from the scheduler after which the gateway opens a new link")
    ] = 0.9
    tls_cert_file: Annotated[str, Meta(description="PEM certificate chain for TLS (with tls_key_file)")] = ""
    tls_key_file: Annotated[str, Meta(description="PEM private key of tls_cert_file")] = ""
    tls_client_ca_file: Annotated[
        str, Meta(description="PEM certificates; a client needs a certificate that one of these has signed")
    ] = ""
    auth_token_file: Annotated[
        str,
        Meta(
            description="file with the bearer tokens that calls must carry, each for generation, for Admin, or for both: "
            "see docs/security.md; read again when it changes, and on SIGHUP"
        ),
    ] = ""
    open_health: Annotated[bool, Meta(description="answer health checks without a token")] = False
    open_reflection: Annotated[bool, Meta(description="answer reflection without a token")] = False
    max_tenant_requests_per_s: Annotated[
        float,
        Meta(
            description="generations that one tenant may begin per second and worker; more end with RESOURCE_EXHAUSTED; 0: no limit"
        ),
    ] = 0.0
    allow_insecure_bind: Annotated[
        bool,
        Meta(
            description="listen beyond loopback without TLS and tokens or client certificates; only behind a proxy that "
            "protects it"
        ),
    ] = False
    vllm_engine: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="serve vllm.grpc.engine.VllmEngine too, for the gateway smg; auto: if its stubs are installed "
            "(extra smg)"
        ),
    ] = "auto"
    kv_events: Annotated[
        bool,
        Meta(
            description="send cache events, with the token ids of prompts, to callers of VllmEngine with the role admin (to all "
            "callers, without tokens)"
        ),
    ] = False
    launcher_token_digest: Annotated[
        str, Meta(description="SHA-256 in hex of the token with which headway serve asks for the model")
    ] = ""
    launcher_health_name: Annotated[
        str,
        Meta(description="one more name for health checks, by which headway serve recognizes its own gateway"),
    ] = ""
    load_reports: Annotated[
        bool,
        Meta(
            description="report the load of this gateway and its scheduler, so that gRPC clients balance by load: "
            "ORCA trailers of each generation, and the out-of-band service"
        ),
    ] = False
    otel_endpoint: Annotated[
        str,
        Meta(description="OTLP receiver (gRPC) to send traces to: http://HOST:PORT or https://HOST:PORT; empty: none"),
    ] = ""
    otel_sample_ratio: Annotated[
        float, Meta(description="share of requests that are traced if traceparent does not decide; 0 to 1")
    ] = 1.0
    metrics_address: Annotated[
        str,
        Meta(
            description="HOST:PORT for Prometheus metrics; port 0 picks a free one; several workers use this port and the next ones; empty: none"
        ),
    ] = ""
    metrics_token_file: MetricsTokenFile = ""
    log_level: LogLevel = "info"
    log_format: LogFormat = "console"
    exit_with_parent: ExitWithParent = False
    reuse_port: Annotated[
        bool, Meta(description="share grpc_address with other processes that set this too (for workers)")
    ] = False

    RANGES: ClassVar[Mapping[str, tuple[float, float]]] = {
        "workers": (1, 64),
        "max_concurrent_streams": (1, 1_000_000),
        "max_message_bytes": (1, 1 << 30),
        "tokenizer_threads": (1, 64),
        "unavailable_grace_s": (0, 86400),
        "grace_s": (0, 86400),
        "slow_client_s": (0.1, 86400),
        "stall_s": (0.1, 86400),
        "silence_timeout_s": (0.1, 86400),
        "max_tenant_requests_per_s": (0, 1_000_000),
        "otel_sample_ratio": (0, 1),
    }

    @property
    def origins(self) -> frozenset[str]:
        """``allowed_origins``, one by one."""
        return frozenset(filter(None, map(str.strip, self.allowed_origins.split(","))))

    def validate(self) -> None:
        """Check what types alone cannot.

        Raises:
            ValueError: one line with the field, its value and the allowed ones.
        """
        _check_numbers(self)
        check_link_address("ingress_address", self.ingress_address, has_keys=bool(self.curve_keys))
        _check_files(self)
        _check_tracing(self)
        check_metrics_address(self.metrics_address, self.metrics_token_file, num_ports=self.workers)
        _check_vllm_engine(self)
        _check_listener(self, "grpc_address", self.grpc_address)
        if self.http_address:
            _check_listener(self, "http_address", self.http_address)
        _check_origins(self)


def _check_listener(config: GatewayConfig, field: str, address: str) -> None:
    host, _ = split_address(address, field)
    guarded = bool(config.tls_cert_file) and bool(config.auth_token_file or config.tls_client_ca_file)
    if not is_loopback(host) and not guarded and not config.allow_insecure_bind:
        raise ValueError(
            _refusal(
                field,
                address,
                "a loopback address; beyond it set tls_cert_file, tls_key_file and auth_token_file (or "
                "tls_client_ca_file), or allow_insecure_bind=true",
            )
        )


def _check_origins(config: GatewayConfig) -> None:
    for origin in config.origins:
        if not _ORIGIN.fullmatch(origin):
            allowed = "SCHEME://HOST or SCHEME://HOST:PORT as browsers write it: in small letters, without a path"
            raise ValueError(_refusal("allowed_origins", origin, allowed))
    if config.origins and not config.http_address:
        raise ValueError(_refusal("allowed_origins", config.allowed_origins, "empty, because http_address is empty"))


def split_address(address: str, field: str = "grpc_address") -> tuple[str, int]:
    """Split ``HOST:PORT`` (IPv6 hosts in brackets).

    Raises:
        ValueError: it has another form.
    """
    host, separator, port_text = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port_text.isascii() or not port_text.isdigit() or int(port_text) > 65535:
        raise ValueError(_refusal(field, address, "HOST:PORT with a port from 0 to 65535"))
    return host, int(port_text)


def _check_vllm_engine(config: GatewayConfig) -> None:
    if serves_vllm_engine(config):
        return
    if config.vllm_engine == "on":
        raise ValueError(
            _refusal(
                "vllm_engine", "on", f"auto or off, since smg-grpc-proto is missing; {install_advice('vllm-engine')}"
            )
        )
    if config.kv_events:
        raise ValueError(_refusal("kv_events", "true", "false, because the service VllmEngine is not served"))


def serves_vllm_engine(config: GatewayConfig) -> bool:
    """Return whether VllmEngine is wanted and installed."""
    return config.vllm_engine != "off" and importlib.util.find_spec("smg_grpc_proto") is not None


def token_file(config: GatewayConfig) -> TokenFile | None:
    """Return the valid tokens, if calls need one.

    Raises:
        ValueError: the file is unusable.
    """
    if not config.auth_token_file:
        return None
    launcher = {}
    if config.launcher_token_digest:
        launcher = {bytes.fromhex(config.launcher_token_digest): Caller("headway serve", frozenset((GENERATE,)))}
    return TokenFile(config.auth_token_file, launcher)


def _check_numbers(config: GatewayConfig) -> None:
    check_ranges(config)
    if 0.0 < config.max_tenant_requests_per_s < _LEAST_RATE:
        allowed = f"0, or {_LEAST_RATE:g} to 1000000"
        raise ValueError(_refusal("max_tenant_requests_per_s", config.max_tenant_requests_per_s, allowed))


def _check_tracing(config: GatewayConfig) -> None:
    if config.otel_endpoint and not _OTLP_ENDPOINT.fullmatch(config.otel_endpoint):
        raise ValueError(_refusal("otel_endpoint", config.otel_endpoint, "http://HOST:PORT or https://HOST:PORT"))


def _check_files(config: GatewayConfig) -> None:
    if not config.model:
        raise ValueError(_refusal("model", config.model, "a directory with tokenizer.json"))
    if bool(config.tls_cert_file) != bool(config.tls_key_file):
        pair = ("tls_cert_file", "tls_key_file")
        present, missing = pair if config.tls_cert_file else reversed(pair)
        raise ValueError(_refusal(missing, "", f"a PEM file, because {present} is given"))
    if config.tls_client_ca_file and not config.tls_cert_file:
        raise ValueError(_refusal("tls_cert_file", "", "a PEM file, because tls_client_ca_file is given"))
    if config.launcher_token_digest and not _DIGEST.fullmatch(config.launcher_token_digest):
        raise ValueError(_refusal("launcher_token_digest", config.launcher_token_digest, "64 hexadecimal digits"))
    for field in ("tls_cert_file", "tls_key_file", "tls_client_ca_file", "auth_token_file"):
        path = getattr(config, field)
        if path and not Path(path).is_file():
            raise ValueError(_refusal(field, path, "a file that exists"))
    token_file(config)


def _refusal(field: str, value: object, allowed: str) -> str:
    return f"{field}: {shown(value)} is not allowed; allowed: {allowed}"
