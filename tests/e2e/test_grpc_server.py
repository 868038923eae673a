"""The gateway's gRPC server by itself: every kind of method, and clients that are slow, huge, gone or not gRPC at all."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import grpc
import pytest

from e2e.running_server import eventually
from headway_gateway.accepting import Entrance
from headway_gateway.grpc_server import connection as connections
from headway_gateway.grpc_server.call import Call
from headway_gateway.grpc_server.connection import MOST_WAITING_BYTES, Bounds
from headway_gateway.grpc_server.frames import ErrorCode
from headway_gateway.grpc_server.server import GrpcServer, Surrounding
from headway_gateway.listening import listening_sockets
from headway_gateway.statuses import CallRefusedError
from plain_h2 import PlainH2, framed
from refusals import retry_after_s

MOST_BYTES = 4 << 20
BOUNDS = Bounds(most_streams=100, most_unread_s=30.0, most_request_s=30.0)


class Methods:
    """One method of each kind, and some that misbehave."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        self.num_written = 0
        self.num_taken = 0
        self.may_take = asyncio.Event()

    async def one(self, request: bytes, call: Call) -> bytes:
        call.set_trailing_metadata((("took", "no time"), ("bytes-bin", b"\0\xff")))
        return request

    async def many(self, request: bytes, call: Call) -> AsyncIterator[bytes]:
        await call.send_initial_metadata((("number", request.decode()),))
        for number in range(int(request)):
            yield b"%d" % number

    async def offered(self, request: bytes, call: Call) -> None:
        """A head without haste; then a message, if there is one, once it may be taken."""
        call.offer_initial_metadata((("number", "7"),))
        if not request:
            raise CallRefusedError(grpc.StatusCode.NOT_FOUND, "nothing")
        await self.may_take.wait()
        await call.write(request)

    async def written(self, request: bytes, call: Call) -> None:
        """Messages of so many bytes until nobody wants them."""
        while True:
            await call.write(bytes(int(request)))
            self.num_written += 1

    async def joined(self, requests: AsyncIterator[bytes], call: Call) -> bytes:
        await self.may_take.wait()
        found = []
        async for request in requests:
            self.num_taken += 1
            found.append(request)
        return b"+".join(found)

    async def echoed(self, requests: AsyncIterator[bytes], call: Call) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    async def endless(self, request: bytes, call: Call) -> bytes:
        try:
            await asyncio.sleep(60)
        finally:
            self.cancelled.set()
        return b""

    async def refusing(self, request: bytes, call: Call) -> bytes:
        if request == b"abort":
            await call.abort(grpc.StatusCode.NOT_FOUND, "100% “gone”", (("more", "of it"),))
        if request == b"fail":
            raise ValueError("a secret")
        raise CallRefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, "not now", retry_after_s=2.0)

    async def context(self, request: bytes, call: Call) -> bytes:
        remaining = call.time_remaining()
        seen = [f"{key}={value!r}" for key, value in call.invocation_metadata() if key.startswith("x-")]
        return f"{call.peer()} {'never' if remaining is None else round(remaining)} {' '.join(seen)}".encode()

    def handlers(self) -> dict[str, "grpc.RpcMethodHandler"]:
        kinds = {
            grpc.unary_unary_rpc_method_handler: (self.one, self.endless, self.refusing, self.context),
            grpc.unary_stream_rpc_method_handler: (self.many, self.offered, self.written),
            grpc.stream_unary_rpc_method_handler: (self.joined,),
            grpc.stream_stream_rpc_method_handler: (self.echoed,),
        }
        return {method.__name__: make(method) for make, methods in kinds.items() for method in methods}


class Served:
    """A server in this event loop."""

    def __init__(self, server: GrpcServer, methods: Methods, address: str) -> None:
        self.server = server
        self.methods = methods
        self.address = address


@asynccontextmanager
async def served(bounds: Bounds = BOUNDS, surroundings: Iterable[Surrounding] = ()) -> AsyncIterator[Served]:
    server, methods = GrpcServer(tuple(surroundings), bounds, most_message_bytes=MOST_BYTES), Methods()
    server.add_registered_method_handlers("test", methods.handlers())
    sockets = listening_sockets("address", "127.0.0.1:0", reuse_port=False)
    server.start(Entrance(sockets, pytest.fail))
    try:
        yield Served(server, methods, f"127.0.0.1:{sockets[0].getsockname()[1]}")
    finally:
        await server.stop(0)


