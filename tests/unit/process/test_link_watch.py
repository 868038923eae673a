"""A peer tells why it has no link, and gets one as soon as the cause is gone."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from headway.commands.keys import make_keys
from headway_executor.links.channel import SchedulerChannel
from headway_process import link_watch
from headway_scheduler.links.transport import Transport

ADMITTED = Path("scheduler") / "executors" / "executor.key"


@pytest.fixture
def address(unused_tcp_port: int) -> str:
    return f"tcp://127.0.0.1:{unused_tcp_port}"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    make_keys(tmp_path / "other")
    return tmp_path / "keys"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_watch, "PATIENCE_S", 0.3)
    monkeypatch.setattr(link_watch, "LOOK_INTERVAL_S", 0.0)
    monkeypatch.setattr(link_watch, "AGAIN_S", 0.1)


@contextlib.contextmanager
def _scheduler(address: str, keys: Path | None) -> Iterator[Transport]:
    transport = Transport(address, "tcp://127.0.0.1:*", str(keys / "scheduler") if keys else "")
    try:
        yield transport
    finally:
        transport.close()


@contextlib.contextmanager
def _executor(address: str, keys: Path | None) -> Iterator[SchedulerChannel]:
    channel = SchedulerChannel(address, str(keys / "executor") if keys else "")
    try:
        yield channel
    finally:
        channel.close()


def _told(channel: SchedulerChannel, reason: str) -> None:
    seen = set()
    ends_at = time.monotonic() + 10
    while reason not in seen:
        assert time.monotonic() < ends_at, f"told: {seen}"
        if problem := channel.problem():
            seen.add(problem)
        time.sleep(0.01)


def _is_heard(channel: SchedulerChannel, transport: Transport) -> None:
    ends_at = time.monotonic() + 10
    while not list(transport.receive(transport.executor)):
        assert time.monotonic() < ends_at, "not heard"
        channel.problem()
        channel.send(b"hello")
        time.sleep(0.02)


def test_nobody_listens_yet(address):
    with _executor(address, None) as channel:
        _told(channel, "nobody answers there")
        with _scheduler(address, None) as transport:
            _is_heard(channel, transport)
            assert channel.problem() is None


def test_a_key_that_is_admitted_later_needs_no_new_process(address, keys):
    key = (keys / ADMITTED).read_text()
    (keys / ADMITTED).unlink()
    with _scheduler(address, keys) as transport, _executor(address, keys) as channel:
        _told(channel, "the scheduler does not admit this key")
        (keys / ADMITTED).write_text(key)
        _is_heard(channel, transport)


@pytest.mark.parametrize("scheduler_has", [True, False])
def test_a_scheduler_that_comes_back_with_its_keys_or_without_them(address, keys, scheduler_has):
    theirs, ours = (keys, None) if scheduler_has else (None, keys)
    with _executor(address, ours) as channel:
        with _scheduler(address, theirs):
            _told(channel, "one end of the link has keys and the other has none")
        with _scheduler(address, ours) as transport:
            _is_heard(channel, transport)


def test_another_schedulers_key(address, keys):
    with _scheduler(address, keys.parent / "other"), _executor(address, keys) as channel:
        _told(channel, "the handshake breaks off; scheduler.key may be another scheduler's")


def test_a_reason_is_told_once_a_minute(address):
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        watch = link_watch.LinkWatch(dealer, address, 0.0)
        dealer.connect(address)
        assert [now for now in range(130) if watch.look(float(now))] == [1, 61, 121]
        watch.close()
