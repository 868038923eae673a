"""The transport tcp: who gets onto its port, what strangers send there, and a network that harms what passes."""

import contextlib
import os
import random
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
import zmq.auth

from chaos.proxy import FAULTS, FrameProxy
from headway.commands.keys import make_keys
from headway_conformance import ConformanceFailure
from headway_conformance.block_transports.contents import content_of, num_whole, record_of
from headway_executor.backend import BackendConfigError
from headway_executor.block_store import questions
from headway_executor.block_store.questions import AnswerReader, BlockQuestion, question_writer
from headway_executor.block_store.tcp_transport import TcpTransport
from headway_executor.block_store.transport import RECORD, HostMemory, PullError
from headway_executor.config import ExecutorConfig
from headway_process.link_guard import MAX_PENDING_HANDSHAKES

NUM_BLOCKS, BLOCK_BYTES = 24, 1 << 20
ANY_PORT = "tcp://127.0.0.1:0"


@pytest.fixture(scope="module")
def memory() -> HostMemory:
    contents = [content_of(block, 1, BLOCK_BYTES) for block in range(NUM_BLOCKS)]
    records = np.concatenate([record_of(block, 1, content) for block, content in enumerate(contents)])
    return HostMemory("a-pool", "", records.astype(RECORD), np.stack(contents))


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def transport(opened: contextlib.ExitStack, *arguments: str) -> TcpTransport:
    made = TcpTransport(*arguments)
    opened.callback(made.close)
    return made


def pull(puller: TcpTransport, address: str, blocks: list[int], timeout_s: float = 5.0) -> int:
    """How many of the blocks came whole; none of another number counts as whole."""
    asked = np.array(blocks, dtype=np.int32)
    pulled = puller.pull("a-pool", address, asked, block_bytes=BLOCK_BYTES, timeout_s=timeout_s)
    return num_whole(pulled, blocks, BLOCK_BYTES)


def pull_through(puller: TcpTransport, address: str, seed: int, times: int) -> tuple[int, int]:
    """Pull at random, with time-outs that some answers meet and others do not; return what came whole, and failures."""
    chance = random.Random(seed)
    whole = failures = 0
    for _ in range(times):
        blocks = chance.choices(range(NUM_BLOCKS), k=chance.randrange(1, NUM_BLOCKS))
        try:
            whole += pull(puller, address, blocks, chance.choice((0.02, 0.1, 0.4)))
        except PullError:
            failures += 1
    return whole, failures


def test_no_answer_is_dropped_in_a_pull_of_thousands_of_parts(opened, monkeypatch):
    monkeypatch.setattr(questions, "ANSWER_BYTES", 1)
    blocks = np.zeros((1000, 64), np.uint8)
    blocks[:, :2] = np.arange(1000, dtype=np.uint16)[:, None].view(np.uint8)
    owner, puller = transport(opened, ANY_PORT), transport(opened)
    address = owner.register(HostMemory("a-pool", "", np.zeros(1000, RECORD), blocks))
    asked = np.random.default_rng(1).integers(0, 1000, 6000, dtype=np.int32)
    pulled = puller.pull("a-pool", address, asked, block_bytes=64, timeout_s=60.0)
    assert np.array_equal(pulled.blocks, blocks[asked])


class BlindReader(AnswerReader):
    """Takes any answer for the oldest question, as a transport without numbers would."""

    def read(self, message):
        answer = super().read(message)
        self.num_read = getattr(self, "num_read", -1) + 1
        return answer._replace(sequence=self.num_read)


@pytest.mark.parametrize("seed", range(2))
def test_lost_late_repeated_swapped_and_damaged_messages_never_give_another_block(memory, opened, seed):
    owner, puller = transport(opened, ANY_PORT), transport(opened)
    address = owner.register(memory)
    with FrameProxy("tcp://127.0.0.1:*", f"tcp://{address}", seed=seed, share=0.05) as proxy:
        front = proxy._front.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        whole, failures = pull_through(puller, front, seed, 40)
        assert all(proxy.total(fault) for fault in FAULTS), proxy.counts
    assert whole > NUM_BLOCKS
    assert failures > 0
    assert pull(puller, address, list(range(NUM_BLOCKS))) == NUM_BLOCKS


def test_answers_without_numbers_would_be_noticed_here(memory, opened, monkeypatch):
    monkeypatch.setattr("headway_executor.block_store.tcp_transport.AnswerReader", BlindReader)
    owner, puller = transport(opened, ANY_PORT), transport(opened)
    address = owner.register(memory)
    with FrameProxy("tcp://127.0.0.1:*", f"tcp://{address}", seed=1, share=0.1) as proxy:
        front = proxy._front.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        with pytest.raises(ConformanceFailure, match="where block"):
            pull_through(puller, front, 1, 60)


