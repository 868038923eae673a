"""The differences between the replicas of ``headway serve --replicas N``. A single replica has every setting as
given.
"""

import contextlib
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from headway.configuration import Given, Layer
from headway.settings import ConfigurationError, shown

REPLICA_NAMES = "replica-"
LAST_PORT = 65535
LOOPBACK = "127.0.0.1"
_ANY_HOST = frozenset(("0.0.0.0", "[::]"))  # noqa: S104 (addresses that clash with every other, not ones to bind)
_CPU = "cpu"
_CUDA = "cuda"
_ONE_FILE_OPTION = "step_log"


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One of ``count`` replicas, numbered from 0."""

    index: int
    count: int

    @property
    def is_alone(self) -> bool:
        """Whether it is the only one."""
        return self.count == 1

    def named(self, name: str) -> str:
        """Name a process or link."""
        return name if self.is_alone else f"{name}-{self.index}"

    def of_its_own(self, given: Layer) -> dict[str, Given]:
        """Return a service's settings, changed where needed.

        Raises:
            ConfigurationError: no change is possible.
        """
        result = dict(given)
        if self.is_alone:
            return result
        for name, derive in (
            ("flight_log", self._directory),
            ("device", self._device),
            ("backend_options", self._backend_options),
        ):
            if name in result:
                result[name] = Given(derive(result[name]), result[name].origin)
        return result

    def _directory(self, given: Given) -> str:
        return str(Path(given.value) / f"{REPLICA_NAMES}{self.index}") if given.value else ""

    def _device(self, given: Given) -> str:
        """``cuda`` becomes device ``index``."""
        device: str = given.value
        if device == _CUDA:
            return f"{_CUDA}:{self.index}"
        if device.startswith(f"{_CUDA}:"):
            raise ConfigurationError(
                f"{given.origin}: {shown(device)} is not allowed; allowed: {_CUDA}, of which each of {self.count} replicas "
                f"takes one, or {_CPU}"
            )
        return device

    def _backend_options(self, given: Given) -> Mapping[str, str]:
        options: Mapping[str, str] = given.value
        if _ONE_FILE_OPTION in options:
            raise ConfigurationError(
                f"{given.origin}: {_ONE_FILE_OPTION} is not allowed; allowed: without it, because {self.count} replicas "
                "would write one file"
            )
        return options

    def share_of(self, cores: Sequence[int]) -> frozenset[int]:
        """Return an equal share, or none below two cores each."""
        num_own = len(cores) // self.count
        if self.is_alone or num_own < 2:
            return frozenset()
        return frozenset(sorted(cores)[self.index * num_own : (self.index + 1) * num_own])


def replicas_of(count: int) -> list[Replica]:
    """Return this many replicas."""
    return [Replica(index=index, count=count) for index in range(count)]


def grpc_addresses(given: Given, count: int) -> list[Given]:
    """Return each gateway's HOST:PORT: the given port and those after it, or free ones if it is 0.

    A restarted gateway keeps its free port.

    Raises:
        ConfigurationError: there are too few ports, or the host is not this machine's.
    """
    address: str = given.value
    host, _, text = address.rpartition(":")
    if not (host and text.isascii() and text.isdigit()) or int(text) > LAST_PORT:
        return [given] * count
    port = int(text)
    if port + count - 1 > LAST_PORT:
        raise ConfigurationError(
            f"{given.origin}: {shown(address)} is not allowed; allowed: a port of at most {LAST_PORT - count + 1}, because "
            f"each of {count} replicas takes one"
        )
    try:
        ports = free_ports(host, count) if port == 0 else range(port, port + count)
    except OSError as error:
        raise ConfigurationError(f"{given.origin}: {shown(address)} cannot be bound: {error.strerror}") from None
    return [Given(f"{host}:{port}", given.origin) for port in ports]


def free_ports(host: str, count: int) -> list[int]:
    """Return different free ports.

    Raises:
        OSError: ``host`` is not this machine's.
    """
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket(family, socket.SOCK_STREAM)) for _ in range(count)]
        for probe in probes:
            probe.bind((host.strip("[]"), 0))
        return [probe.getsockname()[1] for probe in probes]


def check_apart(listeners: Sequence[tuple[str, str]]) -> None:
    """Check pairs of a name and HOST:PORT.

    Raises:
        ConfigurationError: two addresses are equal.
    """
    taken: list[tuple[str, str, str]] = []
    for name, address in listeners:
        host, _, port = address.rpartition(":")
        for other, other_host, other_port in taken:
            if port == other_port and (host == other_host or {host, other_host} & _ANY_HOST):
                raise ConfigurationError(
                    f"{name}: port {port} is not allowed; allowed: another, because {other} has it"
                )
        taken.append((name, host, port))
