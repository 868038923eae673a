"""Stands between the two ends of a ZeroMQ link and harms single frames.

Owns: passing frames both ways between DEALERs (executors, gateways) and the scheduler's ROUTER, and harming some of them:
drop, duplicate, swap with the next one, hold back, change a byte. What it does follows from its seed and is counted.
Must not know: what is in a frame.

Each peer that connects gets a DEALER of its own towards the scheduler, so that the scheduler sees as many peers as there
are. Chance is drawn from one generator per direction: the same frames in the same order meet the same fate.
"""

import contextlib
import heapq
import itertools
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import zmq

FAULTS = ("drop", "duplicate", "swap", "delay", "corrupt")
_HOLD_S = (0.005, 0.05)
_LONGEST_SWAP_S = 0.1
_POLL_MS = 5


@dataclass
class _Direction:
    """One way through the proxy."""

    name: str
    chance: random.Random


class FrameProxy:
    """Listens on ``front`` for peers and connects each to ``back``; ``share`` of the frames meets each fault.

    For ``with``. ``counts[direction, fault]`` is what was done, ``counts[direction, "frames"]`` what came; the
    directions are "up", to the scheduler, and "down".
    """

    def __init__(self, front: str, back: str, *, seed: int, share: float = 0.01) -> None:
        self._front_address, self._back_address = front, back
        self.share = share
        self.counts: Counter[tuple[str, str]] = Counter()
        self._directions = {name: _Direction(name, random.Random(f"{seed} {front} {name}")) for name in ("up", "down")}
        self._context = zmq.Context()
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._held: list[tuple[float, int, str, bytes, bytes]] = []
        self._swapped: dict[tuple[str, bytes], bytes] = {}
        self._order = itertools.count()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._front = self._socket(zmq.ROUTER)
        self._front.bind(self._front_address)
        self._poller = zmq.Poller()
        self._poller.register(self._front, zmq.POLLIN)
        self._thread.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._stop.set()
        self._thread.join(10)
        for socket in (self._front, *self._backs.values()):
            socket.close(linger=0)
        self._context.term()
        Path(self._front_address.removeprefix("ipc://")).unlink(missing_ok=True)

    def total(self, fault: str) -> int:
        """How often, both ways together."""
        return self.counts["up", fault] + self.counts["down", fault]

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        return socket

    def _run(self) -> None:
        while not self._stop.is_set():
            for socket, _ in self._poller.poll(_POLL_MS):
                self._receive(socket)
            self._release()

    def _receive(self, socket) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(256):
                if socket is self._front:
                    peer, frame = socket.recv_multipart(zmq.NOBLOCK)
                    self._harm(self._directions["up"], peer, frame)
                else:
                    frame = socket.recv(zmq.NOBLOCK)
                    peer = next(peer for peer, back in self._backs.items() if back is socket)
                    self._harm(self._directions["down"], peer, frame)

    def _harm(self, direction: _Direction, peer: bytes, frame: bytes) -> None:
        name, chance = direction.name, direction.chance
        self.counts[name, "frames"] += 1
        place = chance.random()
        byte, bits = chance.randrange(len(frame)), chance.randrange(1, 256)
        hold_s = chance.uniform(*_HOLD_S)
        fault = FAULTS[int(place / self.share)] if place < self.share * len(FAULTS) else None
        if fault is not None:
            self.counts[name, fault] += 1
        if fault == "drop":
            return
        if fault == "swap" and (name, peer) not in self._swapped:
            self._swapped[name, peer] = frame
            self._later(_LONGEST_SWAP_S, name, peer, b"")  # should no other frame come
            return
        if fault == "delay":
            self._later(hold_s, name, peer, frame)
            return
        if fault == "corrupt":
            frame = frame[:byte] + bytes([frame[byte] ^ bits]) + frame[byte + 1 :]
        self._pass(name, peer, frame)
        if fault == "duplicate":
            self._pass(name, peer, frame)
        self._pass_swapped(name, peer)

    def _later(self, delay_s: float, name: str, peer: bytes, frame: bytes) -> None:
        heapq.heappush(self._held, (time.monotonic() + delay_s, next(self._order), name, peer, frame))

    def _release(self) -> None:
        while self._held and self._held[0][0] <= time.monotonic():
            _, _, name, peer, frame = heapq.heappop(self._held)
            if frame:
                self._pass(name, peer, frame)
            else:
                self._pass_swapped(name, peer)

    def _pass_swapped(self, name: str, peer: bytes) -> None:
        frame = self._swapped.pop((name, peer), None)
        if frame is not None:
            self._pass(name, peer, frame)

    def _pass(self, name: str, peer: bytes, frame: bytes) -> None:
        if name == "down":
            self._front.send_multipart((peer, frame))
        else:
            self._back_of(peer).send(frame)

    def _back_of(self, peer: bytes) -> "zmq.Socket[bytes]":
        if peer not in self._backs:
            back = self._socket(zmq.DEALER)
            back.connect(self._back_address)
            self._backs[peer] = back
            self._poller.register(back, zmq.POLLIN)
        return self._backs[peer]