def channel_to(on: Served, **options: int) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(on.address, tuple((f"grpc.{name}", value) for name, value in options.items()))


async def test_every_kind_of_method() -> None:
    async with served() as on, channel_to(on) as channel:
        call = channel.unary_unary("/test/one")(b"x")
        assert await call == b"x"
        assert {("took", "no time"), ("bytes-bin", b"\0\xff")} <= set(await call.trailing_metadata())
        many = channel.unary_stream("/test/many")(b"3")
        assert [message async for message in many] == [b"0", b"1", b"2"]
        assert ("number", "3") in tuple(await many.initial_metadata())
        on.methods.may_take.set()
        assert await channel.stream_unary("/test/joined")(iter([b"a", b"", b"c"])) == b"a++c"
        echoed = channel.stream_stream("/test/echoed")(iter([b"a", b"b"]))
        assert [message async for message in echoed] == [b"a", b"b"]
        assert [message async for message in channel.unary_stream("/test/many")(b"0")] == []


async def test_a_head_that_is_offered_comes_with_the_first_message_or_soon_without_one() -> None:
    async with served() as on, channel_to(on) as channel:
        offered = channel.unary_stream("/test/offered")
        late = offered(b"x")
        assert ("number", "7") in tuple(await late.initial_metadata())
        on.methods.may_take.set()
        assert [message async for message in late] == [b"x"]
        at_once = offered(b"y")
        assert [message async for message in at_once] == [b"y"]
        assert ("number", "7") in tuple(await at_once.initial_metadata())
    # grpcio forgets the head of a call that has ended when it looks at it.
    async with served() as on, PlainH2(on.address) as client:
        refused = await client.call("/test/offered", b"")
        assert (refused.headers["number"], refused.trailers["grpc-status"]) == ("7", "5")


async def test_what_a_handler_knows_of_its_call() -> None:
    async with served() as on, channel_to(on) as channel:
        ask = channel.unary_unary("/test/context")
        said = await ask(b"", timeout=77, metadata=(("x-a", "1"), ("x-b-bin", b"\0"), ("x-a", "2")))
        peer, remaining, *metadata = said.decode().split()
        assert peer.startswith("ipv4:127.0.0.1:")
        assert remaining in {"76", "77"}
        assert sorted(metadata) == ["x-a='1'", "x-a='2'", "x-b-bin=b'\\x00'"]
        assert (await ask(b"")).decode().split()[1] == "never"


async def test_how_a_call_ends() -> None:
    async with served() as on, channel_to(on) as channel:
        ask = channel.unary_unary("/test/refusing")
        with pytest.raises(grpc.aio.AioRpcError) as aborted:
            await ask(b"abort")
        assert (aborted.value.code(), aborted.value.details()) == (grpc.StatusCode.NOT_FOUND, "100% “gone”")
        assert ("more", "of it") in tuple(aborted.value.trailing_metadata() or ())
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(b"refuse")
        assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "not now")
        assert retry_after_s(refused.value) == 2
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await ask(b"fail")
        assert failed.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in (failed.value.details() or "")
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await channel.unary_unary("/test/nothing")(b"")
        assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_client_that_leaves_and_one_whose_time_is_up() -> None:
    async with served() as on, channel_to(on) as channel:
        ask = channel.unary_unary("/test/endless")
        call = ask(b"")
        await asyncio.sleep(0.1)
        call.cancel()
        async with asyncio.timeout(5):
            await on.methods.cancelled.wait()
        on.methods.cancelled.clear()
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await ask(b"", timeout=0.1)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(5):
            await on.methods.cancelled.wait()


async def test_a_deadline_holds_though_the_client_sleeps() -> None:
    async with served() as on, PlainH2(on.address) as client:
        answer = await client.call("/test/endless", b"", headers=[("grpc-timeout", "10m")])
        assert answer.status["grpc-status"] == str(grpc.StatusCode.DEADLINE_EXCEEDED.value[0])


