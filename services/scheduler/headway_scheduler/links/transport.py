"""The scheduler's two ZeroMQ sockets.

Owns: binding, limits, keys, non-blocking sends and receives. Must not know: what a frame means.
``ROUTER_MANDATORY`` reports undeliverable frames.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import zmq

from headway_process.addresses import check_ipc_directory
from headway_process.link_guard import HANDSHAKE_INTERVAL_MS, AllowList, LinkGuard, Rejections
from headway_process.link_keys import load_own_keys
from headway_proto.framing import MAX_BYTES_TO_SCHEDULER
from headway_proto.wording import shown

HIGH_WATER_MARK = 100_000
MAX_FRAMES_PER_BEAT = 256
_IPC = "ipc://"
STEP, INGRESS = "step", "ingress"
ALLOW_LISTS = {STEP: "executors", INGRESS: "gateways"}
"""By link: the subdirectory with the public keys that may connect."""
SECRET_KEY = "scheduler.key_secret"  # noqa: S105  (a file's name)

_BACKLOG = 64
# A network may fail silently, so over TCP a loss is detected within a second. On one machine, silence means a process
# that was stopped and may continue.
_HEARTBEATS_MS = {"tcp": (200, 600), "ipc": (500, 5000)}


class Transport:
    """Bound sockets for executor and gateways."""

    def __init__(self, step_address: str, ingress_address: str, curve_keys: str = "") -> None:
        """Bind both sockets.

        Raises:
            ValueError: an unusable address or key file.
            OSError: key files cannot be read.
        """
        self._context = zmq.Context()
        self._guard: LinkGuard | None = None
        self._sockets: list[zmq.Socket[bytes]] = []
        self._socket_files: list[tuple[str, int]] = []
        addresses = {STEP: step_address, INGRESS: ingress_address}
        try:
            self.executor, self.gateways = (self._socket(address) for address in addresses.values())
            if curve_keys:
                self._use_keys(Path(curve_keys))
            self._start_guard(addresses, Path(curve_keys) if curve_keys else None)
            for link, bound in ((STEP, self.executor), (INGRESS, self.gateways)):
                _bind(bound, f"{link}_address", addresses[link])
                if addresses[link].startswith(_IPC):
                    path = addresses[link].removeprefix(_IPC)
                    self._socket_files.append((path, Path(path).stat().st_ino))
        except BaseException:
            self.close()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self.executor, zmq.POLLIN)
        self._poller.register(self.gateways, zmq.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Sleep until a frame arrives, at most ``timeout_s``."""
        self._poller.poll(max(0, int(timeout_s * 1000) + 1))

    @staticmethod
    def receive(socket: "zmq.Socket[bytes]") -> Iterator[tuple[bytes, bytes]]:
        """Yield (peer, frame), at most ``MAX_FRAMES_PER_BEAT``."""
        for _ in range(MAX_FRAMES_PER_BEAT):
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(parts) == 2:
                yield parts[0], parts[1]

    @staticmethod
    def send(socket: "zmq.Socket[bytes]", outgoing: list[tuple[bytes, bytes]]) -> list[bytes]:
        """Send and clear ``outgoing``; return unreachable peers."""
        unreachable: list[bytes] = []
        for peer, frame in outgoing:
            if peer in unreachable:
                continue
            try:
                socket.send_multipart((peer, frame), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno not in {zmq.EAGAIN, zmq.EHOSTUNREACH}:
                    raise
                unreachable.append(peer)
        outgoing.clear()
        return unreachable

    def take_rejections(self) -> list[Rejections]:
        """See ``LinkGuard``."""
        return [] if self._guard is None else self._guard.take_rejections()

    def take_key_problems(self) -> list[str]:
        """See ``LinkGuard``."""
        return [] if self._guard is None else self._guard.take_key_problems()

    def close(self) -> None:
        """Close without waiting for peers."""
        if self._guard is not None:
            self._guard.close()
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()
        for path, inode in self._socket_files:
            _remove(path, inode)
        self._socket_files.clear()

    def _socket(self, address: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.ROUTER)
        self._sockets.append(socket)
        heartbeat_ms, heartbeat_timeout_ms = _HEARTBEATS_MS["ipc" if address.startswith("ipc:") else "tcp"]
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.MAXMSGSIZE, MAX_BYTES_TO_SCHEDULER),
            (zmq.SNDHWM, HIGH_WATER_MARK),
            (zmq.RCVHWM, HIGH_WATER_MARK),
            (zmq.HEARTBEAT_IVL, heartbeat_ms),
            (zmq.HEARTBEAT_TIMEOUT, heartbeat_timeout_ms),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_INTERVAL_MS),
            (zmq.BACKLOG, _BACKLOG),
            (zmq.IPV6, int("[" in address)),
        ):
            socket.setsockopt(option, value)
        return socket

    def _use_keys(self, directory: Path) -> None:
        public, secret = load_own_keys(directory, SECRET_KEY)
        for link, socket in ((STEP, self.executor), (INGRESS, self.gateways)):
            socket.curve_publickey, socket.curve_secretkey, socket.curve_server = public, secret, True
            socket.setsockopt(zmq.ZAP_DOMAIN, link.encode())
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def _start_guard(self, addresses: dict[str, str], curve_keys: Path | None) -> None:
        if curve_keys is None and all(address.startswith("ipc:") for address in addresses.values()):
            return
        allow_lists = {}
        for link, name in ALLOW_LISTS.items() if curve_keys is not None else ():
            assert curve_keys is not None
            try:
                allow_lists[link] = AllowList(curve_keys / name)
            except OSError:
                raise ValueError(
                    f"curve_keys: {shown(curve_keys)} is not allowed; allowed: a directory with {SECRET_KEY} and, in "
                    f"{' and '.join(f'{one}/' for one in ALLOW_LISTS.values())}, the public keys of those who may connect"
                ) from None
        self._guard = LinkGuard(self._context, allow_lists)
        for link, socket in ((STEP, self.executor), (INGRESS, self.gateways)):
            if addresses[link].startswith("tcp:"):
                self._guard.watch(link, socket)
        self._guard.start()


def _bind(socket: "zmq.Socket[bytes]", field: str, address: str) -> None:
    check_ipc_directory(field, address)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ValueError(f"{field}: {shown(address)} cannot be bound: {os.strerror(error.errno or 0)}") from error


def _remove(path: str, inode: int) -> None:
    """Remove libzmq's socket file, unless another scheduler replaced it."""
    with contextlib.suppress(OSError):
        if Path(path).stat().st_ino == inode:
            Path(path).unlink()
