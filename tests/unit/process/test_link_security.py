"""Who gets onto the scheduler's sockets: the right key on the right link, a private directory, and nobody else."""

import contextlib
import re
import select
import shutil
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
import zmq
import zmq.auth

from headway.commands.keys import make_keys
from headway_executor.links.channel import SchedulerChannel
from headway_gateway.link.scheduler_client import SchedulerClient
from headway_process import link_guard
from headway_process.addresses import check_ipc_directory, check_link_address
from headway_process.link_guard import MAX_PENDING_HANDSHAKES, NO_HANDSHAKE, TOO_MANY, UNKNOWN_KEY, AllowList
from headway_proto.framing import MAX_BYTES_TO_SCHEDULER
from headway_scheduler.links.transport import Transport


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


class Links:
    """A transport on free ports, with the keys of ``directory``."""

    def __init__(self, directory: Path | None) -> None:
        curve_keys = "" if directory is None else str(directory / "scheduler")
        self.transport = Transport("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", curve_keys)
        self.step = self.transport.executor.getsockopt_string(zmq.LAST_ENDPOINT)
        self.ingress = self.transport.gateways.getsockopt_string(zmq.LAST_ENDPOINT)
        self.rejections: dict[str, dict[str, int]] = {}

    def arrives(self, on_step: bool, timeout_s: float = 5.0) -> bool:
        """Whether a frame arrives at a link."""
        bound = self.transport.executor if on_step else self.transport.gateways
        return bool(bound.poll(int(timeout_s * 1000))) and bool(bound.recv_multipart())

    def wait_for(self, link: str, reason: str, count: int = 1) -> None:
        """Wait until so many were turned away."""
        deadline = time.monotonic() + 8
        while self.rejections.get(link, {}).get(reason, 0) < count:
            assert time.monotonic() < deadline, self.rejections
            for report in self.transport.take_rejections():
                self.rejections[report.link] = report.total
            time.sleep(0.02)


@pytest.fixture
def links(keys: Path) -> Iterator[Links]:
    guarded = Links(keys)
    yield guarded
    guarded.transport.close()


class Dealer:
    """A peer with keys of its choice."""

    def __init__(self, address: str, server: bytes | None = None, own: tuple[bytes, bytes] | None = None) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if server is not None and own is not None:
            self.socket.curve_serverkey = server
            self.socket.curve_publickey, self.socket.curve_secretkey = own
        self.socket.connect(address)
        self.socket.send(b"frame")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close(linger=0)
        self.context.term()


def pair_of(keys: Path, name: str) -> tuple[bytes, bytes]:
    public, secret = zmq.auth.load_certificate(keys / name / f"{name}.key_secret")
    assert secret is not None
    return public, secret


def server_key(keys: Path) -> bytes:
    return zmq.auth.load_certificate(keys / "scheduler" / "scheduler.key")[0]


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_each_role_gets_onto_its_own_link_only(links: Links, keys: Path) -> None:
    server = server_key(keys)
    for name, on_step in (("executor", True), ("gateway", False)):
        right, wrong = (links.step, links.ingress) if on_step else (links.ingress, links.step)
        with Dealer(right, server, pair_of(keys, name)):
            assert links.arrives(on_step)
        with Dealer(wrong, server, pair_of(keys, name)):
            links.wait_for("ingress" if on_step else "step", UNKNOWN_KEY)
            assert not links.arrives(not on_step, 0.2)


def test_a_stranger_a_plain_peer_and_one_that_mistakes_the_scheduler_are_turned_away(links: Links, keys: Path) -> None:
    with Dealer(links.step, server_key(keys), zmq.curve_keypair()):
        links.wait_for("step", UNKNOWN_KEY)
    with Dealer(links.step):
        links.wait_for("step", NO_HANDSHAKE)
    before = links.rejections["step"][NO_HANDSHAKE]
    other_scheduler, _ = zmq.curve_keypair()
    with Dealer(links.step, other_scheduler, pair_of(keys, "executor")):
        links.wait_for("step", NO_HANDSHAKE, before + 1)
    assert not links.arrives(on_step=True, timeout_s=0.2)


def test_keys_may_come_and_go_while_the_scheduler_runs(links: Links, keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "more")
    newcomer = pair_of(tmp_path / "more", "executor")
    listed = keys / "scheduler" / "executors" / "second.key"
    with Dealer(links.step, server_key(keys), newcomer):
        links.wait_for("step", UNKNOWN_KEY)
        shutil.copy(tmp_path / "more" / "executor" / "executor.key", listed)
    time.sleep(0.3)
    with Dealer(links.step, server_key(keys), newcomer) as stays:
        assert links.arrives(on_step=True)
        listed.unlink()
        time.sleep(0.3)
        turned_away = links.rejections["step"][UNKNOWN_KEY]
        with Dealer(links.step, server_key(keys), newcomer):
            links.wait_for("step", UNKNOWN_KEY, turned_away + 1)
        stays.socket.send(b"still connected")
        assert links.arrives(on_step=True)


