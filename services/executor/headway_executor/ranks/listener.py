"""The socket where rank 0 listens for the other ranks.

Owns: its options, keys and guard. Must not know: what a frame means.

Always TCP, also on one host: a port ends with its process, however it ends, and a file would stay. Ranks that rank 0 has
started get keys made for them alone; others have the executor's own pair, or no keys on loopback.
"""

import contextlib
import os
from typing import Any

import zmq

from headway_executor.backend import BackendConfigError
from headway_executor.block_store.listener import numeric_host
from headway_process.link_guard import HANDSHAKE_INTERVAL_MS, LinkGuard, OneKey
from headway_proto.framing import MAX_FRAME_BYTES
from headway_proto.wording import shown

_LINK = "ranks"
_INSIDE = "inproc://ranks"
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 1000, 5000


class RanksSocket:
    """A bound ROUTER. ``port`` is the one that the system chose, if it was to choose."""

    def __init__(
        self,
        field: str,
        address: str,
        own_keys: tuple[bytes, bytes] | None,
        admitted: bytes = b"",
        *,
        most_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        """Bind ``tcp://HOST:PORT``; ``admitted`` is the public key of the others. Keys are in Z85.

        Who sends a frame of more than ``most_bytes`` is cut off.

        Raises:
            BackendConfigError: the address cannot be bound; one line with ``field``.
        """
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._guard: LinkGuard | None = None
        try:
            self._socket.setsockopt(zmq.MAXMSGSIZE, most_bytes)
            self._configure(address, own_keys, admitted)
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            self._socket.bind(f"tcp://{numeric_host(host)}:{port}")
        except OSError as error:  # zmq.ZMQError is none, but socket.gaierror is
            self.close()
            raise BackendConfigError(f"{field}: {shown(address)} cannot be bound: {error.strerror}") from error
        except zmq.ZMQError as error:
            self.close()
            raise BackendConfigError(
                f"{field}: {shown(address)} cannot be bound: {os.strerror(error.errno or 0)}"
            ) from error
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    @property
    def pollable(self) -> Any:
        """For ``DealerChannel.watch``."""
        return self._socket

    def plug_in(self) -> Any:
        """Return a DEALER of this process, connected without keys. It must be closed first."""
        inside = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
            inside.setsockopt(option, value)
        self._socket.bind(_INSIDE)
        inside.connect(_INSIDE)
        return inside

    def turned_away(self) -> dict[str, int]:
        """Connections since the last call that were not admitted, by reason."""
        rejections = self._guard.take_rejections() if self._guard is not None else []
        return rejections[0].new if rejections else {}

    def wait(self, timeout_s: float) -> None:
        """Return when a frame is there, or after ``timeout_s``."""
        self._socket.poll(round(timeout_s * 1000))

    def receive(self) -> tuple[bytes, bytes] | None:
        """Return the next peer and frame, or None."""
        while True:
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if len(frames) == 1:
                return peer, frames[0]

    def send(self, peer: bytes, frame: bytes) -> None:
        """Send, or drop if the peer is gone: it is missed soon."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart((peer, frame), zmq.NOBLOCK)

    def close(self, *, linger_s: float = 0.0) -> None:
        """Drop what is not sent after ``linger_s``."""
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        self._socket.close(linger=round(linger_s * 1000))
        self._context.term()

    def _configure(self, address: str, own_keys: tuple[bytes, bytes] | None, admitted: bytes) -> None:
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, 0),  # Answers that wait for a slow rank are what keeps more steps from coming.
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_INTERVAL_MS),
            (zmq.IPV6, int("[" in address)),
        ):
            self._socket.setsockopt(option, value)
        admissions = {}
        if own_keys is not None:
            self._socket.curve_publickey, self._socket.curve_secretkey = own_keys
            self._socket.curve_server = True
            self._socket.setsockopt(zmq.ZAP_DOMAIN, _LINK.encode())
            self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            admissions[_LINK] = OneKey(admitted)
        self._guard = LinkGuard(self._context, admissions)
        self._guard.watch(_LINK, self._socket)
        self._guard.start()
