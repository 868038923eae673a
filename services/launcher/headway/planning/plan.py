"""Decisions of ``headway serve`` before it starts a process. Must not know: how processes run."""

import argparse
import hashlib
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from headway.flags.configuration import Given, Layer, merged
from headway.flags.named_files import bytes_of_file
from headway.flags.settings import ConfigurationError, as_text, settings_of
from headway.planning import openai_front
from headway.planning.deployment import Deployment, num_ranks, read_deployment, roles_in_order
from headway.planning.replicas import (
    EXECUTOR,
    LAST_PORT,
    LOOPBACK,
    Layout,
    Member,
    Share,
    check_apart,
    replica_addresses,
)
from headway.planning.serve_config import ServeConfig
from headway.planning.services import EXECUTORS_TABLES, SERVICES, Service
from headway.running.fleet_runner import FleetOrders
from headway.running.health import Target, client_certificate
from headway.running.supervision import RestartPolicy
from headway_executor.config import ExecutorConfig
from headway_executor.rank_processes.surroundings import OF_TORCHRUN
from headway_gateway.config import GatewayConfig, serves_vllm_engine
from headway_process.free_ports import free_ports
from headway_process.installation import install_advice

SMG = "smg"
START_ORDER = ("executor", "scheduler", "gateway")
STOP_ORDER = ("gateway", "scheduler", "executor")
STOP_GRACE_S = 5.0
_NOTHING = Given("", "")
_ONE_WORKER = Given(1, "")
_GRPC_ADDRESS = Given(settings_of(GatewayConfig)["grpc_address"].default, "--grpc-address")


class Settled(msgspec.Struct, frozen=True):
    """One process's configuration, with its sources."""

    member: Member
    given: Layer
    config: msgspec.Struct

    @property
    def service(self) -> Service:
        """The service that it runs."""
        return SERVICES[self.member.service]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How to run the services.

    ``commands`` are in the order of the start. ``stop_stages`` have seconds from SIGTERM to SIGKILL by name. A process
    that is silent for ``hang_s`` seconds is replaced. ``targets`` are how this host reaches the gateways. ``directory``
    is private. ``settled`` and ``listeners`` (process and HOST:PORT) are checked before the start. ``awaited``: the
    executors that must work before all is ready; empty if serving shows that. ``http_urls``: the gateways' own OpenAI APIs.
    """

    commands: dict[str, list[str]]
    restart_policy: RestartPolicy
    stop_stages: list[dict[str, float]]
    hang_s: float
    targets: list[Target]
    directory: Path
    settled: list[Settled]
    listeners: list[tuple[str, str]]
    http_urls: tuple[str, ...] = ()
    openai_address: str = ""
    smg_flags: tuple[str, ...] = ()
    environments: dict[str, dict[str, str]] = {}
    cores: dict[str, frozenset[int]] = {}
    awaited: tuple[str, ...] = ()

    @property
    def start_order(self) -> list[str]:
        """The processes in order."""
        return list(self.commands)

    @property
    def models(self) -> list[Path]:
        """The directories of the executors' checkpoints."""
        configs = [each.config for each in self.settled if isinstance(each.config, ExecutorConfig)]
        return [Path(model) for model in dict.fromkeys(config.model for config in configs) if model]

    def orders(self, environment: Mapping[str, str]) -> FleetOrders:
        """Return what is to be run; ``environment`` is that of every process."""
        return FleetOrders(
            commands=self.commands,
            stop_stages=self.stop_stages,
            restart_policy=self.restart_policy,
            hang_s=self.hang_s,
            directory=self.directory,
            environment=environment,
            environments=self.environments,
            cores=self.cores,
            num_cores=len(_own_cores()),
        )


def make_plan(arguments: argparse.Namespace, environment: Mapping[str, str], directory: Path) -> Plan:
    """Settle and validate every configuration before anything starts.

    Raises:
        ConfigurationError: a source is wrong.
    """
    deployment = read_deployment(arguments, environment)
    serve, values_of = deployment.serve, deployment.values
    probe_token = _probe_token(values_of["gateway"])
    # Another server may answer at the gateway's address; only one of these gateways answers under this name.
    health_name = Given(secrets.token_hex(16), "the launcher")
    layout = _layout(deployment)
    metrics_ports = _metrics_ports(layout, serve.metrics_port, values_of["gateway"])
    settled = _settle_all(deployment, layout, health_name, metrics_ports, directory)
    gateways = [each.config for each in settled if isinstance(each.config, GatewayConfig)]
    listeners = _listeners(serve, gateways, metrics_ports)
    check_apart(listeners)
    return Plan(
        commands=_commands(serve, settled, gateways),
        restart_policy=RestartPolicy(max_restarts=serve.max_restarts, window_s=serve.restart_window_s),
        hang_s=serve.hang_s,
        targets=[_target(gateway, serve, probe_token) for gateway in gateways],
        stop_stages=_stop_stages(serve, settled, gateways),
        directory=directory,
        settled=settled,
        listeners=listeners,
        http_urls=tuple(_http_url(gateway) for gateway in gateways if gateway.http_address),
        openai_address=serve.openai_address,
        smg_flags=serve.smg_flags,
        environments={each.member.name: each.member.environment for each in settled if each.member.environment},
        cores=_cores(settled),
        awaited=_awaited(layout, settled),
    )