@pytest.mark.parametrize("size", [0, 100_000, MOST_BYTES])
async def test_large_messages_both_ways(size: int) -> None:
    async with served() as on, channel_to(on, max_receive_message_length=-1) as channel:
        assert len(await channel.unary_unary("/test/one")(bytes(size))) == size
        with pytest.raises(grpc.aio.AioRpcError, match=f"allowed: at most {MOST_BYTES}") as refused:
            await channel.unary_unary("/test/one")(bytes(MOST_BYTES + 1))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_clients_that_compress(compression: grpc.Compression) -> None:
    async with served() as on, grpc.aio.insecure_channel(on.address, compression=compression) as channel:
        assert await channel.unary_unary("/test/one")(b"x" * 10_000) == b"x" * 10_000


async def test_many_calls_on_one_connection_and_more_than_are_allowed() -> None:
    async with served() as on, channel_to(on) as channel:
        ask = channel.unary_unary("/test/one")
        assert await asyncio.gather(*(ask(b"%d" % number) for number in range(1000))) == [
            b"%d" % number for number in range(1000)
        ]


async def test_a_stream_that_is_not_read_waits_and_disturbs_nobody() -> None:
    async with served() as on, PlainH2(on.address, reads=False) as client:
        stream = client.open("/test/written")
        client.send(stream, framed(b"10000"))
        await asyncio.sleep(0.3)
        written = on.methods.num_written
        window = 65_535
        assert written * 10_005 <= window + MOST_WAITING_BYTES + 10_005
        await asyncio.sleep(0.2)
        assert on.methods.num_written == written
        client.h2.increment_flow_control_window(100_000)
        client.h2.increment_flow_control_window(100_000, stream)
        client.flush()
        other = client.open("/test/one")
        client.send(other, framed(b"x"))
        assert (await client.answer(other)).messages == [b"x"]
        assert on.methods.num_written > written


async def test_requests_that_the_handler_does_not_take_wait_at_the_client() -> None:
    async with served() as on, PlainH2(on.address) as client:
        stream = client.open("/test/joined")
        num_sent = 0
        async with asyncio.timeout(10):
            while True:
                window = client.h2.local_flow_control_window(stream)
                if window < 10_000:
                    await asyncio.sleep(0.1)  # the server may have more room
                    if client.h2.local_flow_control_window(stream) == window:
                        break
                    continue
                client.send(stream, framed(bytes(9_000)), is_last=False)
                num_sent += 1
        assert 1 << 20 <= num_sent * 9_005 + 10_000 <= 3 << 20
        on.methods.may_take.set()
        await eventually(lambda: on.methods.num_taken == num_sent)
        client.send(stream, b"")
        assert len((await client.answer(stream)).messages[0]) == num_sent * 9_001 - 1


async def test_a_connection_that_is_not_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_MOST_UNSENT_BYTES", 1000)
    async with served(BOUNDS._replace(most_unread_s=0.3)) as on:
        with socket.create_connection(on.address.rsplit(":", 1)) as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.setblocking(False)
            client = PlainH2(on.address)
            client.h2.initiate_connection()
            client.h2.increment_flow_control_window(1 << 30)
            client.h2.send_headers(1, [(":method", "POST"), (":scheme", "http"), (":path", "/test/written"),
                                       (":authority", "x"), ("content-type", "application/grpc")])  # fmt: skip
            client.h2.increment_flow_control_window(1 << 30, 1)
            client.h2.send_data(1, framed(b"100000"), end_stream=True)
            await asyncio.get_running_loop().sock_sendall(deaf, client.h2.data_to_send())
            await eventually(lambda: on.methods.num_written > 0)
            await eventually(lambda: not on.server._connections)


async def test_a_client_without_a_sign_of_life_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_KEEPALIVE_S", 0.2)
    monkeypatch.setattr(connections, "_KEEPALIVE_TIMEOUT_S", 0.2)
    async with served() as on, PlainH2(on.address) as lively:
        with socket.create_connection(on.address.rsplit(":", 1)) as silent:
            silent.setblocking(False)
            await asyncio.sleep(1.0)
            loop = asyncio.get_running_loop()
            heard = b""
            while data := await loop.sock_recv(silent, 65536):
                heard += data
            assert heard.endswith(b"\x06\0\0\0\0\0" + bytes(8)), "a ping was the last"
        assert not lively.is_closed.is_set()
        assert (await lively.call("/test/one", b"x")).messages == [b"x"]


