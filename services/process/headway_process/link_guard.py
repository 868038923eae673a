"""Admits peers to the sockets that a process binds, and limits connections without a handshake.

Owns: allow-lists, answers to ZeroMQ's authentication requests (ZAP), the limit. Must not know: what a frame means.
A separate thread, so a flood of handshakes delays no step.

libzmq trusts a frame's announced size, up to ``MAXMSGSIZE``, before it knows the sender. Strangers can fill that times
the pending handshakes, so the guard shuts down further connections, never an established one. libzmq reports
connections, but only the number of successful handshakes. So connections older than any handshake count as established,
and of the younger ones as many as there were successes.
"""

import contextlib
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from headway_process.link_keys import load_key_pair
from headway_proto.wording import shown

HANDSHAKE_INTERVAL_MS = 2000
MAX_PENDING_HANDSHAKES = 16
MAX_CONNECTIONS = 512

UNKNOWN_KEY = "unknown key"
NO_HANDSHAKE = "no handshake"
TOO_MANY = "too many at once"

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
_MONITOR_HIGH_WATER_MARK = 100_000
_POLL_MS = 200
_RELOAD_INTERVAL_S = 0.25
_WINDOW_S = HANDSHAKE_INTERVAL_MS / 1000 + 0.5
_MOST_PROBLEMS = 32


class Admission(Protocol):
    """Who may connect. ``problems``: see ``AllowList``."""

    problems: deque[str]

    def admits(self, public_key: bytes) -> bool:
        """Whether a (binary) public key is allowed."""
        ...


class OneKey:
    """Admits the owner of one key, given in Z85."""

    def __init__(self, public_key: bytes) -> None:
        self.problems: deque[str] = deque()
        self._key = z85.decode(public_key)

    def admits(self, public_key: bytes) -> bool:
        """See ``Admission``."""
        return public_key == self._key


class AllowList:
    """The public keys in a directory's ``*.key`` files, read again after a change.

    A file without a whole key may be half written: its former key stays valid. Removing a key ends no connection.
    """

    def __init__(self, directory: Path) -> None:
        """Read the directory.

        Raises:
            OSError: it cannot be read.
        """
        self.problems: deque[str] = deque(maxlen=_MOST_PROBLEMS)
        """Unreadable files, until they are reported."""
        self._directory = directory
        self._seen = self._signature()
        self._keys: dict[str, bytes] = {}
        self._keys = self._read()
        self._looked_at = time.monotonic()
        self._is_unreadable = False

    def admits(self, public_key: bytes) -> bool:
        """Whether a (binary) public key is allowed."""
        now = time.monotonic()
        if now - self._looked_at >= _RELOAD_INTERVAL_S:
            self._looked_at = now
            self._reload()
        return public_key in self._keys.values()

    def _reload(self) -> None:
        try:
            signature = self._signature()
        except OSError as error:  # It may be unreadable for a moment: keep the list.
            if not self._is_unreadable:
                self.problems.append(f"{shown(self._directory)}: {error.strerror}")
            self._is_unreadable = True
            return
        self._is_unreadable = False
        if signature != self._seen:
            self._seen = signature
            self._keys = self._read()

    def _signature(self) -> dict[str, tuple[int, int, int]]:
        found = {}
        for entry in os.scandir(self._directory):
            if entry.name.endswith(".key"):
                status = entry.stat()
                found[entry.name] = status.st_ctime_ns, status.st_size, status.st_ino
        return found

    def _read(self) -> dict[str, bytes]:
        keys = {}
        for name in sorted(self._seen):
            try:
                keys[name] = z85.decode(load_key_pair(self._directory / name)[0])
            except ValueError as error:
                if name in self._keys:
                    keys[name] = self._keys[name]
                self.problems.append(f"{shown(name)} in {shown(self._directory)}: {error}")
        return keys


class Rejections(msgspec.Struct, frozen=True):
    """By reason, since the last report and in all."""

    link: str
    new: dict[str, int]
    total: dict[str, int]


