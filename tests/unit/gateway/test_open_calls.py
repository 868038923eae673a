"""Only so many calls are open at a time, whatever becomes of them; those beyond are told when to come again."""

import asyncio

import grpc
import grpc.aio
import pytest

from headway_gateway.accepting import Entrance
from headway_gateway.access.interceptors import OpenCalls, counting
from headway_gateway.figures.statistics import GatewayStatistics
from headway_gateway.grpc_server.connection import Bounds
from headway_gateway.grpc_server.server import GrpcServer
from headway_gateway.listening import listening_sockets
from refusals import retry_after_s

MOST = 2


class Calls:
    """A server whose calls stay open until they are let go, with its connection."""

    def __init__(self) -> None:
        self.statistics = GatewayStatistics()
        self.open_calls = OpenCalls(MOST)
        self.let_go = asyncio.Event()
        self.server = GrpcServer(
            [counting(self.statistics), self.open_calls.around], Bounds(100, 30, 30), most_message_bytes=1000
        )
        methods = {
            "One": grpc.unary_unary_rpc_method_handler(self._one),
            "Many": grpc.unary_stream_rpc_method_handler(self._many),
        }
        self.server.add_registered_method_handlers("test", methods)
        self.sockets = listening_sockets("address", "127.0.0.1:0", reuse_port=False)
        self.port = self.sockets[0].getsockname()[1]

    async def _one(self, request: bytes, context) -> bytes:
        await self.let_go.wait()
        return request

    async def _many(self, request: bytes, context):
        await self.let_go.wait()
        yield request

    async def until_open(self, count: int) -> None:
        async with asyncio.timeout(5):
            while self.open_calls.num_open != count:  # noqa: ASYNC110 (it is a number, not an event)
                await asyncio.sleep(0.01)


@pytest.fixture
async def calls():
    made = Calls()
    made.server.start(Entrance(made.sockets, pytest.fail))
    yield made
    await made.server.stop(0)


async def test_what_goes_beyond_is_refused_and_room_comes_back(calls) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{calls.port}") as channel:
        one, many = channel.unary_unary("/test/One"), channel.unary_stream("/test/Many")
        first, second = one(b"1"), many(b"2")
        await calls.until_open(MOST)
        for refused in (one(b"3"), many(b"4").read()):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await refused
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert caught.value.details() == "2 calls are open; allowed: 2"
            assert retry_after_s(caught.value) == 1
        assert calls.statistics.refusals["too_many_calls",] == 2

        second.cancel()  # a place is free again when a client leaves
        await calls.until_open(1)
        third = one(b"5")
        await calls.until_open(MOST)
        calls.let_go.set()
        assert [await first, await third] == [b"1", b"5"]
        await calls.until_open(0)
