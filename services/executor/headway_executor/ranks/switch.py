"""The switch in rank 0, through which ranks of several hosts send each other messages.

Owns: the form of a frame, who is which rank, passing on. Must not know: what a message means.

One port, guarded as the link that relays steps: who has not the executors' key gets nowhere. A frame names its sender, and
the switch passes on only what comes over that rank's own connection. Anything else is dropped.
"""

import struct
import threading
from typing import Any, NamedTuple

from headway_executor.link_keys import LinkKeys
from headway_executor.ranks.listener import RanksSocket

PIECE_BYTES = 1 << 20
"""Of one frame at most, behind its head; a longer message goes in several."""

LAST_FRAMES_S = 0.3
"""For frames on their way when a rank closes: the others may need them for the step that it has ended."""

HERE, BEGIN = 0, 1
"""Tags between a rank and the switch: the rank is there; all are. Their ``sequence`` is the number of ranks."""

SWITCH = (1 << 16) - 1
"""In place of a rank."""

_HEAD = struct.Struct("<HHHxxI")
HEAD_BYTES = _HEAD.size
MOST_BYTES = HEAD_BYTES + PIECE_BYTES + 64
"""Of a frame on its way: CURVE adds some to each."""

_TURN_S = 0.2
_MOST_AT_ONCE = 1024


class Head(NamedTuple):
    """The first bytes of a frame. ``sequence`` counts the frames of these two ranks with this tag, from 0."""

    to: int
    of: int
    tag: int
    sequence: int

    @property
    def packed(self) -> bytes:
        """As bytes."""
        return _HEAD.pack(*self)


def head_of(frame: bytes) -> Head | None:
    """The head of a frame, or None: it has none."""
    return Head(*_HEAD.unpack_from(frame)) if len(frame) >= HEAD_BYTES else None


class Switch:
    """Serves ``size`` ranks from a thread of its own until ``close``."""

    def __init__(self, rendezvous: str, keys: LinkKeys | None, size: int) -> None:
        """Listen at HOST:PORT.

        Raises:
            BackendConfigError: the address cannot be bound.
        """
        own = None if keys is None else (keys.public, keys.secret)
        admitted = b"" if keys is None else keys.peer
        self._socket = RanksSocket("rendezvous", f"tcp://{rendezvous}", own, admitted, most_bytes=MOST_BYTES)
        self._size = size
        self._peers: dict[int, bytes] = {}
        self._ranks: dict[bytes, int] = {}
        self._has_begun = False
        self._must_end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-switch", daemon=True)

    def plug_in(self) -> Any:
        """Return a DEALER for rank 0, which needs no key, and begin to serve."""
        inside = self._socket.plug_in()
        self._thread.start()
        return inside

    @property
    def why_not_all(self) -> str:
        """Who has not come."""
        missing = ", ".join(str(rank) for rank in range(self._size) if rank not in self._peers)
        turned_away = ", ".join(f"{count} ({reason})" for reason, count in self._socket.turned_away().items())
        return f"not here: {missing}" + (f"; turned away: {turned_away}" if turned_away else "")

    def close(self) -> None:
        """Stop, when all that rank 0 has sent is passed on. What ``plug_in`` returned must be closed before."""
        self._must_end.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._socket.close(linger_s=LAST_FRAMES_S)

    def _run(self) -> None:
        while not self._must_end.is_set():
            self._socket.wait(_TURN_S)
            self._pass_on()
        self._pass_on()

    def _pass_on(self) -> None:
        """What is there, within bounds."""
        for _ in range(_MOST_AT_ONCE):
            received = self._socket.receive()
            if received is None:
                return
            self._take(*received)

    def _take(self, peer: bytes, frame: bytes) -> None:
        head = head_of(frame)
        if head is None:
            return
        if head.to == SWITCH:
            self._greet(peer, head)
        elif self._has_begun and self._ranks.get(peer) == head.of and head.to in self._peers:
            self._socket.send(self._peers[head.to], frame)

    def _greet(self, peer: bytes, head: Head) -> None:
        """The last one that comes as a rank is the rank, until all are there: it may have begun again."""
        if self._has_begun or head.tag != HERE or head.sequence != self._size or head.of >= self._size:
            return
        self._ranks.pop(self._peers.get(head.of, b""), None)
        self._peers.pop(self._ranks.get(peer, SWITCH), None)
        self._peers[head.of], self._ranks[peer] = peer, head.of
        if len(self._peers) == self._size:
            self._has_begun = True
            for rank, there in self._peers.items():
                self._socket.send(there, Head(rank, SWITCH, BEGIN, self._size).packed)
