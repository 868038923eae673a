"""What tells the replicas of ``headway serve --replicas N`` apart: each is a scheduler, an executor and a gateway.

Owns: their names, and what each is given of a setting that they cannot share: ports, directories, devices, processor
cores. Must not know: where a setting came from, or how a process is started.

A server of one replica has everything as it was given, and its processes have their plain names.
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
        """Whether there is no other to be told apart from."""
        return self.count == 1

    def named(self, name: str) -> str:
        """The name of one of its processes, or of its links."""
        return name if self.is_alone else f"{name}-{self.index}"

    def of_its_own(self, given: Layer) -> dict[str, Given]:
        """Return a service's settings with those changed that the replicas cannot share.

        Raises:
            ConfigurationError: one cannot be shared, and not be derived either.
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
        """A device each: ``cuda`` is device ``index``."""
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
        """The cores for an executor whose threads compute: its equal share, or none if there are not two for each."""
        num_own = len(cores) // self.count
        if self.is_alone or num_own < 2:
            return frozenset()
        return frozenset(sorted(cores)[self.index * num_own : (self.index + 1) * num_own])


def replicas_of(count: int) -> list[Replica]:
    """Return this many replicas."""
    return [Replica(index=index, count=count) for index in range(count)]


def grpc_addresses(given: Given, count: int) -> list[Given]:
    """Return a HOST:PORT for each of ``count`` gateways: the ports from the given one on, or free ones if that is 0.

    Free ones are settled here, so that an address holds over restarts of its gateway. What is no HOST:PORT stays as it is,
    for the gateway's own words.

    Raises:
        ConfigurationError: there are not as many ports, or the host is not this machine's.
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
    """Return different ports that nobody listens on just now.

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
    """Refuse addresses of which two are the same; ``listeners`` are pairs of who listens and HOST:PORT.

    Raises:
        ConfigurationError: it names both.
    """
    taken: list[tuple[str, str, str]] = []
    for who, address in listeners:
        host, _, port = address.rpartition(":")
        for other, other_host, other_port in taken:
            if port == other_port and (host == other_host or {host, other_host} & _ANY_HOST):
                raise ConfigurationError(f"{who}: port {port} is not allowed; allowed: another, because {other} has it")
        taken.append((who, host, port))
