"""The executor's socket beside a real scheduler's: connections that end on one side only."""

import contextlib
import select
import socket
import threading
import time
from pathlib import Path

import pytest

from headway_executor.links.channel import SchedulerChannel
from headway_scheduler.links.transport import Transport


class Sleeper:
    """Between a channel and a scheduler. ``fall_asleep`` ends the channel's connection; the scheduler does not see it end.

    That is what a stopped scheduler looks like: its kernel takes everything in, and the process comes to read of the end
    only after it has taken in that the same executor connects again.
    """

    def __init__(self, address: str, scheduler: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen()
        self._scheduler = scheduler
        self._near: list[socket.socket] = []
        self._far: list[socket.socket] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def fall_asleep(self) -> None:
        for connection in self._near:
            connection.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        pairs: dict[socket.socket, socket.socket] = {}
        while not self._stopped.is_set():
            for ready in select.select([self._listener, *pairs], [], [], 0.02)[0]:
                if ready is self._listener:
                    near, far = self._listener.accept()[0], socket.socket(socket.AF_UNIX)
                    far.connect(self._scheduler)
                    pairs |= {near: far, far: near}
                    self._near.append(near)
                    self._far.append(far)
                elif data := ready.recv(1 << 16):
                    with contextlib.suppress(OSError):
                        pairs[ready].sendall(data)
                else:
                    pairs.pop(ready)

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        for connection in (self._listener, *self._near, *self._far):
            connection.close()


def _heard_from(transport: Transport, channel: SchedulerChannel, frame: bytes, others: set[bytes]) -> bytes:
    """The peer, none of ``others``, under which the scheduler hears ``frame`` of the channel."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        channel.send(frame)
        transport.wait(0.05)
        for peer, data in transport.receive(transport.executor):
            if data == frame and peer not in others:
                return peer
    raise AssertionError(f"{frame!r} never arrived")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def test_who_connects_again_is_heard_before_the_end_of_the_old_connection_is_seen(directory: Path) -> None:
    transport = Transport(f"ipc://{directory}/step", f"ipc://{directory}/ingress")
    between = Sleeper(f"{directory}/between", f"{directory}/step")
    channel = SchedulerChannel(f"ipc://{directory}/between")
    try:
        before = _heard_from(transport, channel, b"before", set())
        between.fall_asleep()
        after = _heard_from(transport, channel, b"after", {before})
        transport.send(transport.executor, [(after, b"answer")])
        deadline = time.monotonic() + 5
        while (answer := channel.receive()) is None and time.monotonic() < deadline:
            channel.wait(0.05)
        assert answer == b"answer"
    finally:
        channel.close()
        between.close()
        transport.close()
