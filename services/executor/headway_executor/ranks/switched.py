"""Ranks of any hosts that meet at rank 0's switch, and send each other messages through it.

Owns: a rank's connection to the switch, joining, pieces and their order. Must not know: models, steps.

A connection that breaks is not made again: a rank that notices this raises ``RankLostError``. Of one that is lost
altogether, the link that relays steps tells.
"""

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import zmq
from numpy.typing import NDArray
from torch import Tensor
from zmq.utils.monitor import parse_monitor_message

from headway_executor.backend import BackendConfigError, RankLostError
from headway_executor.link_keys import LinkKeys
from headway_executor.links.channel import configure_dealer
from headway_executor.rank_place import RankPlace
from headway_executor.ranks.switch import (
    BEGIN,
    HEAD_BYTES,
    HERE,
    LAST_FRAMES_S,
    MOST_BYTES,
    PIECE_BYTES,
    SWITCH,
    Head,
    Switch,
    head_of,
)
from headway_process.addresses import check_link_address, is_loopback
from headway_proto.wording import shown

_TOGETHER_TAG = 0
"""Of what all do together; the tags of ``send`` follow."""

_HERE_INTERVAL_S = 0.1
_EVENTS: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not admit this rank's key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it has another key",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it has another key",
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "others did not come",
    zmq.EVENT_DISCONNECTED: "",
}
"""What to watch, and what it says while ranks join."""


class Line:
    """One rank's end of the switch. ``connection``: a DEALER; ``monitor``: of its connection, for ``_EVENTS``, if any."""

    def __init__(self, rank: int, connection: Any, monitor: Any = None) -> None:
        self._rank = rank
        self._connection = connection
        self._monitor = monitor
        self._poller = zmq.Poller()
        for one in (connection, monitor):
            if one is not None:
                self._poller.register(one, zmq.POLLIN)
        self._sent: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._received: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._unread: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self._has_joined = False
        self._is_broken = False
        self._why_not = "nobody answers there"

    def join(self, size: int, seconds: float) -> str:
        """Meet the others at the switch; return why that did not happen in time, or ""."""
        deadline, next_here = time.monotonic() + seconds, 0.0
        here = Head(SWITCH, self._rank, HERE, size).packed
        while (now := time.monotonic()) < deadline:
            if now >= next_here:
                next_here = now + _HERE_INTERVAL_S
                with contextlib.suppress(zmq.Again):
                    self._connection.send(here, zmq.NOBLOCK)
            self._poller.poll(round(1000 * min(_HERE_INTERVAL_S, deadline - now)))
            self._hear_of_connection()
            with contextlib.suppress(zmq.Again):
                if head_of(self._connection.recv(zmq.NOBLOCK)) == Head(self._rank, SWITCH, BEGIN, size):
                    self._hear_of_connection()  # of earlier attempts
                    self._has_joined = True
                    return ""
        return self._why_not

    def send(self, message: Tensor, other: int, tag: int) -> None:
        """Send a copy. Raises ``RankLostError``: the connection is broken."""
        self._hear_of_connection()
        if self._is_broken:
            raise _broken()
        contents, key = _bytes_of(message.contiguous()), (other, tag)
        for start in range(0, len(contents), PIECE_BYTES):
            head = Head(other, self._rank, tag, self._sent[key] % (1 << 32))
            self._sent[key] += 1
            try:
                piece = contents[start : start + PIECE_BYTES]
                self._connection.send(b"".join((head.packed, piece.data)), zmq.NOBLOCK)
            except zmq.Again:
                raise _broken() from None

    def receive(self, message: Tensor, other: int, tag: int) -> None:
        """Wait for a message, and fill a contiguous tensor with it.

        Raises:
            RankLostError: the connection is broken, or the other rank is at another step.
        """
        contents, key = _bytes_of(message), (other, tag)
        for start in range(0, len(contents), PIECE_BYTES):
            place = contents[start : start + PIECE_BYTES]
            frame = self._next(key)
            head = head_of(frame)
            if head is None or head.sequence != self._received[key] % (1 << 32):
                raise RankLostError(f"rank {other} sent a frame where {self._received[key]} was expected")
            self._received[key] += 1
            piece = np.frombuffer(frame, np.uint8, offset=HEAD_BYTES)
            if len(piece) != len(place):
                raise RankLostError(f"rank {other} sent {len(piece)} bytes where {len(place)} were expected")
            place[:] = piece

    def close(self) -> None:
        """Part; the last frames still go. May be called twice."""
        if self._monitor is not None:
            self._connection.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None
        self._connection.close(linger=round(1000 * LAST_FRAMES_S))

    def _next(self, key: tuple[int, int]) -> bytes:
        while not self._unread[key]:
            try:
                frame = self._connection.recv(zmq.NOBLOCK)
            except zmq.Again:
                if self._is_broken:
                    raise _broken() from None
                self._hear_of_connection()
                if not self._is_broken:  # else the last frames may be there
                    self._poller.poll()
                continue
            head = head_of(frame)
            if head is not None:
                self._unread[head.of, head.tag].append(frame)
        return self._unread[key].popleft()

    def _hear_of_connection(self) -> None:
        while self._monitor is not None:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            self._is_broken = self._is_broken or (self._has_joined and event == zmq.EVENT_DISCONNECTED)
            self._why_not = _EVENTS.get(event) or self._why_not


