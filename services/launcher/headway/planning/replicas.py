"""The processes of ``headway serve --replicas N --executors M``, and the differences between them.

A process that is the only one of its service has every setting as given.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from headway.flags.configuration import Given, Layer
from headway.flags.settings import ConfigurationError
from headway_process.fleet_numbers import EXECUTOR_VARIABLE, REPLICA_VARIABLE
from headway_process.free_ports import free_ports
from headway_proto.wording import shown

REPLICA_NAMES = "replica-"
LAST_PORT = 65535
LOOPBACK = "127.0.0.1"
SERVICE_ORDER = ("scheduler", "executor", "gateway")
"""The services of a replica, in the order of their metrics ports."""
EXECUTOR = "executor"
_ANY_HOST = frozenset(("0.0.0.0", "[::]"))  # noqa: S104 (addresses that clash with every other, not ones to bind)
_CPU = "cpu"
_CUDA = "cuda"
CUDA_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
_ONE_FILE_OPTION = "step_log"
_LEAST_SHARE_OF_REPLICA = 2
"""Cores; with one each, an executor could not give way to its replica's other processes."""


class Share(msgspec.Struct, frozen=True):
    """What one executor takes of the machine: for each rank a device, or an equal share of the cores."""

    num_ranks: int = 1
    on_cuda: bool = False


class Layout(msgspec.Struct, frozen=True):
    """How many replicas there are, and how many executors each has. ``shares``: theirs by number, if they differ."""

    num_replicas: int = 1
    num_executors: int = 1
    shares: tuple[Share, ...] = ()

    def share(self, executor: int) -> Share:
        """Return what an executor of a replica takes."""
        return self.shares[executor] if self.shares else Share()

    def ranks_before(self, replica: int, executor: int) -> int:
        """Return the ranks of the executors before this one that take of the same kind."""
        on_cuda = self.share(executor).on_cuda
        return replica * self.ranks_alike(executor) + sum(
            share.num_ranks for share in map(self.share, range(executor)) if share.on_cuda == on_cuda
        )

    def ranks_alike(self, executor: int) -> int:
        """Return the ranks of a replica's executors that take of the same kind as this one."""
        alike = self.share(executor).on_cuda
        return sum(share.num_ranks for share in map(self.share, range(self.num_executors)) if share.on_cuda == alike)

    @property
    def total_executors(self) -> int:
        """The executors of all replicas."""
        return self.num_replicas * self.num_executors

    @property
    def in_words(self) -> str:
        """The executors, as users count them."""
        return f"{self.num_replicas} replicas" if self.num_executors == 1 else f"{self.total_executors} executors"

    def named(self, name: str, replica: int) -> str:
        """Name a process or link of a replica."""
        return name if self.num_replicas == 1 else f"{name}-{replica}"

    def members(self, replica: int) -> "list[Member]":
        """Return a replica's processes, in ``SERVICE_ORDER``."""
        return [
            Member(service, replica, index, self)
            for service in SERVICE_ORDER
            for index in range(self.num_executors if service == EXECUTOR else 1)
        ]


class Member(msgspec.Struct, frozen=True):
    """One process. ``executor``: its number among its replica's executors."""

    service: str
    replica: int = 0
    executor: int = 0
    layout: Layout = Layout()

    @property
    def name(self) -> str:
        """The name of the process."""
        name = self.layout.named(self.service, self.replica)
        return f"{name}-{self.executor}" if self._is_one_of_several_here else name

    @property
    def environment(self) -> dict[str, str]:
        """The variables that name it in its log lines."""
        variables = {}
        if self.layout.num_replicas > 1:
            variables[REPLICA_VARIABLE] = str(self.replica)
        if self._is_one_of_several_here:
            variables[EXECUTOR_VARIABLE] = str(self.executor)
        if self.service == EXECUTOR and self._share.on_cuda and self._share.num_ranks > 1 and not self.is_alone:
            variables[CUDA_DEVICES_VARIABLE] = ",".join(map(str, self._devices))
        return variables

    @property
    def is_alone(self) -> bool:
        """Whether no other executor is beside it."""
        return self.layout.total_executors == 1

    @property
    def _share(self) -> Share:
        return self.layout.share(self.executor)

    @property
    def _devices(self) -> range:
        first = self.layout.ranks_before(self.replica, self.executor)
        return range(first, first + self._share.num_ranks)

    @property
    def _is_one_of_several_here(self) -> bool:
        return self.service == EXECUTOR and self.layout.num_executors > 1

    def of_its_own(self, given: Layer) -> dict[str, Given]:
        """Return its settings, changed where needed.

        Raises:
            ConfigurationError: no change is possible.
        """
        result = dict(given)
        for name, count, derive in (
            ("flight_log", self.layout.num_replicas, self._directory),
            ("device", self.layout.total_executors, self._device),
            ("backend_options", self.layout.total_executors, self._backend_options),
        ):
            if name in result and count > 1:
                result[name] = Given(derive(result[name]), result[name].origin)
        return result

    def _directory(self, given: Given) -> str:
        return str(Path(given.value) / f"{REPLICA_NAMES}{self.replica}") if given.value else ""

    def _device(self, given: Given) -> str:
        """``cuda`` becomes a device for each executor; one of several ranks sees only its own devices."""
        device: str = given.value
        if device == _CUDA:
            return device if self._share.num_ranks > 1 else f"{_CUDA}:{self._devices.start}"
        if device.startswith(f"{_CUDA}:"):
            raise ConfigurationError(
                f"{given.origin}: {shown(device)} is not allowed; allowed: {_CUDA}, of which each of {self.layout.in_words} "
                f"takes one, or {_CPU}"
            )
        return device

    def _backend_options(self, given: Given) -> Mapping[str, str]:
        options: Mapping[str, str] = given.value
        if _ONE_FILE_OPTION in options:
            raise ConfigurationError(
                f"{given.origin}: {_ONE_FILE_OPTION} is not allowed; allowed: without it, because {self.layout.in_words} "
                "would write one file"
            )
        return options

    def share_of(self, cores: Sequence[int]) -> frozenset[int]:
        """Return an executor's share, equal for each rank; none if it is alone, or if the cores are too few."""
        num_each = len(cores) // (self.layout.num_replicas * self.layout.ranks_alike(self.executor))
        least = 1 if self.layout.num_executors > 1 else _LEAST_SHARE_OF_REPLICA
        if self.is_alone or num_each < least:
            return frozenset()
        own = self._devices
        return frozenset(sorted(cores)[own.start * num_each : own.stop * num_each])


def replica_addresses(given: Given, count: int) -> list[Given]:
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
