"""The limit of open files, and what a gateway says when there are no more."""

import asyncio
import resource
import socket
from typing import Any

import pytest
import structlog.testing

from headway_gateway.grpc_server.connection import Bounds
from headway_gateway.grpc_server.server import GrpcServer
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


async def test_a_gateway_without_a_file_left_says_so_in_one_line():
    server = GrpcServer((), Bounds(10, 1.0, 1.0), most_message_bytes=1000)
    listening = socket.create_server(("127.0.0.1", 0))
    loop, tries = asyncio.get_running_loop(), []
    lost = LostConnections()

    def on_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        tries.append(context)
        lost.on_loop_exception(loop, context)

    loop.set_exception_handler(on_exception)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with structlog.testing.capture_logs() as told, socket.socket() as client:
        await server.start([listening])
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno(), limits[1]))
            client.connect(listening.getsockname())
            await asyncio.sleep(0.1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        await server.stop(0.0)
    assert 1 <= len(tries) <= 64
    assert [line["new"] for line in told] == [{"not accepted: Too many open files": 1}]