class Sent:
    """See ``Sending``: a copy is on its way."""

    def is_completed(self) -> bool:
        """See ``Sending``."""
        return True

    def wait(self) -> None:
        """See ``Sending``."""


class SwitchedExchange:
    """See ``Exchange``. ``ranks`` of the executor, of which this one is number ``own``."""

    def __init__(self, line: Line, ranks: Sequence[int], own: int) -> None:
        self._line = line
        self._ranks = ranks
        self._own = own

    def gather(self, own: Tensor) -> list[Tensor]:
        """See ``Exchange.gather``."""
        others = [rank for number, rank in enumerate(self._ranks) if number != self._own]
        for rank in others:
            self._line.send(own, rank, _TOGETHER_TAG)
        parts = [own if number == self._own else torch.empty_like(own) for number in range(len(self._ranks))]
        for rank, part in zip(self._ranks, parts, strict=True):
            if part is not own:
                self._line.receive(part, rank, _TOGETHER_TAG)
        return parts

    def add_up(self, own: Tensor) -> Tensor:
        """See ``Exchange.add_up``: in the order of the ranks, so that all have the same bits."""
        return torch.stack(self.gather(own)).sum(0)

    def most(self, own: Tensor) -> Tensor:
        """See ``Exchange.most``."""
        return torch.stack(self.gather(own)).amax(0)

    def send(self, message: Tensor, other: int, tag: int) -> Sent:
        """See ``Exchange.send``."""
        self._line.send(message, self._ranks[other], 1 + tag)
        return Sent()

    def receive(self, message: Tensor, other: int, tag: int) -> None:
        """See ``Exchange.receive``."""
        self._line.receive(message, self._ranks[other], 1 + tag)


class SwitchedMeeting:
    """See ``Meeting``. ``keys``: those of the link between ranks; without them, ranks meet on loopback only.

    Raises:
        BackendConfigError: the rendezvous cannot be used, or the others did not come.
    """

    def __init__(self, place: RankPlace, keys: LinkKeys | None, join_seconds: float) -> None:
        _check(place.rendezvous, has_keys=keys is not None)
        self._place = place
        self._switch: Switch | None = None
        self._context: zmq.Context[Any] | None = None
        self._line = self._connect(keys)
        why_not = self._line.join(place.size, join_seconds)
        if why_not:
            reason = why_not if self._switch is None else self._switch.why_not_all
            self.close()
            raise BackendConfigError(
                f"rendezvous {shown(place.rendezvous)}: rank {place.rank} did not meet the other {place.size - 1} within "
                f"{join_seconds:g} s ({reason}); allowed: an address of rank 0 that all ranks reach, and the same keys"
            )

    def all_ranks(self) -> SwitchedExchange:
        """See ``Meeting.all_ranks``."""
        return SwitchedExchange(self._line, range(self._place.size), self._place.rank)

    def stage(self) -> SwitchedExchange:
        """See ``Meeting.stage``."""
        place = self._place
        ranks = [place.rank_of(place.stage, number) for number in range(place.tensor_parallel)]
        return SwitchedExchange(self._line, ranks, place.tensor_rank)

    def close(self) -> None:
        """See ``Meeting.close``."""
        self._line.close()
        if self._switch is not None:
            self._switch.close()
            self._switch = None
        if self._context is not None:
            self._context.term()
            self._context = None

    def _connect(self, keys: LinkKeys | None) -> Line:
        if self._place.rank == 0:
            self._switch = Switch(self._place.rendezvous, keys, self._place.size)
            return Line(0, self._switch.plug_in())
        address = f"tcp://{self._place.rendezvous}"
        self._context = zmq.Context()
        dealer = self._context.socket(zmq.DEALER)
        configure_dealer(dealer, address, keys)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.MAXMSGSIZE, MOST_BYTES)):
            dealer.setsockopt(option, value)
        monitor = dealer.get_monitor_socket(sum(_EVENTS))
        monitor.setsockopt(zmq.LINGER, 0)
        dealer.connect(address)
        return Line(self._place.rank, dealer, monitor)


def _check(rendezvous: str, *, has_keys: bool) -> None:
    """The port must be one; beyond loopback, only with keys."""
    host = rendezvous.rpartition(":")[0]
    try:
        check_link_address("rendezvous", f"tcp://{rendezvous}", has_keys=True)
    except ValueError:
        host = ""
    if not host or not (has_keys or is_loopback(host)):
        raise BackendConfigError(
            f"rendezvous {shown(rendezvous)} is not allowed; without curve_keys, ranks ask each other for no key, so "
            "allowed: 127.0.0.1:PORT, or any HOST:PORT together with curve_keys"
        )


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    contents: NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return contents


def _broken() -> RankLostError:
    return RankLostError("the connection to rank 0's switch is broken")
