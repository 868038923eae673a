"""What runs in a cluster: the processes of a deployment, and what each needs where it runs.

Pure. Must not know: engines, nodes, sockets.
"""

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from headway.flags.configuration import Given, Layer
from headway.flags.settings import ConfigurationError, as_text, settings_of
from headway.planning.cluster_config import ClusterConfig
from headway.planning.deployment import Deployment, ExecutorEntry, num_ranks, roles_in_order
from headway.planning.model_source import DEMO_MODEL, DEMO_MODEL_DIRECTORY
from headway.planning.plan import STOP_GRACE_S
from headway.planning.services import SERVICES, Service
from headway_process.addresses import is_loopback
from headway_process.fleet_numbers import EXECUTOR_VARIABLE
from headway_proto.wording import shown

SCHEDULER, EXECUTOR, GATEWAY = "scheduler", "executor", "gateway"
STOP_ORDER = (GATEWAY, SCHEDULER, EXECUTOR)
_KEY_SUFFIXES = frozenset({".key", ".key_secret"})
_FILES = ("model", "draft_model", "flight_log", "tls_cert_file", "tls_key_file", "tls_client_ca_file", "auth_token_file",
          "metrics_token_file")  # fmt: skip


class ProcessOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One process: what an actor on any node needs to run it, without the addresses of its links.

    ``keys`` are the CURVE keys as texts by relative path, secret. ``cpus`` and ``gpus`` are what it reserves.
    """

    name: str
    service: str
    words: tuple[str, ...]
    keys: dict[str, str]
    grace_s: float
    cpus: float
    gpus: int = 0
    number: int = 0
    entry: int = -1
    environment: dict[str, str] = {}
    hang_s: float = 15.0
    max_restarts: int = 10
    restart_window_s: float = 60.0
    has_metrics: bool = False
    metrics_beyond_loopback: bool = False


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """How many executors of one table ``[[executors]]`` there are at the start, at least and at most."""

    count: int
    least: int
    most: int
    role: str
    max_num_seqs: int


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """How the gateway's own node asks the gateway. ``token`` may only generate; ``admin_token`` may drain."""

    address: str
    health_name: str
    certificates: bytes | None = None
    token: str = ""
    admin_token: str = ""


class ClusterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All processes that there may be, and the bounds of each table of executors."""

    cluster: ClusterConfig
    orders: tuple[ProcessOrder, ...]
    pools: tuple[Bounds, ...]
    probe: Probe


def describe(
    deployment: Deployment, cluster: ClusterConfig, keys: Path, tokens: tuple[bytes | None, str]
) -> ClusterPlan:
    """Settle every process but its place. ``keys`` is what ``headway keys`` makes.

    ``tokens`` are the gateway's certificates and the admin token.

    Raises:
        ConfigurationError: a setting does not fit a cluster.
    """
    _check(deployment, cluster)
    health_name, token = secrets.token_hex(16), secrets.token_urlsafe(32)
    most = deployment.at_most()
    gateway = deployment.values[GATEWAY]
    own: dict[str, Layer] = {
        SCHEDULER: {"max_executors": _own(len(most)), **_roles(deployment)},
        GATEWAY: {"launcher_health_name": _own(health_name), **_digest(gateway, token)},
    }
    front = [_order(deployment, name, deployment.values[name], own[name], keys) for name in (SCHEDULER, GATEWAY)]
    executors = [_executor(deployment, cluster, number, entry, keys) for number, entry in enumerate(most)]
    certificates, admin_token = tokens
    return ClusterPlan(
        cluster=cluster,
        orders=(*front, *executors),
        pools=tuple(_bounds(deployment, entry) for entry in deployment.entries),
        probe=Probe(
            address=_value(gateway, GATEWAY, "grpc_address"),
            health_name=health_name,
            certificates=certificates,
            token=token if _value(gateway, GATEWAY, "auth_token_file") else "",
            admin_token=admin_token,
        ),
    )


def command_words(order: ProcessOrder, links: Mapping[str, str]) -> list[str]:
    """Return the flags of a process with the addresses of its links."""
    known = SERVICES[order.service].settings
    return [*order.words, *(f"{known[name].flag}={address}" for name, address in links.items() if name in known)]


def stop_stages(orders: Iterable[ProcessOrder]) -> list[list[ProcessOrder]]:
    """Return who stops together, in order."""
    every = list(orders)
    return [[order for order in every if order.service == service] for service in STOP_ORDER]


def _check(deployment: Deployment, cluster: ClusterConfig) -> None:
    serve, gateway = deployment.serve, deployment.values[GATEWAY]
    if serve.replicas != 1:
        raise ConfigurationError(
            f"replicas: {serve.replicas} is not allowed; allowed: 1 in a cluster, with [[executors]]"
        )
    if serve.openai_address:
        raise ConfigurationError(
            f"openai_address: {shown(serve.openai_address)} is not allowed; allowed: without it in a cluster; start smg beside "
            "the gateway, see docs/openai.md"
        )
    address = _value(gateway, GATEWAY, "grpc_address")
    if not address.rpartition(":")[2].lstrip("0"):
        raise ConfigurationError(f"grpc_address: {shown(address)} is not allowed; allowed: a port above 0 in a cluster")
    scales = any(entry.least < entry.most for entry in deployment.entries)
    if scales and _value(gateway, GATEWAY, "auth_token_file") and not cluster.token_file:
        raise ConfigurationError(
            "token_file: '' is not allowed; allowed: a file with a token of the role admin, because the gateway wants "
            "tokens and [[executors]] have min and max"
        )


def _executor(
    deployment: Deployment, cluster: ClusterConfig, number: int, entry: ExecutorEntry, keys: Path
) -> ProcessOrder:
    values = deployment.executor_values(entry)
    ranks = num_ranks(values)
    on_cuda = _value(values, EXECUTOR, "device").startswith("cuda")
    order = _order(deployment, EXECUTOR, values, {}, keys)
    each = cluster.cpus or (1.0 if on_cuda else float(_value(values, EXECUTOR, "num_threads") or 1))
    return msgspec.structs.replace(
        order,
        name=f"{EXECUTOR}-{number}",
        cpus=ranks * each,
        gpus=ranks if on_cuda else 0,
        number=number,
        entry=deployment.entries.index(entry),
        environment={EXECUTOR_VARIABLE: str(number)},
    )


def _order(deployment: Deployment, name: str, values: Layer, own: Layer, keys: Path) -> ProcessOrder:
    service = SERVICES[name]
    serve = deployment.serve
    given = {**values, **own, "exit_with_parent": _own(True)}
    grace_s = _value(given, name, "grace_s") if "grace_s" in service.settings else 0.0
    return ProcessOrder(
        name=name,
        service=name,
        words=tuple(_words(service, given)),
        keys={
            str(path.relative_to(keys / name)): path.read_text("ascii")
            for path in sorted((keys / name).rglob("*"))
            if path.suffix in _KEY_SUFFIXES
        },
        grace_s=grace_s + STOP_GRACE_S,
        cpus=1.0,
        hang_s=serve.hang_s,
        max_restarts=serve.max_restarts,
        restart_window_s=serve.restart_window_s,
        has_metrics=bool(serve.metrics_port),
        metrics_beyond_loopback=bool(_value(given, name, "metrics_token_file")),
    )


def _words(service: Service, given: Layer) -> list[str]:
    words = []
    for name, setting in settings_of(service.struct).items():
        if name in given and (setting.required or given[name].value != setting.default):
            words += as_text(setting, _elsewhere(name, given[name].value))
    return words


def _elsewhere(name: str, value: object) -> object:
    """Return a value as another process finds it: with the path from the root, or the demo model of its own host."""
    if name not in _FILES or not value:
        return value
    return DEMO_MODEL if value == str(DEMO_MODEL_DIRECTORY) else str(Path(str(value)).absolute())


def _roles(deployment: Deployment) -> Layer:
    roles = roles_in_order(deployment.at_most())
    return {"roles": _own(roles)} if roles else {}


def _digest(gateway: Layer, token: str) -> Layer:
    if not _value(gateway, GATEWAY, "auth_token_file"):
        return {}
    return {"launcher_token_digest": _own(hashlib.sha256(token.encode()).hexdigest())}


def _bounds(deployment: Deployment, entry: ExecutorEntry) -> Bounds:
    seqs = _value(deployment.values[SCHEDULER], SCHEDULER, "max_num_seqs")
    return Bounds(count=entry.count, least=entry.least, most=entry.most, role=entry.role, max_num_seqs=seqs)


def _value(given: Layer, service: str, name: str) -> Any:
    return given[name].value if name in given else SERVICES[service].settings[name].default


def _own(value: object) -> Given:
    return Given(value, "headway cluster")


def loopback_only(address: str) -> bool:
    """Whether only this machine reaches HOST:PORT."""
    return is_loopback(address.rpartition(":")[0])