def test_a_file_that_holds_no_key_admits_nobody_and_harms_nobody(keys: Path) -> None:
    directory = keys / "scheduler" / "executors"
    (directory / "a.key").write_bytes(b"\xff\x00 no key")
    (directory / "b.key").write_text('metadata\ncurve\n    public-key = "short"\n')
    (directory / "c.key").mkdir()
    allow_list = AllowList(directory)
    assert allow_list.admits(zmq.utils.z85.decode(pair_of(keys, "executor")[0]))
    assert not allow_list.admits(b"")


def test_a_key_file_that_is_cut_short_changes_nothing(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_guard, "_RELOAD_INTERVAL_S", 0.0)
    path = keys / "scheduler" / "executors" / "executor.key"
    whole, public = path.read_bytes(), zmq.utils.z85.decode(pair_of(keys, "executor")[0])
    allow_list = AllowList(path.parent)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert allow_list.admits(public), whole[:length]
    assert set(allow_list._keys.values()) == {public}
    assert any("no whole CURVE key in it" in problem for problem in allow_list.problems)
    path.write_bytes(whole.replace(b'public-key = "', b'public-key = "\x7f'))
    assert allow_list.admits(public)
    allow_list.problems.clear()
    path.parent.rename(keys / "elsewhere")
    assert all(allow_list.admits(public) for _ in range(3))
    assert len(allow_list.problems) == 1
    (keys / "elsewhere").rename(path.parent)
    path.unlink()
    assert not allow_list.admits(public)


def test_the_scheduler_tells_of_a_key_file_that_it_could_not_read(links: Links, keys: Path) -> None:
    path = keys / "scheduler" / "executors" / "executor.key"
    path.write_bytes(path.read_bytes()[:-8])
    time.sleep(0.3)
    with Dealer(links.step, server_key(keys), pair_of(keys, "executor")):
        assert links.arrives(on_step=True)
    assert ["executor.key" in problem for problem in links.transport.take_key_problems()] == [True]


@pytest.mark.parametrize("name", ["scheduler.key", "executor.key_secret"])
def test_an_executor_with_half_a_key_is_refused_in_one_line(keys: Path, name: str) -> None:
    path = keys / "executor" / name
    whole = path.read_bytes()
    for length in range(len(whole) - 1):
        path.write_bytes(whole[:length])
        with contextlib.suppress(ValueError):
            SchedulerChannel("tcp://127.0.0.1:1", str(keys / "executor")).close()
    for length in (whole.index(b"public-key") + 10, len(whole) - 10):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=rf"^curve_keys: .* usable {re.escape(name)} "):
            SchedulerChannel("tcp://127.0.0.1:1", str(keys / "executor"))


@pytest.mark.parametrize("name", ["scheduler.key", "executor.key_secret"])
def test_a_key_that_everybody_may_write_is_refused(keys: Path, name: str) -> None:
    (keys / "executor" / name).chmod(0o646)
    with pytest.raises(ValueError, match=r"mode 0646, so every user of this machine may change it: chmod o-w"):
        SchedulerChannel("tcp://127.0.0.1:1", str(keys / "executor"))


@pytest.mark.parametrize(
    "missing", ["scheduler.key_secret", "executors/executor.key,executors", "gateways/gateway.key,gateways"]
)
def test_keys_that_are_not_complete_are_refused(keys: Path, missing: str) -> None:
    for name in missing.split(","):
        path = keys / "scheduler" / name
        path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(ValueError, match=r"^curve_keys: .*scheduler\.key_secret"):
        Links(keys)


def test_silence_garbage_and_giant_frames_are_turned_away(links: Links) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
    openings = (
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(range(256)) * 8,
        greeting,
        greeting + b"\x06" + struct.pack(">Q", 1 << 30) + bytes(1000),
        greeting + b"\x06" + struct.pack(">Q", MAX_BYTES_TO_SCHEDULER + 1),
        greeting + b"\x04\xc8\x05HELLO" + bytes(194),
    )
    opened = [socket.create_connection(("127.0.0.1", port_of(links.step))) for _ in openings]
    for connection, opening in zip(opened, openings, strict=True):
        connection.sendall(opening)
    links.wait_for("step", NO_HANDSHAKE, len(openings))
    for connection in opened:
        connection.close()


