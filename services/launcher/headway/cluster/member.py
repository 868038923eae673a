"""One process of a deployment on this node, supervised as ``headway serve`` supervises its own.

An engine makes a ``Member`` in an actor on the node that it has chosen. Must not know: engines, other nodes.
"""

import asyncio
import contextlib
import importlib.metadata
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from headway.cluster.description import SCHEDULER, Probe, ProcessOrder, command_words
from headway.planning.plan import without_settings
from headway.planning.replicas import LOOPBACK
from headway.running.fleet_runner import FleetOrders, FleetRunner
from headway.running.health import SERVING, Target, health_of
from headway.running.socket_directory import socket_directory
from headway.running.supervision import RestartPolicy
from headway_process.free_ports import free_ports

_OF_RAY = "RAY_"
"""Its token among them, which the process does not need."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a member's process. ``exit_code`` once it was given up; ``reason`` then says why."""

    process_id: int | None
    restarts: int
    has_begun: bool
    links: dict[str, str]
    metrics: str = ""
    log: str = ""
    exit_code: int | None = None
    reason: str = ""


class Member:
    """Runs one process. All methods belong to one event loop."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._order: ProcessOrder | None = None
        self._links: dict[str, str] = {}
        self._metrics = ""
        self._runner: FleetRunner | None = None
        self._running: asyncio.Task[int] | None = None
        self._lines: list[str] = []
        self._cleanup = contextlib.ExitStack()

    def version(self) -> str:
        """Return the version of Headway on this node."""
        return importlib.metadata.version("headway")

    async def start(self, order: ProcessOrder, links: dict[str, str]) -> Report:
        """Run the process; where it runs with these links already, nothing changes.

        A scheduler binds to ``links`` if their ports are free here, else to ports that are.
        """
        if self._running is not None and order == self._order and (order.service == SCHEDULER or links == self._links):
            return self.report()
        await self.stop()
        self._order = order
        self._links = self._own_links(links) if order.service == SCHEDULER else dict(links)
        self._metrics = self._metrics or self._free_metrics_address(order)
        directory = self._cleanup.enter_context(socket_directory())
        self._runner = FleetRunner(self._orders(order, directory), self._say)
        self._running = asyncio.create_task(self._runner.run())
        return self.report()

    async def stop(self) -> None:
        """End the process as SIGTERM does, within its grace; leave no file."""
        if self._running is not None and self._runner is not None:
            if not self._running.done():
                self._runner.ask_to_stop(signal.SIGTERM)
            await self._running
        self._running = self._runner = None
        self._cleanup.close()

    def report(self) -> Report:
        """Return how the process is."""
        assert self._order is not None
        name, runner = self._order.name, self._runner
        ended = self._running.result() if self._running is not None and self._running.done() else None
        return Report(
            process_id=runner.process_id(name) if runner else None,
            restarts=runner.num_restarts(name) if runner else 0,
            has_begun=runner.has_begun(name) if runner else False,
            links=self._links,
            metrics=self._metrics,
            log=_own_log(),
            exit_code=ended,
            reason=self._reason(ended),
        )

    async def is_serving(self, probe: Probe) -> bool:
        """Ask the gateway, which is on this node."""
        target = Target(
            address=probe.address, health_name=probe.health_name, certificates=probe.certificates, token=probe.token
        )
        return (await asyncio.to_thread(health_of, target)).status == SERVING

    async def status(self, probe: Probe) -> dict[str, Any]:
        """Return the figures of the scheduler that scaling needs; empty if the gateway does not answer."""
        from headway.cluster.questions import figures_of

        return await asyncio.to_thread(figures_of, probe)

    async def drain(self, probe: Probe, executor: int, undo: bool) -> str:
        """Drain an executor, or undo that; return why it was refused, if it was."""
        from headway.cluster.questions import drain

        return await asyncio.to_thread(drain, probe, executor, undo)

    def _own_links(self, wanted: dict[str, str]) -> dict[str, str]:
        names = ("step_address", "ingress_address")
        ports = [int(wanted[name].rpartition(":")[2]) for name in names if name in wanted]
        if len(ports) < len(names) or not all(_is_free(self._address, port) for port in ports):
            ports = free_ports(self._address, len(names))
        return {name: f"tcp://{self._address}:{port}" for name, port in zip(names, ports, strict=True)}

    def _free_metrics_address(self, order: ProcessOrder) -> str:
        if not order.has_metrics:
            return ""
        host = self._address if order.metrics_beyond_loopback else LOOPBACK
        return f"{host}:{free_ports(host, 1)[0]}"

    def _orders(self, order: ProcessOrder, directory: Path) -> FleetOrders:
        keys = directory / "keys"
        _write_keys(keys, order.keys)
        words = command_words(order, {**self._links, "curve_keys": str(keys), "metrics_address": self._metrics})
        return FleetOrders(
            commands={order.name: [sys.executable, "-P", "-m", "headway", order.service, *words]},
            stop_stages=[{order.name: order.grace_s}],
            restart_policy=RestartPolicy(max_restarts=order.max_restarts, window_s=order.restart_window_s),
            hang_s=order.hang_s,
            directory=directory,
            environment={k: v for k, v in without_settings(os.environ).items() if not k.startswith(_OF_RAY)},
            environments={order.name: order.environment},
        )

    def _say(self, text: str) -> None:
        self._lines = [*self._lines[-9:], text]
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} headway cluster: {text}\n")
            sys.stderr.flush()

    def _reason(self, exit_code: int | None) -> str:
        if exit_code is None or self._runner is None:
            return ""
        return self._runner.refusal().strip() if self._runner.refused_by else "; ".join(self._lines[-1:])


def _write_keys(directory: Path, keys: dict[str, str]) -> None:
    """Write the keys so that only this user can read them."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    for name, text in keys.items():
        path = directory / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)


def _is_free(host: str, port: int) -> bool:
    import socket

    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _own_log() -> str:
    """Return the file into which this process's standard error goes, and so the log of its child."""
    with contextlib.suppress(OSError):
        target = Path("/proc/self/fd/2").readlink()
        if target.is_file():
            return str(target)
    return ""
