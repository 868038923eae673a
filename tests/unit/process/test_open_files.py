"""The limit of open files, and what a gateway says when there are no more."""

import asyncio
import resource
import socket

import pytest
import structlog.testing

from headway_gateway.accepting import Entrance
from headway_gateway.lost_connections import LostConnections
from headway_process.open_files import raise_limit_of_open_files


@pytest.mark.parametrize(
    ("soft", "hard", "becomes"),
    [
        (40, 128, 128),
        (1000, 1 << 18, 1 << 16),
        (1000, resource.RLIM_INFINITY, 1 << 16),
        (64, 64, 0),
        (1 << 17, 1 << 18, 0),
    ],
)
def test_the_limit_is_raised_to_what_the_system_allows(
    soft: int, hard: int, becomes: int, monkeypatch: pytest.MonkeyPatch
):
    changes: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: changes.append(limits))
    raise_limit_of_open_files()
    assert changes == [(becomes, hard)] * bool(becomes)


def test_too_few_open_files_are_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (63, 63))
    with pytest.raises(
        ValueError, match=r"^limit of open files \(ulimit -n\): 63 is not allowed; allowed: 64 or more$"
    ):
        raise_limit_of_open_files()


class _Telling(asyncio.Protocol):
    def __init__(self, accepted: asyncio.Queue[None]) -> None:
        self._accepted = accepted

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._accepted.put_nowait(None)
        transport.close()


async def test_a_gateway_without_a_file_left_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headway_gateway.accepting._PAUSE_S", 0.03)
    listening = socket.create_server(("127.0.0.1", 0))
    lost = LostConnections()
    accepted: asyncio.Queue[None] = asyncio.Queue()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with structlog.testing.capture_logs() as told, socket.socket() as client:
        (acceptor,) = Entrance([listening], lost.note_wait).open(lambda: _Telling(accepted))
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno(), limits[1]))
            client.connect(listening.getsockname())
            await asyncio.sleep(0.1)
            assert accepted.empty()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        async with asyncio.timeout(10):
            await accepted.get()  # it had waited
        acceptor.close()
    assert [line["new"] for line in told] == [{"not accepted: Too many open files": 1}]
