"""Several gateway processes on one port (SO_REUSEPORT).

Workers are new interpreters: gRPC's and ZeroMQ's threads do not survive a fork.
"""

import asyncio
import signal
import socket
import sys
import time

import msgspec
import structlog

from headway_gateway.config import GatewayConfig, split_address
from headway_gateway.listening import AddressInUseError
from headway_proto.wording import shown

_RESTART_DELAY_S = 0.5
_QUICK_DEATH_S = 2.0
_MOST_QUICK_DEATHS = 5
_EXTRA_GRACE_S = 5.0

_log = structlog.get_logger("headway.gateway.workers")


class WorkerGroup:
    """``config.workers`` processes that run ``headway_gateway.worker``."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._reservations: list[socket.socket] = []
        self._processes: list[asyncio.subprocess.Process] = []
        self._is_stopping = False

    async def run(self, stop: asyncio.Event, stop_now: asyncio.Event) -> int:
        """Run until ``stop``; return an exit code.

        Raises:
            AddressInUseError: the port is taken.
        """
        config = self._config
        worker_config = msgspec.structs.replace(
            config,
            grpc_address=self._reserve("grpc_address", config.grpc_address),
            http_address=self._reserve("http_address", config.http_address) if config.http_address else "",
            workers=1,
            reuse_port=True,
            exit_with_parent=True,
        )
        _log.info("starting workers", address=worker_config.grpc_address, workers=self._config.workers)
        keepers = [
            asyncio.create_task(self._keep_one(_with_own_metrics(worker_config, number)))
            for number in range(self._config.workers)
        ]
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([stopping, *keepers], return_when=asyncio.FIRST_COMPLETED)
            self._is_stopping = True
            self._signal_all(signal.SIGTERM)
            await self._wait_for_workers(keepers, stop_now)
            codes = [keeper.result() for keeper in keepers]
            return next((code for code in codes if code), 0)
        finally:
            stopping.cancel()
            self._signal_all(signal.SIGKILL)
            for reservation in self._reservations:
                reservation.close()

    def _reserve(self, field: str, wanted: str) -> str:
        """Return HOST:PORT, which other processes cannot take."""
        host, port = split_address(wanted, field)
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # SO_REUSEPORT stays off: another group of workers on this port must not be joined by accident.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
            reservation = socket.socket(family, socket.SOCK_STREAM)
            self._reservations.append(reservation)
            reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reservation.bind(address)
        except OSError as error:
            raise AddressInUseError(
                f"{field}: cannot listen on {shown(wanted)} ({error.strerror}); allowed: a free address"
            ) from error
        port = reservation.getsockname()[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def _keep_one(self, config: GatewayConfig) -> int:
        quick_deaths = 0
        while not self._is_stopping:
            started_at = time.monotonic()
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "headway_gateway.worker", stdin=asyncio.subprocess.PIPE
            )
            self._processes.append(process)
            if self._is_stopping:
                process.terminate()
            try:
                await process.communicate(msgspec.json.encode(config))
            finally:
                self._processes.remove(process)
            code = process.returncode
            assert code is not None
            if self._is_stopping:
                return max(code, 0)
            lived_s = time.monotonic() - started_at
            quick_deaths = quick_deaths + 1 if lived_s < _QUICK_DEATH_S else 0
            _log.error("a worker died", pid=process.pid, exit_code=code, lived_s=round(lived_s, 1))
            if quick_deaths >= _MOST_QUICK_DEATHS:
                return code if code > 0 else 1
            await asyncio.sleep(_RESTART_DELAY_S)
        return 0

    async def _wait_for_workers(self, keepers: list[asyncio.Task[int]], stop_now: asyncio.Event) -> None:
        hurry = asyncio.create_task(_set(stop_now))
        everyone = asyncio.create_task(_all_done(keepers))
        await asyncio.wait(
            (hurry, everyone), timeout=self._config.grace_s + _EXTRA_GRACE_S, return_when=asyncio.FIRST_COMPLETED
        )
        hurry.cancel()
        if not everyone.done():
            self._signal_all(signal.SIGTERM if stop_now.is_set() else signal.SIGKILL)
            await everyone

    def reload_tokens(self) -> None:
        """Have every worker read the tokens again."""
        self._signal_all(signal.SIGHUP)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.send_signal(number)


def _with_own_metrics(config: GatewayConfig, number: int) -> GatewayConfig:
    host, _, port = config.metrics_address.rpartition(":")
    if not host or port == "0":
        return config
    return msgspec.structs.replace(config, metrics_address=f"{host}:{int(port) + number}")


async def _all_done(tasks: list[asyncio.Task[int]]) -> None:
    await asyncio.gather(*tasks)


async def _set(event: asyncio.Event) -> None:
    await event.wait()
