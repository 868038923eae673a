"""The ZeroMQ sockets that an executor's process connects, and the bell that ends a wait.

Owns: socket options, keys. Must not know: frames' meaning.
"""

import contextlib
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

import zmq

from headway_executor.config import EXECUTOR_SECRET_KEY, SCHEDULER_PUBLIC_KEY
from headway_executor.link_keys import LinkKeys
from headway_process.addresses import check_ipc_directory
from headway_process.link_keys import load_own_keys, load_public_key
from headway_process.link_watch import LinkWatch
from headway_proto.framing import MAX_FRAME_BYTES

_HIGH_WATER_MARK = 1024
_PATIENT_MS = (1000, 5000)
# As in headway_scheduler.links.transport: a broken network is noticed within a second.
_HEARTBEATS_MS = {"tcp": (200, 600), "ipc": _PATIENT_MS}
_CONNECT_TIMEOUT_MS = 1000
_FIRST_PEER_MS = 20
_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 500
_KEEPALIVE_IDLE_SECONDS = 10


def configure_dealer(
    dealer: Any, address: str, keys: LinkKeys | None, heartbeats_ms: tuple[int, int] = _PATIENT_MS
) -> None:
    """Set up a DEALER that is to connect to ``address``. ``heartbeats_ms``: interval and time-out."""
    heartbeat_ms, heartbeat_timeout_ms = heartbeats_ms
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
        dealer.setsockopt(option, value)
    if keys is not None:
        dealer.curve_serverkey = keys.peer
        dealer.curve_publickey, dealer.curve_secretkey = keys.public, keys.secret


class DealerChannel:
    """A DEALER connected to a ROUTER; it reconnects, and drops sends without a peer.

    It sets no ``zmq.IDENTITY``: a ROUTER ignores a new connection under a name whose old connection still seems open.
    """

    def __init__(self, address: str, keys: LinkKeys | None, heartbeats_ms: tuple[int, int] = _PATIENT_MS) -> None:
        """Open the socket; without ``keys``, the link is plain. ``heartbeats_ms``: interval and time-out.

        Raises:
            zmq.ZMQError: the address cannot be connected to.
        """
        self._bell, self._bell_rope = socket.socketpair()
        self._bell.setblocking(False)
        self._bell_rope.setblocking(False)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        try:
            configure_dealer(self._socket, address, keys, heartbeats_ms)
            self._connect(address)
        except BaseException:
            self.close()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._bell, zmq.POLLIN)

    def _connect(self, address: str) -> None:
        self._socket.connect(address)

    def problem(self) -> str | None:
        """Return why there is no link, if that is to be told now; a rank without its first one ends anyway."""
        return None

    def watch(self, other: Any) -> None:
        """Let another socket end the ``wait``, too."""
        self._poller.register(other, zmq.POLLIN)

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


class SchedulerChannel(DealerChannel):
    """The connection to the scheduler."""

    def __init__(self, address: str, curve_keys: str = "") -> None:
        """Open the socket; without ``curve_keys``, a directory, the link is plain.

        Raises:
            ValueError: the key files cannot be used, or others can enter the directory of a Unix socket.
            zmq.ZMQError: the address cannot be connected to.
        """
        check_ipc_directory("step_address", address)
        keys = None
        if curve_keys:
            scheduler_key = load_public_key(Path(curve_keys), SCHEDULER_PUBLIC_KEY)
            keys = LinkKeys(scheduler_key, *load_own_keys(Path(curve_keys), EXECUTOR_SECRET_KEY))
        self._watch: LinkWatch | None = None
        super().__init__(address, keys, _HEARTBEATS_MS["ipc" if address.startswith("ipc:") else "tcp"])
        # Without a peer, sends are dropped: the first hello, too, and the next one comes much later.
        self._socket.poll(_FIRST_PEER_MS, zmq.POLLOUT)

    def _connect(self, address: str) -> None:
        self._watch = LinkWatch(self._socket, address, time.monotonic())
        super()._connect(address)

    def problem(self) -> str | None:
        """See ``LinkWatch.look``."""
        return self._watch.look(time.monotonic()) if self._watch is not None else None

    def close(self, *, linger_s: float = 0.0) -> None:
        """See ``DealerChannel``."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        super().close(linger_s=linger_s)