class ByteProxy:
    """Passes a TCP stream on, and changes a byte or cuts the connection every now and then."""

    def __init__(self, back: str, seed: int) -> None:
        host, _, port = back.rpartition(":")
        self._back = host, int(port)
        self._chance = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_damaged = self.num_cut = 0

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                pair = self._listener.accept()[0], socket.create_connection(self._back)
                self._sockets += pair
                for source, sink in (pair, pair[::-1]):
                    threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source, sink):
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                fate = self._chance.random()
                if fate < 0.004:
                    self.num_cut += 1
                    sink.sendall(data[: len(data) // 2])
                    break
                if fate < 0.01:
                    self.num_damaged += 1
                    data[self._chance.randrange(len(data))] ^= 1 << self._chance.randrange(8)
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def test_a_stream_with_changed_bytes_and_cuts_never_gives_another_block(memory, opened):
    owner, puller = transport(opened, ANY_PORT), transport(opened)
    address = owner.register(memory)
    with ByteProxy(address, seed=5) as proxy:
        whole, failures = pull_through(puller, proxy.address, 5, 60)
        assert proxy.num_damaged > 0
        assert proxy.num_cut > 0
    assert whole > NUM_BLOCKS
    assert failures > 0
    assert pull(puller, address, list(range(NUM_BLOCKS))) == NUM_BLOCKS


def dealer(opened: contextlib.ExitStack, address: str, keys: tuple[bytes, bytes, bytes] | None = None):
    context = zmq.Context()
    opened.callback(context.term)
    made = context.socket(zmq.DEALER)
    opened.callback(made.close, 0)
    if keys is not None:
        made.curve_serverkey, made.curve_publickey, made.curve_secretkey = keys
    made.connect(f"tcp://{address}")
    return made


def test_what_is_no_question_is_counted_and_harms_nobody(memory, opened):
    owner, puller = transport(opened, ANY_PORT), transport(opened)
    address = owner.register(memory)
    stranger = dealer(opened, address)
    good = question_writer(7).encode(BlockQuestion("a-pool", BLOCK_BYTES, [1]))
    chance = random.Random(3)
    bad = [b"", b"x", bytes(24), good[:-1], good + b"x", good[:3] + b"\x02" + good[4:], os.urandom(60_000)]
    bad += [good[:at] + bytes([good[at] ^ 1 << chance.randrange(8)]) + good[at + 1 :] for at in range(len(good))]
    for message in bad:
        stranger.send(message)
    stranger.send_multipart((good, good))
    deadline = time.monotonic() + 5
    while owner.num_malformed < len(bad) + 1:
        assert time.monotonic() < deadline, owner.num_malformed
        time.sleep(0.01)
    assert not stranger.poll(50)
    stranger.send(good)
    assert stranger.poll(5000)
    stranger.send(bytes(questions.MAX_QUESTION_BYTES + 1))  # ends the connection
    assert pull(puller, address, [3, 4]) == 2
    assert owner.num_malformed == len(bad) + 1


@pytest.mark.parametrize("blocks", [[0] * 5, list(range(5000)), [1 << 62], [-(1 << 63)]])
def test_a_question_for_too_much_is_refused(memory, opened, blocks):
    asking = dealer(opened, transport(opened, ANY_PORT).register(memory))
    asking.send(question_writer(7).encode(BlockQuestion("a-pool", BLOCK_BYTES, blocks)))
    assert asking.poll(5000)
    answer = AnswerReader(7).read(asking.recv(copy=False).buffer)
    assert answer.refusal
    assert len(answer.content.blocks) == 0


def test_connections_without_a_handshake_are_bounded_and_delay_nobody(memory, opened):
    owner, puller = transport(opened, ANY_PORT), transport(opened)
    address = owner.register(memory)
    assert pull(puller, address, [1]) == 1
    host, _, port = address.rpartition(":")
    strangers = [opened.enter_context(socket.create_connection((host, int(port)))) for _ in range(60)]
    deadline = time.monotonic() + 5
    while (num_ended := sum(map(has_ended, strangers))) < len(strangers) - MAX_PENDING_HANDSHAKES:
        assert time.monotonic() < deadline, num_ended
        assert pull(puller, address, [2, 3]) == 2


def has_ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return not connection.recv(1000)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    make_keys(tmp_path / "others")
    return tmp_path / "keys"


def pair_of(directory: Path, name: str) -> tuple[bytes, bytes]:
    public, secret = zmq.auth.load_certificate(directory / name / f"{name}.key_secret")
    assert secret is not None
    return public, secret


def test_only_the_executors_own_key_gets_onto_the_port(memory, opened, keys, tmp_path):
    own = str(keys / "executor")
    owner, puller = transport(opened, "tcp://127.0.0.1:*", own), transport(opened, "", own)
    address = owner.register(memory)
    assert pull(puller, address, [1, 2]) == 2
    for directory in ("", str(tmp_path / "others" / "executor")):
        began = time.monotonic()
        with pytest.raises(PullError, match=r"refused or has ended|no answer"):
            pull(transport(opened, "", directory), address, [1], 1.0)
        assert time.monotonic() - began < 2
    server, _ = pair_of(keys, "executor")
    question = question_writer(7).encode(BlockQuestion("a-pool", BLOCK_BYTES, [1]))
    for stranger in (pair_of(keys, "scheduler"), pair_of(keys, "gateway"), zmq.curve_keypair()):
        asking = dealer(opened, address, (server, *stranger))
        asking.send(question)
        assert not asking.poll(300)
    asking = dealer(opened, address, (server, *pair_of(keys, "executor")))
    asking.send(question)
    assert asking.poll(5000)
    assert pull(puller, address, [3]) == 1


def test_a_puller_with_keys_takes_nothing_from_a_port_without(memory, opened, keys):
    address = transport(opened, ANY_PORT).register(memory)
    with pytest.raises(PullError):
        pull(transport(opened, "", str(keys / "executor")), address, [1], 1.0)


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("", "tcp://HOST:PORT"),
        ("127.0.0.1:5000", "tcp://HOST:PORT"),
        ("tcp://127.0.0.1", "tcp://HOST:PORT"),
        ("tcp://127.0.0.1:70000", "tcp://HOST:PORT"),
        ("tcp://127.0.0.1:**", "tcp://HOST:PORT"),
        ("tcp://10.1.2.3:0", "together with curve_keys"),
        ("tcp://*:5000", "together with curve_keys"),
        ("ipc:///tmp/socket", "an address of this host that the others can reach"),
    ],
)
def test_an_address_that_cannot_be_offered_is_refused(memory, opened, address, allowed):
    with pytest.raises(BackendConfigError, match=r"^block_address: ") as refused:
        transport(opened, address).register(memory)
    assert allowed in str(refused.value)
    assert "\n" not in str(refused.value)
    if address:
        with pytest.raises(ValueError, match=r"^block_address: "):
            ExecutorConfig(block_address=address, block_transports="shm,tcp").validate()


