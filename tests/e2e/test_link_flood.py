"""Strangers flood the scheduler's ports while it serves: streams go on, and what the flood costs is bounded."""

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import psutil
import pytest
import zmq
import zmq.auth

from e2e.running_server import command, free_port
from headway.client import Client
from headway.commands.keys import make_keys

FLOOD_S = 3.5
"""Or longer, until every attack was made ``LEAST_COUNT`` times; who says nothing is let go after 2."""
LEAST_COUNT = 3
MOST_GROWTH_BYTES = 320 << 20
"""Above what sixteen pending connections, each with the largest frame there may be, can hold."""
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)


class Flood:
    """Threads that each repeat one kind of attack until told to stop."""

    def __init__(self, port: int, server_key: bytes) -> None:
        self._address = ("127.0.0.1", port)
        self._server_key = server_key
        self._stop = threading.Event()
        kinds = (
            self._connections,
            self._garbage,
            self._half_open,
            self._announced_giants,
            self._sent_giants,
            self._keys,
        )
        self.counts = {kind.__name__: 0 for kind in kinds}
        self._threads = [threading.Thread(target=self._repeat, args=(kind,)) for kind in kinds]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def least_count(self) -> int:
        """How often the rarest attack was made."""
        return min(self.counts.values())

    def _repeat(self, attack: Callable[[], None]) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(OSError):
                attack()
            self.counts[attack.__name__] += 1
            time.sleep(0.005)  # The two cores also serve.

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._address, timeout=0.5)
        connection.settimeout(0.5)
        return connection

    def _connections(self) -> None:
        with contextlib.ExitStack() as opened:
            for _ in range(50):
                opened.enter_context(self._connect())

    def _garbage(self) -> None:
        with self._connect() as connection:
            connection.sendall(os.urandom(4096))

    def _half_open(self) -> None:
        with contextlib.ExitStack() as opened:
            for _ in range(20):
                with contextlib.suppress(OSError):
                    opened.enter_context(self._connect()).sendall(GREETING)
            self._stop.wait(0.2)

    def _announced_giants(self) -> None:
        with self._connect() as connection:
            connection.sendall(GREETING + b"\x06" + struct.pack(">Q", 1 << 30))
            for _ in range(64):
                connection.sendall(bytes(1 << 16))

    def _sent_giants(self) -> None:
        with self._connect() as connection:
            connection.sendall(GREETING + b"\x06" + struct.pack(">Q", 15 << 20))
            for _ in range(14 * 16):
                connection.sendall(bytes(1 << 16))
            self._stop.wait(0.5)

    def _keys(self) -> None:
        """Whole handshakes with keys that nobody knows."""
        context = zmq.Context()
        opened = []
        for _ in range(8):
            stranger = context.socket(zmq.DEALER)
            stranger.curve_serverkey = self._server_key
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
            stranger.connect("tcp://{}:{}".format(*self._address))
            opened.append(stranger)
        self._stop.wait(0.2)
        for stranger in opened:
            stranger.close(linger=0)
        context.term()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = tmp_path_factory.mktemp("flood") / "keys"
    make_keys(keys)
    return keys


@contextlib.contextmanager
def served(keys: Path) -> Iterator[tuple[Client, psutil.Process, dict[str, int], list[str]]]:
    ports = {"step": free_port(), "ingress": free_port(), "grpc": free_port()}
    step, ingress = f"tcp://127.0.0.1:{ports['step']}", f"tcp://127.0.0.1:{ports['ingress']}"
    with (
        command("scheduler", f"--step-address={step}", f"--ingress-address={ingress}", f"--curve-keys={keys}/scheduler")
        as scheduler,
        command("executor", f"--step-address={step}", f"--curve-keys={keys}/executor", "--backend=simulated", "--model=demo"),
        command("gateway", f"--ingress-address={ingress}", f"--curve-keys={keys}/gateway", "--model=demo",
                f"--grpc-address=127.0.0.1:{ports['grpc']}"),
        Client(f"127.0.0.1:{ports['grpc']}") as client,
    ):  # fmt: skip
        client.wait_ready(30)
        yield client, psutil.Process(scheduler.process.pid), ports, scheduler.err


@pytest.mark.parametrize("link", ["step", "ingress"])
def test_serving_goes_on_and_memory_stays_bounded(directory: Path, link: str) -> None:
    server_key, _ = zmq.auth.load_certificate(directory / "scheduler" / "scheduler.key")

    def answer(client: Client) -> list[int]:
        return list(client.generate("hello", max_tokens=40, ignore_eos=True, seed=1, temperature=1).result().token_ids)

    with served(directory) as (client, scheduler, ports, log):
        undisturbed = answer(client)
        epochs = client.status().epoch
        before = most = scheduler.memory_info().rss
        connections = 0
        num_answers = 0
        with Flood(ports[link], server_key) as flood:
            ends = time.monotonic() + FLOOD_S
            while time.monotonic() < ends or flood.least_count() < LEAST_COUNT:
                assert answer(client) == undisturbed
                num_answers += 1
                most = max(most, scheduler.memory_info().rss)
                connections = max(connections, len(scheduler.net_connections()))
        assert num_answers >= 3
        assert client.status().epoch == epochs, "the executor's connection was lost"
        assert most - before < MOST_GROWTH_BYTES
        assert connections < 200
        assert answer(client) == undisturbed
        lines = [line for line in log if "connections turned away" in line]
        assert 1 <= len(lines) <= 5, lines  # Counted, and told now and then.