async def test_a_request_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_KEEPALIVE_S", 0.1)
    monkeypatch.setattr(connections, "_KEEPALIVE_TIMEOUT_S", 0.1)
    async with served(BOUNDS._replace(most_request_s=0.3)) as on, PlainH2(on.address) as client:
        slow = client.open("/test/one")
        client.send(slow, framed(b"xyz")[:4], is_last=False)
        running = client.open("/test/endless")
        client.send(running, framed(b""))
        assert (await client.answer(slow)).status["grpc-message"] == "the request did not come in time"
        assert not client.answers[running].is_over.is_set()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "the request has no message"),
        (framed(b"xyz")[:6], "the last message is cut short"),
        (framed(b"x", is_compressed=True), "a message is compressed, and the grpc-encoding names no compression"),
    ],
)
async def test_requests_that_are_no_message(data: bytes, words: str) -> None:
    async with served() as on, PlainH2(on.address) as client:
        stream = client.open("/test/one")
        client.send(stream, data)
        status = (await client.answer(stream)).status
        assert (status["grpc-status"], status["grpc-message"]) == ("13", words)


@pytest.mark.parametrize(
    ("headers", "http_status"), [({":method": "GET"}, "405"), ({"content-type": "text/plain"}, "415")]
)
async def test_what_is_not_grpc(headers: dict[str, str], http_status: str) -> None:
    async with served() as on, PlainH2(on.address) as client:
        answer = await client.call("/test/one", b"x", headers=headers.items())
        assert answer.headers[":status"] == http_status
        assert (await client.call("/test/one", b"x")).messages == [b"x"]


async def test_a_breach_is_told_and_ends_only_that_connection() -> None:
    async with served() as on, PlainH2(on.address) as good, PlainH2(on.address) as bad:
        bad.flush(b"\0\0\1\6\0\0\0\0\0x")
        async with asyncio.timeout(5):
            await bad.is_closed.wait()
        assert bad.goaway is not None
        assert bad.goaway.additional_data == b"a ping has 8 bytes"
        assert (await good.call("/test/one", b"x")).messages == [b"x"]


async def reset_streams(client: PlainH2, number: int) -> None:
    for _ in range(number):
        client.h2.reset_stream(client.open("/test/endless"))
        client.flush()
    await asyncio.sleep(0)


async def test_a_client_that_opens_and_resets_streams_without_end_is_let_go() -> None:
    async with served() as on, PlainH2(on.address) as good, PlainH2(on.address) as rapid:
        await reset_streams(rapid, 1500)
        await eventually(lambda: rapid.goaway is not None)
        assert rapid.goaway is not None
        assert rapid.goaway.error_code == ErrorCode.ENHANCE_YOUR_CALM
        assert (await good.call("/test/one", b"x")).messages == [b"x"]
        await eventually(lambda: len(on.server._connections) == 1)
        await eventually(lambda: not on.server._tasks)


async def test_a_client_that_resets_many_streams_in_the_course_of_time_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "_ALLOWANCE_S", 0.01)
    async with served() as on, PlainH2(on.address) as client:
        for _ in range(3):
            await reset_streams(client, 500)
            await asyncio.sleep(0.02)
            assert (await client.call("/test/one", b"x")).messages == [b"x"]


async def test_stopping_lets_calls_end_and_cancels_the_others() -> None:
    async with served() as on, channel_to(on) as channel:
        cancelled = channel.unary_unary("/test/endless")(b"")
        ended = channel.stream_unary("/test/joined")(iter([b"a", b"b"]))
        await asyncio.sleep(0.1)
        stopping = asyncio.create_task(on.server.stop(0.3))
        await asyncio.sleep(0.1)
        with pytest.raises(OSError):
            await asyncio.open_connection(*on.address.rsplit(":", 1))
        on.methods.may_take.set()
        assert await ended == b"a+b"
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await cancelled
        assert refusal.value.code() is grpc.StatusCode.CANCELLED
        await stopping
        assert not on.server._connections


async def test_surroundings_stand_around_a_method_in_their_order() -> None:
    seen: list[str] = []

    def named(name: str) -> Surrounding:
        def around(behaviour, method):
            async def serve(call: Call) -> None:
                seen.append(f"{name} {method}")
                await behaviour(call)
                seen.append(f"{name} ends")

            return serve

        return around

    async with served(surroundings=(named("outer"), named("inner"))) as on, channel_to(on) as channel:
        await channel.unary_unary("/test/one")(b"x")
    assert seen == ["outer /test/one", "inner /test/one", "inner ends", "outer ends"]