class LinkGuard:
    """Guards the sockets of ``watch``; ``allow_lists`` by link name."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", allow_lists: Mapping[str, Admission]) -> None:
        self._context = context
        self._allow_lists = dict(allow_lists)
        self._doors: list[_Door] = []
        self._guarded: list[zmq.Socket[bytes]] = []
        self._counts: dict[str, Counter[str]] = {}
        self._reported: dict[str, Counter[str]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._zap: zmq.Socket[bytes] | None = None
        if allow_lists:
            self._zap = context.socket(zmq.REP)
            self._zap.setsockopt(zmq.LINGER, 0)
            self._zap.bind(_ZAP_ADDRESS)
        self._thread = threading.Thread(target=self._run, name="link-guard", daemon=True)

    def watch(self, link: str, guarded: "zmq.Socket[bytes]") -> None:
        """Limit a socket's connections, before ``start``."""
        monitor = guarded.get_monitor_socket(_EVENTS)
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.setsockopt(zmq.RCVHWM, _MONITOR_HIGH_WATER_MARK)
        self._doors.append(_Door(link, monitor))
        self._guarded.append(guarded)
        self._counts[link], self._reported[link] = Counter(), Counter()

    def start(self) -> None:
        """Start before sockets are bound."""
        self._thread.start()

    def take_rejections(self) -> list[Rejections]:
        """Return the rejections since the last call."""
        with self._lock:
            found = []
            for link, counts in self._counts.items():
                new = counts - self._reported[link]
                if new:
                    self._reported[link] = counts.copy()
                    found.append(Rejections(link, dict(new), dict(counts)))
            return found

    def take_key_problems(self) -> list[str]:
        """Return new problems of key files."""
        found = []
        for allow_list in self._allow_lists.values():
            while allow_list.problems:
                found.append(allow_list.problems.popleft())
        return found

    def close(self) -> None:
        """End before sockets are closed."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        for guarded in self._guarded:
            guarded.disable_monitor()
        for door in self._doors:
            door.monitor.close(linger=0)
        if self._zap is not None:
            self._zap.close(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        if self._zap is not None:
            poller.register(self._zap, zmq.POLLIN)
        for door in self._doors:
            poller.register(door.monitor, zmq.POLLIN)
        while not self._stop.is_set():
            poller.poll(_POLL_MS)
            if self._zap is not None:
                self._answer_zap(self._zap)
            for door in self._doors:
                self._count(door.link, door.take_events(time.monotonic()))

    def _answer_zap(self, zap: "zmq.Socket[bytes]") -> None:
        try:
            frames = zap.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        request_id = frames[1] if len(frames) > 1 else b""
        link = self._link_of_known_key(frames)
        if link is None:
            self._deny(frames)
        status = (b"200", b"OK", b"known", b"") if link is not None else (b"400", b"not admitted", b"", b"")
        zap.send_multipart((_ZAP_VERSION, request_id, *status))

    def _link_of_known_key(self, frames: list[bytes]) -> str | None:
        if len(frames) != 7 or frames[0] != _ZAP_VERSION or frames[5] != b"CURVE":
            return None
        domain = frames[2].decode("ascii", "replace")
        allow_list = self._allow_lists.get(domain)
        return domain if allow_list is not None and allow_list.admits(frames[6]) else None

    def _deny(self, frames: list[bytes]) -> None:
        domain = frames[2].decode("ascii", "replace") if len(frames) > 2 else ""
        for door in self._doors:
            if door.link == domain:
                door.num_denied += 1
                self._count(domain, Counter((UNKNOWN_KEY,)))

    def _count(self, link: str, turned_away: Counter[str]) -> None:
        if turned_away:
            with self._lock:
                self._counts[link] += turned_away


class _Door:
    """The connections of one socket."""

    def __init__(self, link: str, monitor: "zmq.Socket[bytes]") -> None:
        self.link = link
        self.monitor = monitor
        self.num_denied = 0
        """Denied handshakes not yet disconnected."""
        self._accepted_at: dict[int, float] = {}
        self._succeeded_at: deque[float] = deque()
        self._refused: set[int] = set()

    def take_events(self, now: float) -> Counter[str]:
        """Read the monitor; return the rejections."""
        turned_away: Counter[str] = Counter()
        while True:
            try:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return turned_away
            kind, fd = event["event"], event["value"]
            if kind == zmq.EVENT_ACCEPTED:
                self._accepted_at[fd] = now
                if self._num_pending(now) > MAX_PENDING_HANDSHAKES or len(self._accepted_at) > MAX_CONNECTIONS:
                    self._refused.add(fd)
                    turned_away[TOO_MANY] += 1
                    _shut_down(fd)
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._succeeded_at.append(now)
            elif kind == zmq.EVENT_DISCONNECTED:
                turned_away += self._disconnected(fd, now)

    def _num_pending(self, now: float) -> int:
        """Connections perhaps without a handshake."""
        while self._succeeded_at and now - self._succeeded_at[0] > _WINDOW_S:
            self._succeeded_at.popleft()
        young = sum(1 for at in self._accepted_at.values() if now - at <= _WINDOW_S)
        return max(0, young - len(self._succeeded_at))

    def _disconnected(self, fd: int, now: float) -> Counter[str]:
        accepted_at = self._accepted_at.get(fd)
        if accepted_at is None:
            return Counter()
        had_no_handshake = now - accepted_at <= _WINDOW_S and self._num_pending(now) > 0
        del self._accepted_at[fd]
        if fd in self._refused:
            self._refused.discard(fd)
            return Counter()
        if not had_no_handshake:
            if now - accepted_at <= _WINDOW_S and self._succeeded_at:
                self._succeeded_at.popleft()
            return Counter()
        if self.num_denied:
            self.num_denied -= 1
            return Counter()
        return Counter((NO_HANDSHAKE,))


def _shut_down(fd: int) -> None:
    """Shut down libzmq's connection. If ``fd`` was reused meanwhile, one of our peers reconnects."""
    with contextlib.suppress(OSError):
        duplicate = socket.socket(fileno=os.dup(fd))
        with duplicate:
            if duplicate.family in {socket.AF_INET, socket.AF_INET6} and duplicate.type == socket.SOCK_STREAM:
                duplicate.getpeername()  # fails for a listener
                duplicate.shutdown(socket.SHUT_RDWR)