def test_a_configured_address_needs_the_transport():
    ExecutorConfig(block_address=ANY_PORT, block_transports="shm, tcp").validate()
    with pytest.raises(
        ValueError, match=r"^block_address: 'tcp://127.0.0.1:0' is not allowed; .*block_transports has tcp"
    ):
        ExecutorConfig(block_address=ANY_PORT).validate()


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "*"])
def test_with_keys_an_address_must_still_be_one_that_others_can_use(memory, opened, keys, host):
    with pytest.raises(BackendConfigError, match="that the others can reach"):
        transport(opened, f"tcp://{host}:0", str(keys / "executor")).register(memory)


def test_a_port_in_use_a_foreign_address_and_missing_keys_are_refused(memory, opened, keys):
    taken = transport(opened, ANY_PORT).register(memory)
    with pytest.raises(BackendConfigError, match=r"^block_address: .* cannot be bound: Address already in use"):
        transport(opened, f"tcp://{taken}").register(memory)
    with pytest.raises(BackendConfigError, match=r"^block_address: .* cannot be bound: "):
        transport(opened, "tcp://203.0.113.9:0", str(keys / "executor")).register(memory)
    shutil.rmtree(keys / "executor")
    with pytest.raises(BackendConfigError, match=r"^curve_keys: "):
        transport(opened, ANY_PORT, str(keys / "executor")).register(memory)


def test_blocks_too_large_for_a_message_are_refused(opened):
    huge = HostMemory("a-pool", "", np.zeros(1, RECORD), np.empty((1, questions.MAX_BLOCK_BYTES + 1), np.uint8))
    with pytest.raises(BackendConfigError, match=r"^block_address: .*one block has"):
        transport(opened, ANY_PORT).register(huge)


def test_a_name_is_announced_as_it_was_given(memory, opened):
    address = transport(opened, "tcp://localhost:*").register(memory)
    assert address.startswith("localhost:")
    assert pull(transport(opened), address, [5]) == 1


def test_an_address_beyond_loopback_is_not_asked_without_keys(opened):
    with pytest.raises(PullError, match="together with curve_keys"):
        pull(transport(opened), "192.0.2.1:5000", [1])
