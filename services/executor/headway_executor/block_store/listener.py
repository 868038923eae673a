"""A port where other executors ask for blocks.

Owns: its socket, keys and thread. Must not know: what is asked.

Peers share one pair of keys, so only the owner of this process's own key may connect. The thread copies and sends beside
the steps; a peer that reads slowly loses answers, and delays nobody.
"""

import contextlib
import ipaddress
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import zmq

from headway_executor.backend import BackendConfigError
from headway_executor.block_store.questions import MAX_QUESTION_BYTES, PARTS_UNDER_WAY
from headway_executor.block_store.transport import Bytes
from headway_executor.config import EXECUTOR_SECRET_KEY
from headway_process.addresses import check_offered_address
from headway_process.link_guard import HANDSHAKE_INTERVAL_MS, LinkGuard, OneKey
from headway_process.link_keys import load_own_keys
from headway_proto.framing import FramingError
from headway_proto.wording import shown

FIELD = "block_address"

_LINK = "blocks"
_MAX_WAITING_ANSWERS = 4 * PARTS_UNDER_WAY
"""Of one peer; more are dropped. Libzmq learns of answers that have left in batches of half of this."""

_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 1000, 5000
_BELL = "inproc://bell"


class Listener:
    """Answers from its own thread. ``address`` is HOST:PORT, the port as it was chosen."""

    def __init__(self, address: str, curve_keys: str, answer: Callable[[bytes], Bytes]) -> None:
        """Bind ``tcp://HOST:PORT``. ``answer`` raises ``FramingError`` for what is no question.

        Raises:
            BackendConfigError: the address or the keys cannot be used; one line.
        """
        self.num_malformed = 0
        self._answer = answer
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._ring, self._bell = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._guard: LinkGuard | None = None
        self._thread = threading.Thread(target=self._run, name="block-listener", daemon=True)
        try:
            check_offered_address(FIELD, address, has_keys=bool(curve_keys))
            self.address = self._bind(address, curve_keys)
        except ValueError as error:
            self.close()
            raise BackendConfigError(str(error)) from None
        except BaseException:
            self.close()
            raise
        self._thread.start()

    def close(self) -> None:
        """Stop listening. May be called twice."""
        if self._thread.is_alive():
            self._ring.send(b"")
            self._thread.join()
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        for one in (self._socket, self._ring, self._bell):
            one.close(linger=0)
        self._context.term()

    def _bind(self, address: str, curve_keys: str) -> str:
        self._bell.bind(_BELL)
        self._ring.connect(_BELL)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAX_QUESTION_BYTES),
            (zmq.SNDHWM, _MAX_WAITING_ANSWERS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_INTERVAL_MS),
            (zmq.IPV6, int("[" in address)),
        ):
            self._socket.setsockopt(option, value)
        admitted = {}
        if curve_keys:
            public, secret = load_own_keys(Path(curve_keys), EXECUTOR_SECRET_KEY)
            self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
            self._socket.curve_server = True
            self._socket.setsockopt(zmq.ZAP_DOMAIN, _LINK.encode())
            self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            admitted[_LINK] = OneKey(public)
        self._guard = LinkGuard(self._context, admitted)
        self._guard.watch(_LINK, self._socket)
        self._guard.start()
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        try:
            self._socket.bind(f"tcp://{numeric_host(host)}:{port}")
        except OSError as error:  # zmq.ZMQError is none, but socket.gaierror is
            raise BackendConfigError(f"{FIELD}: {shown(address)} cannot be bound: {error.strerror}") from error
        except zmq.ZMQError as error:
            raise BackendConfigError(
                f"{FIELD}: {shown(address)} cannot be bound: {os.strerror(error.errno or 0)}"
            ) from error
        return f"{host}:{self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(':')[2]}"

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        while not self._bell.poll(0):
            for ready, _ in poller.poll():
                if ready is self._socket:
                    self._serve()

    def _serve(self) -> None:
        peer, *frames = self._socket.recv_multipart()
        try:
            if len(frames) != 1:
                raise FramingError(f"question of {len(frames)} parts; allowed: 1")
            message = self._answer(frames[0])
        except FramingError:
            self.num_malformed += 1
            return
        with contextlib.suppress(zmq.ZMQError):  # the peer is gone
            self._socket.send_multipart((peer, message.data), zmq.NOBLOCK, copy=False)


def numeric_host(host: str) -> str:
    """A name as an address, since libzmq binds no names."""
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return socket.gethostbyname(host)
    return host
