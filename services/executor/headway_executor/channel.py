"""The ZeroMQ socket to the scheduler, and the bell that ends a wait.

Owns: socket options, keys. Must not know: frames' meaning.
"""

import contextlib
import math
import os
import socket
from pathlib import Path

import zmq

from headway_executor.config import EXECUTOR_SECRET_KEY, SCHEDULER_PUBLIC_KEY
from headway_process.addresses import check_ipc_directory
from headway_process.link_keys import load_own_keys, load_public_key
from headway_proto.framing import MAX_FRAME_BYTES

_HIGH_WATER_MARK = 1024
# As in headway_scheduler.transport: a broken network is noticed within a second.
_HEARTBEATS_MS = {"tcp": (200, 600), "ipc": (1000, 5000)}
_CONNECT_TIMEOUT_MS = 1000
_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 500
_KEEPALIVE_IDLE_SECONDS = 10


class SchedulerChannel:
    """A DEALER connected to the scheduler's ROUTER; it reconnects, and drops sends without a peer.

    It sets no ``zmq.IDENTITY``: a ROUTER ignores a new connection under a name whose old connection still seems open.
    """

    def __init__(self, address: str, curve_keys: str = "") -> None:
        """Open the socket; without ``curve_keys``, a directory, the link is plain.

        Raises:
            ValueError: the key files cannot be used, or others can enter the directory of a Unix socket.
            zmq.ZMQError: the address cannot be connected to.
        """
        self._bell, self._bell_rope = socket.socketpair()
        self._bell.setblocking(False)
        self._bell_rope.setblocking(False)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        try:
            check_ipc_directory("step_address", address)
            self._configure(address, curve_keys)
            self._socket.connect(address)
        except BaseException:
            self.close()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._bell, zmq.POLLIN)

    def wake(self) -> None:
        """End the ``wait``, from any thread or signal handler."""
        with contextlib.suppress(BlockingIOError, OSError):  # full: it rings already; closed: no poll runs
            self._bell_rope.send(b"\0")

    def wait(self, timeout: float) -> None:
        """See ``loop.Channel``."""
        for ready, _ in self._poller.poll(math.ceil(timeout * 1000)):
            if ready == self._bell.fileno():
                with contextlib.suppress(BlockingIOError):
                    os.read(self._bell.fileno(), 4096)

    def receive(self) -> bytes | None:
        """See ``loop.Channel``."""
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def send(self, frame: bytes) -> None:
        """See ``loop.Channel``."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(frame, zmq.NOBLOCK)

    def close(self, *, linger_s: float = 0.0) -> None:
        """Drop what is not sent after ``linger_s``."""
        self._socket.close(linger=round(linger_s * 1000))
        self._context.term()
        self._bell.close()
        self._bell_rope.close()

    def _configure(self, address: str, curve_keys: str) -> None:
        heartbeat_ms, heartbeat_timeout_ms = _HEARTBEATS_MS["ipc" if address.startswith("ipc:") else "tcp"]
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IMMEDIATE, 1),
            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
            (zmq.SNDHWM, _HIGH_WATER_MARK),
            (zmq.RCVHWM, _HIGH_WATER_MARK),
            (zmq.HEARTBEAT_IVL, heartbeat_ms),
            (zmq.HEARTBEAT_TIMEOUT, heartbeat_timeout_ms),
            (zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS),
            (zmq.IPV6, int("[" in address)),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_IDLE_SECONDS),
        ):
            self._socket.setsockopt(option, value)
        if curve_keys:
            self._socket.curve_serverkey = load_public_key(Path(curve_keys), SCHEDULER_PUBLIC_KEY)
            public, secret = load_own_keys(Path(curve_keys), EXECUTOR_SECRET_KEY)
            self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