def _probe_token(gateway: dict[str, Given]) -> str:
    # The token file may hold digests only, so serve has its own token, and the gateways get its digest.
    token = secrets.token_urlsafe(32)
    if gateway.get("auth_token_file", _NOTHING).value:
        gateway["launcher_token_digest"] = Given(hashlib.sha256(token.encode()).hexdigest(), "the launcher")
    return token


def _layout(deployment: Deployment) -> Layout:
    entries = deployment.starting()
    shares = tuple(_share(deployment.executor_values(entry)) for entry in entries)
    return Layout(deployment.serve.replicas, len(entries), shares)


def _share(values: Layer) -> Share:
    device = values["device"].value if "device" in values else "cpu"
    return Share(num_ranks(values), on_cuda=device.startswith("cuda"))


def _metrics_ports(layout: Layout, first_port: int, gateway: Layer) -> list[range]:
    """Each process and further gateway worker has a port."""
    if not first_port:
        return [range(0)] * layout.num_replicas
    num_workers = max(1, gateway.get("workers", _ONE_WORKER).value)  # The gateway itself refuses 0.
    num_own = 1 + layout.num_executors + num_workers
    ports = range(first_port, first_port + layout.num_replicas * num_own)
    if ports[-1] > LAST_PORT:
        raise ConfigurationError(
            f"--metrics-port: {first_port} is not allowed; allowed: at most {LAST_PORT + 1 - len(ports)}, "
            f"because {len(ports)} ports are needed"
        )
    return [ports[first : first + num_own] for first in range(0, len(ports), num_own)]


def _settle_all(
    deployment: Deployment,
    layout: Layout,
    health_name: Given,
    metrics_ports: Sequence[range],
    directory: Path,
) -> list[Settled]:
    gateway = deployment.values["gateway"]
    addresses = replica_addresses(gateway.get("grpc_address", _GRPC_ADDRESS), layout.num_replicas)
    http_addresses = replica_addresses(gateway.get("http_address", _NOTHING), layout.num_replicas)
    roles = roles_in_order(deployment.starting())
    settled = []
    for replica, (address, http_address, ports) in enumerate(
        zip(addresses, http_addresses, metrics_ports, strict=True)
    ):
        own = {
            "grpc_address": address,
            "http_address": http_address,
            "launcher_health_name": health_name,
            "max_executors": _given_by_launcher(layout.num_executors),
            **_links(layout, replica, directory),
        }
        if roles:
            own["roles"] = Given(roles, f"[[{EXECUTORS_TABLES}]]")
        settled += _settled(layout.members(replica), deployment, own, ports)
    return settled


def _settled(
    members: Sequence[Member], deployment: Deployment, from_launcher: Layer, metrics_ports: range
) -> list[Settled]:
    entries = deployment.starting()
    settled = []
    for index, member in enumerate(members):
        service = SERVICES[member.service]
        own = dict(from_launcher)
        if metrics_ports:
            own["metrics_address"] = _given_by_launcher(f"{LOOPBACK}:{metrics_ports[index]}")
        shared = (
            deployment.executor_values(entries[member.executor])
            if member.service == EXECUTOR
            else deployment.values[member.service]
        )
        values = member.of_its_own(shared)
        given = merged((_known_to(service, own), _known_to(service, _threads(member, values)), values))
        settled.append(Settled(member, given, service.build(given)))
    return settled


def _links(layout: Layout, replica: int, directory: Path) -> Layer:
    return {
        "ingress_address": _given_by_launcher(f"ipc://{directory}/{layout.named('ingress', replica)}"),
        "step_address": _given_by_launcher(f"ipc://{directory}/{layout.named('step', replica)}"),
        "exit_with_parent": _given_by_launcher(True),
    }


def _given_by_launcher(value: str | bool | int) -> Given:
    return Given(value, "the launcher")


def _known_to(service: Service, layer: Layer) -> Layer:
    return {name: given for name, given in layer.items() if name in service.settings}


def _threads(member: Member, values: Layer) -> Layer:
    """Without cores of its own beside others, an executor uses one thread."""
    if member.is_alone or member.share_of(_own_cores()) or "num_threads" in values:
        return {}
    return {"num_threads": _given_by_launcher(1)}