def test_pending_handshakes_are_bounded_and_those_who_prove_themselves_are_not(links: Links, keys: Path) -> None:
    address = ("127.0.0.1", port_of(links.step))
    with Dealer(links.step, server_key(keys), pair_of(keys, "executor")) as established:
        assert links.arrives(on_step=True)
        opened = [socket.create_connection(address) for _ in range(4 * MAX_PENDING_HANDSHAKES)]
        links.wait_for("step", TOO_MANY, 3 * MAX_PENDING_HANDSHAKES - 1)
        established.socket.send(b"still here")
        assert links.arrives(on_step=True)
        for connection in opened:
            connection.close()
    # Many who come at once and do shake hands are no flood.
    links.wait_for("step", NO_HANDSHAKE, 1)
    peers = [Dealer(links.ingress, server_key(keys), pair_of(keys, "gateway")) for _ in range(12)]
    assert all(links.arrives(on_step=False) for _ in peers)
    more = [Dealer(links.ingress, server_key(keys), pair_of(keys, "gateway")) for _ in range(12)]
    assert all(links.arrives(on_step=False) for _ in more)
    for peer in (*peers, *more):
        peer.__exit__()
    assert TOO_MANY not in links.rejections.get("ingress", {})


def test_without_keys_a_loopback_port_is_bounded_too() -> None:
    plain = Links(None)
    try:
        opened = [
            socket.create_connection(("127.0.0.1", port_of(plain.step))) for _ in range(MAX_PENDING_HANDSHAKES + 5)
        ]
        plain.wait_for("step", TOO_MANY, 4)
        for connection in opened:
            connection.close()
        with Dealer(plain.ingress):
            assert plain.arrives(on_step=False)
    finally:
        plain.transport.close()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o1777])
def test_a_socket_in_a_directory_that_others_can_enter_is_refused_on_both_sides(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(mode)
    address = f"ipc://{directory}/s"
    private = f"ipc://{tmp_path}/private"
    for connect in (
        lambda: Transport(address, private),
        lambda: Transport(private, address),
        lambda: SchedulerChannel(address),
        lambda: SchedulerClient(address, incarnation=1),
    ):
        with pytest.raises(ValueError, match=rf"_address: .*mode {mode:04o}.*allowed: .*0700"):
            connect()


def test_a_missing_directory_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"step_address: .*No such file or directory.*0700"):
        check_ipc_directory("step_address", f"ipc://{tmp_path}/absent/s")
    check_ipc_directory("step_address", f"ipc://{tmp_path}/s")
    check_ipc_directory("step_address", "tcp://127.0.0.1:1")


@pytest.mark.parametrize(
    "address", ["ipc://@abstract", "ipc://*", "ipc://", "tcp://*:5", "tcp://0.0.0.0:5", "tcp://[::]:5"]
)
def test_addresses_that_nothing_guards_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="is not allowed"):
        check_link_address("step_address", address, has_keys=False)


class Cable:
    """A TCP connection to an address, which can be cut without either end being told."""

    def __init__(self, address: str) -> None:
        self._to = ("127.0.0.1", port_of(address))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._is_cut = threading.Event()
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self) -> None:
        self._is_cut.set()

    def close(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        self._listener.settimeout(0.05)
        while not self._is_over.is_set():
            with contextlib.suppress(TimeoutError):
                near, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._carry, args=(near,)))
                self._threads[-1].start()

    def _carry(self, near: socket.socket) -> None:
        with near, socket.create_connection(self._to) as far:
            while not self._is_over.is_set():
                readable, _, _ = select.select([near, far], [], [], 0.02)
                if self._is_cut.is_set():
                    continue
                for end in readable:
                    data = end.recv(65536)
                    if not data:
                        return
                    (far if end is near else near).sendall(data)


def test_a_silent_partition_is_noticed_within_a_second(links: Links, keys: Path) -> None:
    cable = Cable(links.step)
    channel = SchedulerChannel(cable.address, str(keys / "executor"))
    try:
        deadline = time.monotonic() + 5
        while not links.transport.executor.poll(20):
            channel.send(b"frame")
            assert time.monotonic() < deadline
        peer, _ = links.transport.executor.recv_multipart()
        assert links.transport.send(links.transport.executor, [(peer, b"answer")]) == []
        cable.cut()
        cut_at = time.monotonic()
        while not links.transport.send(links.transport.executor, [(peer, b"answer")]):
            time.sleep(0.02)
            assert time.monotonic() - cut_at < 3
        assert time.monotonic() - cut_at < 1.0
    finally:
        channel.close()
        cable.close()
