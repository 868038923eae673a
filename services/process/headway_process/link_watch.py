"""The connecting end's view of its link: why it does not come about, and a new try where libzmq makes none.

Owns: the handshakes' results. Must not know: frames, logs.
A peer that is refused, or that alone has keys, is given up by libzmq for ever. But its key may be admitted later, and a
scheduler may come back with its keys.
"""

import contextlib
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

LOOK_INTERVAL_S = 0.25
AGAIN_S = 0.5
PATIENCE_S = 5.0
TELL_INTERVAL_S = 60.0

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_DISCONNECTED
)
_SILENT = "nobody answers there"
_REASONS = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the handshake breaks off; scheduler.key may be another scheduler's",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the scheduler does not admit this key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "one end of the link has keys and the other has none",
}
_GIVEN_UP = frozenset({zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL})
_MOST_EVENTS = 100_000


class LinkWatch:
    """Watches one socket that connects to ``address``; used by the socket's thread alone."""

    def __init__(self, socket: Any, address: str, now: float) -> None:
        """Begin before the socket connects. ``now``: monotonic seconds."""
        self._socket = socket
        self._address = address
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._monitor.setsockopt(zmq.RCVHWM, _MOST_EVENTS)
        self._looks_at = now
        self._down_since: float | None = now
        self._reason = _SILENT
        self._again_at: float | None = None
        self._told: tuple[str, float] | None = None

    def look(self, now: float) -> str | None:
        """Return why there has been no link for a while, if that is to be told now."""
        if now < self._looks_at:
            return None
        self._looks_at = now + LOOK_INTERVAL_S
        self._take_events(now)
        if self._again_at is not None and now >= self._again_at:
            self._again_at = None
            with contextlib.suppress(zmq.ZMQError):  # libzmq may have forgotten the address
                self._socket.disconnect(self._address)
            self._socket.connect(self._address)
        if self._down_since is None or now - self._down_since < PATIENCE_S:
            return None
        if self._told is not None:
            told, told_at = self._told
            if now - told_at < (TELL_INTERVAL_S if told == self._reason else PATIENCE_S):
                return None
        self._told = self._reason, now
        return self._reason

    def close(self) -> None:
        """End before the socket is closed."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    def _take_events(self, now: float) -> None:
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._down_since, self._told, self._reason = None, None, _SILENT
            elif event == zmq.EVENT_DISCONNECTED:
                self._down_since = now if self._down_since is None else self._down_since
            else:
                self._reason = _REASONS[zmq.Event(event)]
                if event in _GIVEN_UP:
                    self._again_at = now + AGAIN_S
