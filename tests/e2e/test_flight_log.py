"""The flight log of a running server, read through its gateway: who may, and what the commands make of it."""

import asyncio
import hashlib
from pathlib import Path

import grpc
import pytest

from e2e.running_server import command, finished, wait_until
from e2e.test_gateway_serving import eventually, served, stage
from fake_scheduler import FakeScheduler
from headway.__main__ import main
from headway.client import AsyncClient, AuthenticationError, Client, InvalidRequestError
from headway_proto.operations import FlightLogPlace

TOKENS = f"""
alice   generate  sha256:{hashlib.sha256(b"alices").hexdigest()}
watcher admin     sha256:{hashlib.sha256(b"watchers").hexdigest()}
"""
LOG = bytes(range(256)) * 10


async def pieces_for(client: AsyncClient) -> list[bytes]:
    return [piece.data async for piece in client.read_flight_log()]


async def test_it_takes_the_role_admin(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(TOKENS)
    async with stage(auth_token_file=str(tmp_path / "tokens")) as on, FakeScheduler(on.ingress) as scheduler:
        scheduler.flight_log = LOG
        for token, code in ((None, "UNAUTHENTICATED"), ("nobodys", "UNAUTHENTICATED"), ("alices", "PERMISSION_DENIED")):
            async with AsyncClient(on.address, token=token) as client:
                with pytest.raises(AuthenticationError) as refused:
                    await pieces_for(client)
                assert refused.value.code.name == code
        assert not scheduler.admin_calls
        async with AsyncClient(on.address, token="watchers") as client:
            assert [len(data) for data in await pieces_for(client)] == [1000, 1000, 560]


async def test_readers_at_once_get_the_same_and_the_scheduler_one_question_at_a_time() -> None:
    async with served() as (on, scheduler):
        scheduler.flight_log = LOG
        copies = await asyncio.gather(*(pieces_for(on.client) for _ in range(4)))
        assert [b"".join(copy) for copy in copies] == [LOG] * 4
        places = [call.place for call in scheduler.admin_calls]
        assert places.count(FlightLogPlace()) == 4
        assert len(places) == 4 * 4


async def test_where_nothing_is_recorded_explain_tells_what_the_server_knows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with served(step_interval_s=None) as (on, scheduler):
        with pytest.raises(InvalidRequestError, match="flight_log: the scheduler records nothing") as refused:
            await pieces_for(on.client)
        assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
        async with on.client.generate("x", max_tokens=9, request_id="mine"):
            await eventually(lambda: scheduler.submits)
            assert await asyncio.to_thread(main, ["explain", on.address, "mine"]) == 0
            said = capsys.readouterr().out
            assert "Request mine is running. it runs\n" in said
            assert "serve with --flight-log DIRECTORY" in said
        assert await asyncio.to_thread(main, ["explain", on.address, "nobody"]) == 1
        assert "request_id: 'nobody' is not known" in capsys.readouterr().err
        assert await asyncio.to_thread(main, ["replay", on.address]) == 2
        told = capsys.readouterr().err
        assert "flight_log: the scheduler records nothing" in told
        assert told.count("\n") == 1


def test_the_whole_life_of_a_request_that_has_ended_by_address(tmp_path: Path) -> None:
    words = ("--backend", "simulated", "--backend-option", "step_base_us=1000", "--grpc-address", "127.0.0.1:0")
    with command("serve", *words, "--flight-log", str(tmp_path / "log")) as server:
        address = server.wait_for_ready()
        with Client(address) as client:
            client.generate("one two three", max_tokens=7, ignore_eos=True, request_id="mine").result()
        explained = finished("explain", address, "mine")
        assert explained.process.returncode == 0, explained.err
        told = "".join(explained.out)
        assert told.startswith("Request mine (class normal): ")
        assert told.endswith("It ended: length, after 7 output tokens.\n")
        assert not explained.err
        assert "1 requests" in "".join(finished("explain", address).out)
        replayed = finished("replay", address)
        assert replayed.process.returncode == 0, replayed.err
        assert "".join(replayed.out).endswith(": byte-identical\n")
        with Client(address) as client:
            client.pause()
            with client.generate("x", max_tokens=1, request_id="waits"):
                wait_until(client.requests, 10, "the request")
                waiting = "".join(finished("explain", address, "waits").out)
        assert waiting.startswith("Request waits (class normal): ")
        assert "The recording ends before it does.\n\nNow it is waiting. It arrived " in waiting
        missing = finished("explain", address, "nobody")
        assert missing.process.returncode == 1
        assert "".join(missing.err) == "headway explain: 'nobody' is no request of this recording\n"
        assert server.stop() == 0
