"""The scheduler's two ZeroMQ sockets.

Owns: binding, limits, authentication, non-blocking sends and receives.
Must not know: what a frame means.

Both are ROUTERs with ``ROUTER_MANDATORY``: a frame that cannot be delivered is reported instead of being dropped.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from headway_proto.framing import MAX_FRAME_BYTES

HIGH_WATER_MARK = 100_000
MAX_FRAMES_PER_BEAT = 256
_IPC = "ipc://"
_HEARTBEAT_MS = 500
_HEARTBEAT_TIMEOUT_MS = 5000


class Transport:
    """Bound sockets for executor and gateways."""

    def __init__(self, step_address: str, ingress_address: str, curve_keys: str = "") -> None:
        """Bind both sockets.

        Raises:
            ValueError: an address cannot be bound, or the key files cannot be used.
            OSError: the key files cannot be read.
        """
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._sockets: list[zmq.Socket[bytes]] = []
        self._socket_files: list[tuple[str, int]] = []
        try:
            if curve_keys:
                self._start_authenticator(curve_keys)
            self.executor = self._bind("step_address", step_address, curve_keys)
            self.gateways = self._bind("ingress_address", ingress_address, curve_keys)
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
        """The (peer, frame) pairs that have arrived, a bounded number of them."""
        for _ in range(MAX_FRAMES_PER_BEAT):
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(parts) == 2:
                yield parts[0], parts[1]

    @staticmethod
    def send(socket: "zmq.Socket[bytes]", outgoing: list[tuple[bytes, bytes]]) -> list[bytes]:
        """Send and clear ``outgoing``; answers with the peers that could not be reached."""
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

    def close(self) -> None:
        """Close everything without waiting for peers."""
        for socket in self._sockets:
            socket.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        for path, inode in self._socket_files:
            _remove(path, inode)
        self._socket_files.clear()

    def _bind(self, field: str, address: str, curve_keys: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.ROUTER)
        self._sockets.append(socket)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        if curve_keys:
            public, secret = zmq.auth.load_certificate(Path(curve_keys) / "scheduler.key_secret")
            if secret is None:
                raise ValueError(f"curve_keys: no secret key in {curve_keys!r:.64}/scheduler.key_secret")
            socket.curve_publickey, socket.curve_secretkey, socket.curve_server = public, secret, True
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ValueError(f"{field}: {address!r:.64} cannot be bound: {os.strerror(error.errno or 0)}") from error
        if address.startswith(_IPC):
            path = address.removeprefix(_IPC)
            self._socket_files.append((path, Path(path).stat().st_ino))
        return socket

    def _start_authenticator(self, curve_keys: str) -> None:
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve(domain="*", location=str(Path(curve_keys) / "clients"))


def _remove(path: str, inode: int) -> None:
    """Remove a socket file that libzmq leaves behind, unless another scheduler has put its own in this place."""
    with contextlib.suppress(OSError):
        if Path(path).stat().st_ino == inode:
            Path(path).unlink()
