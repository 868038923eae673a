"""What ``headway serve`` decides before it starts a process.

Owns: one set of flags, variables and file sections turned into the configuration and the command line of each service;
the order in which they start and stop.
Must not know: how processes are started, watched or stopped.
"""

import argparse
import hashlib
import secrets
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from headway import openai_front
from headway.configuration import Given, Layer, build, given_by_environment, given_by_flags, merged
from headway.health import Target, client_certificate
from headway.serve_config import DEMO_MODEL, ServeConfig
from headway.services import SERVE, SERVICES, Service, serve_settings, sources_in_file, with_model_directory
from headway.settings import ConfigurationError, ModelDirectoryError, as_text, bytes_of_file, settings_of, shown
from headway.supervision import RestartPolicy
from headway_gateway.config import GatewayConfig, serves_vllm_engine

SMG = "smg"
START_ORDER = ("executor", "scheduler", "gateway", SMG)
STOP_ORDER = (SMG, "gateway", "scheduler", "executor")
METRICS_ORDER = ("scheduler", "executor", "gateway")
"""Whose metrics are at ``metrics_port``, and whose at the ports after it."""
STOP_GRACE_S = 5.0
_NOTHING = Given("", "")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How to run the services. ``commands`` and ``stop_grace_s`` (seconds from SIGTERM to SIGKILL) are by name, the
    latter in the order of an orderly stop; who is silent for ``hang_s`` seconds is replaced; ``target`` is how this host reaches the gateway.
    ``openai_address`` is where smg serves, empty without it.
    """

    commands: dict[str, list[str]]
    restart_policy: RestartPolicy
    stop_grace_s: dict[str, float]
    hang_s: float
    target: Target
    openai_address: str = ""

    @property
    def start_order(self) -> list[str]:
        """The processes that there are, in the order in which they start."""
        return [name for name in START_ORDER if name in self.commands]


def make_plan(arguments: argparse.Namespace, environment: Mapping[str, str], directory: Path) -> Plan:
    """Settle every configuration and validate it, so that a mistake is told before anything starts.

    A setting that several services share reaches each of them. What serve is given (flag, variable, [serve]) wins over
    what the service itself is given (variable, [scheduler], [executor], [gateway]).

    Raises:
        ConfigurationError: some source is wrong.
    """
    settings = serve_settings()
    files = sources_in_file(arguments, environment)
    given = merged(
        (given_by_flags(arguments, settings), given_by_environment(environment, SERVE, settings), files[SERVE])
    )
    serve = build(ServeConfig, given, ServeConfig.validate)
    presets = {"model": Given(serve.model, "--model")}
    configs = {}
    # The token file may hold digests only, so serve has a token of its own, of which the gateway sees the digest.
    probe_token = secrets.token_urlsafe(32)
    for service in SERVICES.values():
        settled = _settled(service, directory, serve.metrics_port)
        from_environment = given_by_environment(environment, service.name, service.settings)
        layers = (settled, given, from_environment, files[service.name], presets)
        values = with_model_directory(merged(layers))
        if values.get("auth_token_file", _NOTHING).value:
            digest = hashlib.sha256(probe_token.encode()).hexdigest()
            values = {**values, "launcher_token_digest": Given(digest, "the launcher")}
        _check_model_directory(values)
        configs[service.name] = service.build(_with_a_port(values))
    gateway = configs["gateway"]
    assert isinstance(gateway, GatewayConfig)
    commands = {name: _command(name, config) for name, config in configs.items()}
    graces = {name: getattr(config, "grace_s", 0.0) for name, config in configs.items()}
    if serve.openai_address:
        commands[SMG] = _smg_command(serve, gateway)
        graces[SMG] = gateway.grace_s
    return Plan(
        commands=commands,
        restart_policy=RestartPolicy(max_restarts=serve.max_restarts, window_s=serve.restart_window_s),
        hang_s=serve.hang_s,
        target=_target(gateway, serve, probe_token),
        # What a service allows its requests, and some time over to end in.
        stop_grace_s={name: graces[name] + STOP_GRACE_S for name in STOP_ORDER if name in commands},
        openai_address=serve.openai_address,
    )


def _smg_command(serve: ServeConfig, gateway: GatewayConfig) -> list[str]:
    """Return the command line of the smg in front of the gateway.

    Raises:
        ConfigurationError: the gateway would not let it in, or does not speak to it.
    """
    for field in ("auth_token_file", "tls_cert_file"):
        if getattr(gateway, field):
            raise ConfigurationError(
                f"--openai-address: not allowed together with --{field.replace('_', '-')}; allowed: without it, or an smg "
                "that you start yourself, see docs/openai.md"
            )
    if not serves_vllm_engine(gateway):
        raise ConfigurationError(
            f"--vllm-engine: {gateway.vllm_engine!r} is not allowed; allowed: auto or on with the extra smg installed, "
            "because --openai-address is given"
        )
    return openai_front.command(
        openai_address=serve.openai_address,
        gateway_address=gateway.grpc_address,
        metrics_port=_free_port("127.0.0.1"),
        grace_s=gateway.grace_s,
        flags=serve.smg_flags,
    )


def _target(gateway: GatewayConfig, serve: ServeConfig, probe_token: str) -> Target:
    """Return how this host reaches the gateway. Its certificate lies here, so it is at hand.

    Raises:
        ConfigurationError: a file cannot be read, or the gateway wants a certificate that serve does not have.
    """
    if gateway.tls_client_ca_file and not serve.probe_cert_file:
        raise ConfigurationError(
            "--probe-cert-file is required together with --tls-client-ca-file; "
            "allowed: a PEM certificate that serve itself may show to the gateway"
        )
    return Target(
        address=gateway.grpc_address,
        certificates=bytes_of_file(gateway.tls_cert_file, "--tls-cert-file"),
        token=probe_token if gateway.auth_token_file else "",
        client=client_certificate(serve.probe_cert_file, serve.probe_key_file, "--probe-cert-file"),
    )


def _check_model_directory(given: Layer) -> None:
    """Refuse a directory that is not there once, here, rather than once in each process that reads it."""
    model = given.get("model")
    if model is not None and not Path(model.value).is_dir():
        raise ModelDirectoryError(
            f"{model.origin}: {shown(model.value)} is not allowed; allowed: a checkpoint directory, or {DEMO_MODEL}"
        )


def _settled(service: Service, directory: Path, metrics_port: int) -> Layer:
    values: dict[str, str | bool] = {
        "ingress_address": f"ipc://{directory}/ingress",
        "step_address": f"ipc://{directory}/step",
        "exit_with_parent": True,
    }
    if metrics_port:
        values["metrics_address"] = f"127.0.0.1:{metrics_port + METRICS_ORDER.index(service.name)}"
    return {name: Given(value, "the launcher") for name, value in values.items() if name in service.settings}


def _command(name: str, config: msgspec.Struct) -> list[str]:
    """Return the command line of a child: every setting that is not its default, and no other source."""
    words = [sys.executable, "-m", "headway", name]
    for setting in settings_of(type(config)).values():
        value = getattr(config, setting.name)
        if setting.required or value != setting.default:
            words += as_text(setting, value)
    return words


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without ``HEADWAY_*``: for children, whose settings have become flags already."""
    return {name: value for name, value in environment.items() if not name.startswith("HEADWAY_")}


def _with_a_port(given: Layer) -> Layer:
    """Replace port 0 of the gRPC address by a free port, so that the address holds over restarts of the gateway."""
    address = given.get("grpc_address")
    if address is None or not address.value.endswith(":0"):
        return given
    host = address.value.removesuffix(":0")
    try:
        port = _free_port(host)
    except OSError as error:
        raise ConfigurationError(
            f"{address.origin}: {shown(address.value)} cannot be bound: {error.strerror}"
        ) from None
    return {**given, "grpc_address": Given(f"{host}:{port}", address.origin)}


def _free_port(host: str) -> int:
    """Return a port that nobody listens on just now.

    Raises:
        OSError: ``host`` is not this machine's.
    """
    with socket.socket(socket.AF_INET6 if host.startswith("[") else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host.strip("[]"), 0))
        port: int = probe.getsockname()[1]
        return port