def _cores(settled: Sequence[Settled]) -> dict[str, frozenset[int]]:
    cores = {}
    for each in settled:
        config, own = each.config, each.member.share_of(_own_cores())
        if isinstance(config, ExecutorConfig) and own and config.device == "cpu" and not config.num_threads:
            cores[each.member.name] = own
    return cores


def _own_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _of(service: str, settled: Sequence[Settled]) -> list[Settled]:
    return [each for each in settled if each.member.service == service]


def _awaited(layout: Layout, settled: Sequence[Settled]) -> tuple[str, ...]:
    """A scheduler serves as soon as it has one of its executors."""
    return tuple(each.member.name for each in _of(EXECUTOR, settled)) if layout.num_executors > 1 else ()


def _commands(
    serve: ServeConfig, settled: Sequence[Settled], gateways: Sequence[GatewayConfig]
) -> dict[str, list[str]]:
    commands = {
        each.member.name: _command(service, each.config) for service in START_ORDER for each in _of(service, settled)
    }
    if serve.openai_address:
        commands[SMG] = _smg_command(serve, gateways)
    return commands


def _stop_stages(
    serve: ServeConfig, settled: Sequence[Settled], gateways: Sequence[GatewayConfig]
) -> list[dict[str, float]]:
    """Each service has its time and a margin."""
    stages = [
        {each.member.name: getattr(each.config, "grace_s", 0.0) + STOP_GRACE_S for each in _of(service, settled)}
        for service in STOP_ORDER
    ]
    if not serve.openai_address:
        return stages
    return [{SMG: gateways[0].grace_s + STOP_GRACE_S}, *stages]


def _listeners(
    serve: ServeConfig, gateways: Sequence[GatewayConfig], metrics_ports: Sequence[range]
) -> list[tuple[str, str]]:
    """Return pairs of a flag and HOST:PORT."""
    listeners = [("--grpc-address", gateway.grpc_address) for gateway in gateways]
    listeners += [("--http-address", gateway.http_address) for gateway in gateways if gateway.http_address]
    if serve.openai_address:
        listeners.append(("--openai-address", serve.openai_address))
    listeners += [("--metrics-port", f"{LOOPBACK}:{port}") for ports in metrics_ports for port in ports]
    return listeners


def _smg_command(serve: ServeConfig, gateways: Sequence[GatewayConfig]) -> list[str]:
    gateway = gateways[0]
    for field in ("auth_token_file", "tls_cert_file"):
        if getattr(gateway, field):
            raise ConfigurationError(
                f"--openai-address: not allowed together with --{field.replace('_', '-')}; allowed: without it, or an smg "
                "that you start yourself, see docs/openai.md"
            )
    if not serves_vllm_engine(gateway):
        raise ConfigurationError(
            f"--vllm-engine: {gateway.vllm_engine!r} is not allowed; allowed: auto or on, because --openai-address is given; "
            f"smg-grpc-proto must be there: {install_advice('smg')}"
        )
    return openai_front.command(
        openai_address=serve.openai_address,
        gateway_addresses=[each.grpc_address for each in gateways],
        metrics_port=free_ports(LOOPBACK, 1)[0],
        grace_s=gateway.grace_s,
        flags=serve.smg_flags,
    )


def _http_url(gateway: GatewayConfig) -> str:
    scheme = "https" if gateway.tls_cert_file else "http"
    return f"{scheme}://{Target(address=gateway.http_address).reachable_address}/v1"


def _target(gateway: GatewayConfig, serve: ServeConfig, probe_token: str) -> Target:
    if gateway.tls_client_ca_file and not serve.probe_cert_file:
        raise ConfigurationError(
            "--probe-cert-file is required together with --tls-client-ca-file; "
            "allowed: a PEM certificate that serve itself may show to the gateway"
        )
    return Target(
        address=gateway.grpc_address,
        health_name=gateway.launcher_health_name,
        certificates=bytes_of_file(gateway.tls_cert_file, "--tls-cert-file"),
        token=probe_token if gateway.auth_token_file else "",
        client=client_certificate(serve.probe_cert_file, serve.probe_key_file, "--probe-cert-file"),
    )


def _command(name: str, config: msgspec.Struct) -> list[str]:
    words = [sys.executable, "-P", "-m", "headway", name]
    for setting in settings_of(type(config)).values():
        value = getattr(config, setting.name)
        if setting.required or value != setting.default:
            words += as_text(setting, value)
    return words


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Drop ``HEADWAY_*``: children get flags. Drop torchrun's: each executor starts its own ranks."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith("HEADWAY_") and name not in OF_TORCHRUN
    }
