"""The Python client against a scripted server: what it sends, what it makes of the answers, how it takes up a stream."""

import asyncio
import inspect
import json
import math
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

import headway
from headway.client import (
    DEFAULT_RETRY_S,
    AsyncClient,
    Client,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    ServerError,
    StreamCancelledError,
    UnavailableError,
)
from headway.client import generation as generation_module
from headway.client.requests import generate_request
from headway_gateway.statuses import CallRefusedError
from headway_proto import generation_pb2 as api
from headway_proto import generation_pb2_grpc as api_grpc

TOKENS = list(range(100, 110))


class ScriptedServer(api_grpc.GenerationServicer):
    """Each call of Generate runs the next of ``scripts``; the last one serves all further calls."""

    def __init__(self, *scripts: Callable[[api.GenerateRequest, grpc.ServicerContext], Iterator]) -> None:
        self.scripts = list(scripts)
        self.requests: list[api.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []

    def Generate(self, request, context):  # noqa: N802
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        yield from script(request, context)

    def GetModel(self, request, context):  # noqa: N802
        context.abort(grpc.StatusCode.UNAVAILABLE, "the model is still loading")


def accepted(request: api.GenerateRequest) -> api.GenerateResponse:
    seed = request.resume.seed if request.HasField("resume") else 77
    return api.GenerateResponse(accepted=api.Accepted(request_id="r", prompt_tokens=2, seeds=[seed] * 2))


def delta(first: int, ids: list[int], index: int = 0) -> api.GenerateResponse:
    text = "".join(f"<{token}>" for token in ids)
    return api.GenerateResponse(delta=api.Delta(index=index, text=text, token_ids=ids, first_token_index=first))


def finished(index: int = 0) -> api.GenerateResponse:
    return api.GenerateResponse(
        finished=api.Finished(index=index, reason=api.FINISH_REASON_LENGTH, usage=api.Usage(output_tokens=10))
    )


def whole(request, context):
    held = len(request.resume.token_ids)
    yield accepted(request)
    yield delta(held, TOKENS[held:])
    yield finished()


def breaks_after(count: int):
    def script(request, context):
        held = len(request.resume.token_ids)
        yield accepted(request)
        for place in range(held, held + count):
            yield delta(place, TOKENS[place : place + 1])
        context.abort(grpc.StatusCode.UNAVAILABLE, "going away")

    return script


def breaks_unheard(request, context):
    """As a connection that ends: no gateway says why."""
    context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
    yield


def refuses(code: grpc.StatusCode, message: str, **details):
    def script(request, context):
        refusal = CallRefusedError(code, message, **details)
        context.set_trailing_metadata(refusal.trailing_metadata())
        context.abort(code, message)
        yield

    return script


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(generation_module, "_FIRST_RESUME_DELAY_S", 0.001)
    monkeypatch.setattr(generation_module, "_LONGEST_RESUME_DELAY_S", 0.002)


class Servers:
    """Call it with scripts to start another server."""

    def __init__(self) -> None:
        self._running: list[grpc.Server] = []

    def __call__(self, *scripts, address: str = "127.0.0.1:0") -> tuple[ScriptedServer, str]:
        servicer = ScriptedServer(*scripts)
        server = grpc.server(ThreadPoolExecutor(4))
        api_grpc.add_GenerationServicer_to_server(servicer, server)
        port = server.add_insecure_port(address)
        server.start()
        self._running.append(server)
        return servicer, f"127.0.0.1:{port}"

    def stop(self) -> None:
        while self._running:
            self._running.pop().stop(0).wait(5)


@pytest.fixture
def serve():
    servers = Servers()
    yield servers
    servers.stop()


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_headway_is_cheap_and_the_client_needs_only_grpc():
    out = run_python("import sys, headway; print(sorted({'grpc', 'numpy', 'google.protobuf'} & set(sys.modules)))")
    assert out.strip() == "[]"
    heavy = (
        "{'torch', 'zmq', 'tokenizers', 'jinja2', 'numpy', 'headway_gateway', 'headway_scheduler', 'headway_executor'}"
    )
    out = run_python(f"import sys; from headway import Client, AsyncClient; print(sorted({heavy} & set(sys.modules)))")
    assert out.strip() == "[]"


def test_the_package_offers_the_clients_and_nothing_else():
    assert headway.Client is Client
    assert headway.AsyncClient is AsyncClient
    with pytest.raises(AttributeError, match="no attribute 'Server'"):
        _ = headway.Server


def test_both_clients_offer_the_same_calls():
    assert public_names(Client) == public_names(AsyncClient)
    assert "set_executor_role" in public_names(Client)


def public_names(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_deltas_and_result(serve):
    servicer, address = serve(whole)
    with Client(address, token="s3cret") as client:
        stream = client.generate("x")
        assert [part.token_ids for part in stream] == [tuple(TOKENS)]
        result = stream.result()
    assert result.text == "".join(f"<{token}>" for token in TOKENS)
    assert (result.token_ids, result.seeds, result.prompt_tokens) == (TOKENS, (77, 77), 2)
    assert (result.completions[0].finish_reason, result.completions[0].usage.output_tokens) == ("length", 10)
    assert stream.request_id == "r"
    assert servicer.metadata[0]["authorization"] == "Bearer s3cret"


def test_options_become_the_request(serve):
    servicer, address = serve(whole)
    with Client(address) as client:
        client.generate(
            [1, 2], max_tokens=5, temperature=0.0, top_k=-1, stop="END", logit_bias={3: -1.0}, stop_token_ids=[4],
            ignore_eos=True, seed=9, request_id="mine", priority="high", tenant="t", ttft_slo_ms=5, model="demo",
        ).result()  # fmt: skip
        client.generate([{"role": "user", "content": "hi"}]).result()
    sampling = api.SamplingParams(
        max_tokens=5, temperature=0.0, top_k=-1, stop=["END"], logit_bias=[api.LogitBias(token_id=3, bias=-1.0)],
        stop_token_ids=[4], ignore_eos=True, seed=9,
    )  # fmt: skip
    assert servicer.requests[0] == api.GenerateRequest(
        token_ids=api.TokenIds(ids=[1, 2]), sampling=sampling, request_id="mine", priority=api.PRIORITY_HIGH,
        tenant="t", ttft_slo_ms=5, model="demo",
    )  # fmt: skip
    assert servicer.requests[1].chat.messages[0] == api.ChatMessage(role="user", content="hi")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": 1 << 64}, "seed: 18446744073709551616 is not allowed .*out of range"),
        ({"max_tokens": -1}, "max_tokens: -1 is not allowed .*out of range"),
        ({"logprobs": -1}, "logprobs: -1 is not allowed .*out of range"),
        ({"temperature": "hot"}, "temperature: 'hot' is not allowed "),
        ({"echo": "yes"}, "echo: 'yes' is not allowed "),
        ({"priority": "urgent"}, "priority: 'urgent' is not allowed; allowed: realtime, high, normal, low"),
    ],
)
def test_values_that_no_message_can_carry(serve, options, words):
    servicer, address = serve(whole)
    with Client(address) as client, pytest.raises(InvalidRequestError, match=words):
        client.generate("x", **options)
    assert not servicer.requests


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda client: client.drain_executor(-1), "executor: -1 is not allowed .*out of range"),
        (lambda client: client.set_executor_role(1 << 40, "both"), "executor: 1099511627776 is not allowed"),
        (lambda client: client.pinned_prefixes(executor=1.5), "executor: 1.5 is not allowed"),
        (lambda client: client.cancel("\ud800"), "request_id: .* is not allowed .*surrogates"),
        (lambda client: client.pin_prefix("\ud800", "x"), "name: .* is not allowed .*surrogates"),
    ],
)
def test_calls_of_operators_that_no_message_can_carry(call, words):
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequestError, match=words):
        call(client)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"json_schema": {"type": "integer"}}, api.SamplingParams(json_schema='{"type": "integer"}')),
        ({"json_schema": '{"type":"null"}'}, api.SamplingParams(json_schema='{"type":"null"}')),
        ({"json_schema": True}, api.SamplingParams(json_schema="true")),
        ({"json_object": True}, api.SamplingParams(json_object=True)),
        ({"regex": "a+"}, api.SamplingParams(regex="a+")),
        ({"grammar": 'root ::= "a"'}, api.SamplingParams(grammar='root ::= "a"')),
        ({"choice": ["a", "b"]}, api.SamplingParams(choice=api.Choice(choices=["a", "b"]))),
    ],
)
def test_what_the_output_must_be_is_sent(options, expected):
    assert generate_request("x", options).sampling == expected


def test_two_constraints_are_refused_before_anything_is_sent():
    with pytest.raises(InvalidRequestError, match="json_object: not allowed together with json_schema; allowed: one"):
        generate_request("x", {"json_schema": {}, "json_object": True})


def test_unknown_options_and_lone_surrogates():
    with Client("127.0.0.1:1") as client:
        with pytest.raises(TypeError, match="no option 'max_token'"):
            client.generate("x", max_token=3)
        with pytest.raises(
            InvalidRequestError, match=r"'\\ud800' is not Unicode; allowed: text without lone surrogates"
        ):
            client.generate("\ud800")


BOTH = pytest.mark.parametrize("kind", ["sync", "async"])


def completions_from(kind: str, address: str, **options: object) -> tuple[headway.client.Completion, ...]:
    """The completions of a generation, by either client."""
    if kind == "sync":
        with Client(address) as client:
            return client.generate("x", **options).result().completions

    async def generate() -> tuple[headway.client.Completion, ...]:
        async with AsyncClient(address) as client:
            return (await client.generate("x", **options).result()).completions

    return asyncio.run(generate())


def test_a_broken_stream_is_taken_up_behind_the_last_token(serve):
    servicer, address = serve(breaks_after(3), breaks_after(0), breaks_after(4), whole)
    with Client(address) as client:
        stream = client.generate("x", max_tokens=10)
        deltas = list(stream)
    assert [token for part in deltas for token in part.token_ids] == TOKENS
    assert "".join(part.text for part in deltas) == stream.text() == "".join(f"<{token}>" for token in TOKENS)
    assert [list(request.resume.token_ids) for request in servicer.requests] == [[], TOKENS[:3], TOKENS[:3], TOKENS[:7]]
    assert [request.resume.seed for request in servicer.requests[1:]] == [77] * 3
    assert not servicer.requests[0].HasField("resume")


async def test_the_async_client_does_the_same(serve):
    servicer, address = serve(breaks_after(3), whole)
    async with AsyncClient(address) as client:
        stream = client.generate("x", max_tokens=10)
        deltas = [part async for part in stream]
        assert [token for part in deltas for token in part.token_ids] == TOKENS
        assert await stream.text() == "".join(f"<{token}>" for token in TOKENS)
    assert [list(request.resume.token_ids) for request in servicer.requests] == [[], TOKENS[:3]]


def breaks_between_two_ends(request, context):
    yield accepted(request)
    yield delta(0, TOKENS[:3])
    yield finished(0)
    yield delta(0, TOKENS[:2], index=1)
    context.abort(grpc.StatusCode.UNAVAILABLE, "going away")


def goes_on_with_the_second(request, context):
    yield accepted(request)
    yield api.GenerateResponse(delta=api.Delta(index=0, text="what was held back", first_token_index=3))
    yield api.GenerateResponse(finished=api.Finished(index=0, reason=api.FINISH_REASON_STOP))
    yield delta(2, TOKENS[2:], index=1)
    yield finished(1)


@BOTH
def test_each_continuation_is_taken_up_and_none_that_has_ended(serve, kind):
    servicer, address = serve(breaks_between_two_ends, goes_on_with_the_second)
    first, second = completions_from(kind, address, n=2)
    assert (first.token_ids, first.finish_reason, second.token_ids) == (TOKENS[:3], "length", TOKENS)
    assert [one.text for one in (first, second)] == [
        "".join(f"<{token}>" for token in one.token_ids) for one in (first, second)
    ]
    resume = servicer.requests[1].resume
    assert (list(resume.token_ids), [list(other.ids) for other in resume.others]) == (TOKENS[:3], [TOKENS[:2]])
    assert resume.seed == 77


def breaks_among_the_best(request, context):
    yield accepted(request)
    yield delta(0, TOKENS[:3])
    yield finished(0)
    yield delta(0, TOKENS, index=1)
    context.abort(grpc.StatusCode.UNAVAILABLE, "going away")


def all_the_best(request, context):
    yield accepted(request)
    for index, ids in enumerate((TOKENS[:3], TOKENS)):
        yield delta(0, ids, index=index)
        yield finished(index)


@BOTH
def test_the_best_of_several_come_once_whatever_breaks(serve, kind):
    servicer, address = serve(breaks_after(0), breaks_among_the_best, all_the_best)
    first, second = completions_from(kind, address, n=2, best_of=3)
    assert (first.token_ids, second.token_ids, second.finish_reason) == (TOKENS[:3], TOKENS, "length")
    for request in servicer.requests[1:]:
        assert (request.resume.seed, list(request.resume.token_ids), list(request.resume.others)) == (77, [], [])


def piece(first: int, ids: list[int]) -> api.GenerateResponse:
    entries = [api.TokenLogprob(token_id=token, logprob=-0.5) for token in ids[first == 0 :]]
    prompt = api.Prompt(first_token_index=first, token_ids=ids, logprobs=entries, text="p" if first == 0 else "")
    return api.GenerateResponse(prompt=prompt)


def breaks_in_the_prompt(request, context):
    yield accepted(request)
    yield piece(0, [7, 8])
    context.abort(grpc.StatusCode.UNAVAILABLE, "going away")


def breaks_behind_the_prompt(request, context):
    yield accepted(request)
    yield piece(0, [7, 8])
    yield piece(2, [9])
    yield delta(0, TOKENS[:2])
    context.abort(grpc.StatusCode.UNAVAILABLE, "going away")


def test_a_prompt_is_told_once_whatever_breaks(serve):
    servicer, address = serve(breaks_in_the_prompt, breaks_behind_the_prompt, whole)
    with Client(address) as client:
        result = client.generate("x", prompt_logprobs=1, echo=True).result()
    assert (result.prompt.token_ids, result.prompt.text, result.token_ids) == ([7, 8, 9], "p", TOKENS)
    assert [entry.token_id for entry in result.prompt.logprobs] == [8, 9]
    asked = [(request.sampling.HasField("prompt_logprobs"), request.echo) for request in servicer.requests]
    assert asked == [(True, True), (True, True), (False, False)]


def tokens_from(kind: str, address: str, retry_s: float, meanwhile: Callable[[], object] | None = None) -> list[int]:
    """The tokens of a generation, by either client; with ``meanwhile``, called after another that heard from a gateway."""
    if kind == "sync":
        with Client(address, retry_s=retry_s) as client:
            if meanwhile is not None:
                client.generate("first").text()
                meanwhile()
            return client.generate("x").result().token_ids

    async def generate() -> list[int]:
        async with AsyncClient(address, retry_s=retry_s) as client:
            if meanwhile is not None:
                await client.generate("first").text()
                meanwhile()
            return (await client.generate("x").result()).token_ids

    return asyncio.run(generate())


@BOTH
def test_how_long_a_stream_is_taken_up_again_is_a_setting(serve, kind):
    servicer, address = serve(breaks_after(2), breaks_after(0))
    began_at = time.monotonic()
    with pytest.raises(UnavailableError, match="going away"):
        tokens_from(kind, address, 0.3)
    assert 0.3 <= time.monotonic() - began_at < 3.0
    assert len(servicer.requests) > 10
    servicer, address = serve(breaks_after(2), whole)
    with pytest.raises(UnavailableError, match="going away"):
        tokens_from(kind, address, 0.0)
    assert len(servicer.requests) == 1


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_thirty_seconds_are_tried_unless_told_otherwise(client):
    assert inspect.signature(client).parameters["retry_s"].default == DEFAULT_RETRY_S == 30.0


@BOTH
def test_a_request_that_reached_no_gateway_is_sent_again(serve, kind):
    """As while the workers of a gateway start anew: nobody listens, or the listener goes before it has accepted."""
    servicer, address = serve(whole, breaks_unheard, breaks_unheard, whole)
    assert tokens_from(kind, address, 5.0, list) == TOKENS
    assert len(servicer.requests) == 4
    assert not any(request.HasField("resume") for request in servicer.requests)


@BOTH
def test_who_heard_a_gateway_waits_for_it_and_who_did_not_is_told_at_once(serve, kind):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=rf"^UNAVAILABLE: no server at {nobody} \(Connection refused\)$"):
            tokens_from(kind, nobody, 30.0)
    _, address = serve(whole)
    again: list[threading.Timer] = []

    def restart() -> None:
        serve.stop()
        again.append(threading.Timer(0.5, serve, (whole,), {"address": address}))
        again[0].start()

    assert tokens_from(kind, address, 30.0, restart) == TOKENS
    again[0].join()


@BOTH
def test_what_a_gateway_refuses_is_refused_at_once(serve, kind):
    servicer, address = serve(whole, refuses(grpc.StatusCode.UNAVAILABLE, "draining", reason="draining"))
    with pytest.raises(UnavailableError, match="draining") as refused:
        tokens_from(kind, address, 30.0, list)
    assert refused.value.reason == "draining"
    assert len(servicer.requests) == 2


@BOTH
def test_a_gateway_that_is_full_of_those_who_come_back_is_asked_again_when_it_says(serve, kind):
    full = refuses(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after_s=0.4)
    servicer, address = serve(breaks_after(2), breaks_unheard, full, whole)
    began_at = time.monotonic()
    assert tokens_from(kind, address, 5.0) == TOKENS
    assert time.monotonic() - began_at >= 0.4
    assert len(servicer.requests) == 4


def test_who_cancels_while_a_gateway_is_away_sends_nothing_more(serve, monkeypatch):
    monkeypatch.setattr(generation_module, "_FIRST_RESUME_DELAY_S", 0.5)
    monkeypatch.setattr(generation_module, "_LONGEST_RESUME_DELAY_S", 0.5)
    servicer, address = serve(breaks_after(1), whole)
    with Client(address) as client:
        stream = client.generate("x")
        next(stream)
        canceller = threading.Timer(0.2, stream.cancel)
        canceller.start()
        with pytest.raises(StreamCancelledError):
            next(stream)
        canceller.join()
    assert len(servicer.requests) == 1


def test_who_cancels_while_the_stream_is_taken_up_again_gets_no_more_of_it(serve, monkeypatch):
    _, address = serve(breaks_after(1), whole)
    with Client(address) as client:
        stream = client.generate("x")
        next(stream)
        connection = stream._connection
        take_up = connection.open_stream

        def cancelled_meanwhile(generation: object) -> object:
            call = take_up(generation)
            stream.cancel()  # of another thread: it knows the broken call alone
            return call

        monkeypatch.setattr(connection, "open_stream", cancelled_meanwhile)
        with pytest.raises(StreamCancelledError):
            next(stream)


async def test_who_cancels_the_async_stream_meanwhile_sends_nothing_more_either(serve, monkeypatch):
    monkeypatch.setattr(generation_module, "_FIRST_RESUME_DELAY_S", 0.5)
    monkeypatch.setattr(generation_module, "_LONGEST_RESUME_DELAY_S", 0.5)
    servicer, address = serve(breaks_after(1), whole)
    async with AsyncClient(address) as client:
        stream = client.generate("x")
        await anext(stream)
        asyncio.get_running_loop().call_later(0.2, stream.cancel)
        with pytest.raises(StreamCancelledError):
            await anext(stream)
    assert len(servicer.requests) == 1


@pytest.mark.parametrize("retry_s", [-1, float("nan")])
def test_a_time_that_is_none_is_refused(retry_s):
    with pytest.raises(ValueError, match=f"retry_s: {retry_s} is not allowed; allowed: 0 or more seconds"):
        Client("127.0.0.1:1", retry_s=retry_s)


def test_the_ghost_of_the_old_stream_is_waited_out(serve):
    ghost = refuses(grpc.StatusCode.ALREADY_EXISTS, "live")
    servicer, address = serve(breaks_after(2), ghost, ghost, whole)
    with Client(address) as client:
        assert client.generate("x", request_id="mine").result().token_ids == TOKENS
    assert len(servicer.requests) == 4


def test_what_was_never_accepted_is_not_resumed(serve):
    servicer, address = serve(refuses(grpc.StatusCode.UNAVAILABLE, "draining"))
    with Client(address) as client, pytest.raises(UnavailableError, match="draining"):
        client.generate("x").result()
    assert len(servicer.requests) == 1


def test_an_output_that_comes_again_is_no_progress(serve):
    servicer, address = serve(breaks_among_the_best)
    began_at = time.monotonic()
    with Client(address, retry_s=0.3) as client, pytest.raises(UnavailableError, match="going away"):
        client.generate("x", n=2, best_of=3).result()
    assert 0.3 <= time.monotonic() - began_at < 3.0
    assert len(servicer.requests) > 10


def test_resuming_ends_with_the_time_given(serve, monkeypatch):
    monkeypatch.setattr(generation_module, "_FIRST_RESUME_DELAY_S", 0.2)
    monkeypatch.setattr(generation_module, "_LONGEST_RESUME_DELAY_S", 0.2)
    _, address = serve(breaks_after(1), breaks_after(0))
    with Client(address) as client, pytest.raises((DeadlineError, UnavailableError)):
        client.generate("x", timeout_s=0.3).result()


def test_a_time_without_an_end_is_no_time_that_has_passed(serve):
    _, address = serve(whole, whole)
    with Client(address) as client:
        for endless in (math.inf, 1e300):
            assert client.generate("x", timeout_s=endless).text()
        for wrong in (math.nan, "3"):
            refusal = f"timeout_s: '?{wrong}'? is not allowed; allowed: seconds"
            for call in (client.generate, client.embed):
                with pytest.raises(InvalidRequestError, match=refusal):
                    call("x", timeout_s=wrong)
            with pytest.raises(InvalidRequestError, match=refusal):
                client.wait_ready(wrong)


def test_details_of_refusals_are_read(serve):
    script = refuses(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after_s=1.5)
    _, address = serve(script)
    with Client(address) as client, pytest.raises(OverloadedError, match="RESOURCE_EXHAUSTED: full") as refusal:
        client.generate("x").result()
    assert refusal.value.retry_after_s == 1.5
    _, address = serve(refuses(grpc.StatusCode.INVALID_ARGUMENT, "bad", violations=[("sampling.top_p", "too big")]))
    with Client(address) as client, pytest.raises(InvalidRequestError) as refusal:
        client.generate("x").result()
    assert refusal.value.violations == (("sampling.top_p", "too big"),)


def test_errors_of_plain_calls_and_of_absent_servers(serve):
    _, address = serve(refuses(grpc.StatusCode.DATA_LOSS, "odd"))
    with Client(address) as client:
        with pytest.raises(UnavailableError, match="the model is still loading"):
            client.model()
        with pytest.raises(ServerError, match="DATA_LOSS: odd"):
            client.generate("x").result()
        with pytest.raises(ServerError, match="UNIMPLEMENTED"):
            client.status()
        with pytest.raises(UnavailableError, match=r"not ready within 0\.3 s"):
            client.wait_ready(0.3)


def test_cancel_ends_the_stream(serve):
    left = threading.Event()

    def endless(request, context):
        context.add_callback(left.set)
        yield accepted(request)
        yield delta(0, TOKENS[:1])
        left.wait(10)

    _, address = serve(endless)
    with Client(address) as client:
        with client.generate("x") as stream:
            next(stream)
        assert left.wait(5)
        with pytest.raises(StreamCancelledError):
            stream.result()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"poolin": "mean"}, TypeError, "has no option 'poolin'"),
        ({"pooling": "max"}, InvalidRequestError, "pooling: 'max' is not allowed; allowed: last, mean, cls"),
        ({"priority": "urgent"}, InvalidRequestError, "priority: 'urgent' is not allowed; allowed: realtime"),
        ({"dimensions": -1}, InvalidRequestError, "-1"),
        ({"normalize": "yes"}, InvalidRequestError, "normalize: "),
    ],
)
def test_an_option_of_embed_that_does_not_fit_is_refused_here(
    options: dict[str, object], error: type[Exception], words: str
) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(error, match=words):
        client.embed(["x"], **options)


def test_a_chats_options_and_all_keys_of_its_messages_are_sent():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    options = {"tools": tools, "chat_template_kwargs": {"thinking": False}, "continue_final_message": True}
    chat = generate_request(messages, options).chat
    assert json.loads(chat.tools) == tools
    assert json.loads(chat.variables) == {"thinking": False}
    assert chat.continue_final_message
    assert not chat.HasField("add_generation_prompt")
    assert [json.loads(one.more or "{}") for one in chat.messages] == [{}, {"tool_calls": [call]}]
    assert generate_request(messages, {"add_generation_prompt": False}).chat.HasField("add_generation_prompt")


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("x", {"tools": []}, "tools: not allowed with a prompt that is no chat; allowed: with a list of messages"),
        ([1], {"continue_final_message": False}, "continue_final_message: not allowed with a prompt that is no chat"),
        (
            [{"role": "user", "content": "x"}],
            {"tools": [{1}]},
            r"tools: \[\{1\}\] is not allowed \(Object of type set is not",
        ),
        (
            [{"role": "user", "content": "x"}],
            {"add_generation_prompt": "no"},
            "add_generation_prompt: 'no' is not allowed",
        ),
        ([{"role": "user"}], {}, r"messages\[0\].content: it is missing; allowed: a text"),
        (
            [{"role": "user", "content": "x"}, {"content": "x"}],
            {},
            r"messages\[1\].role: it is missing; allowed: a text",
        ),
    ],
)
def test_what_a_chat_cannot_have_is_named(prompt, options, message):
    with pytest.raises(InvalidRequestError, match=message):
        generate_request(prompt, options)


def test_parts_of_a_message_reach_the_server_as_they_are():
    parts = [{"type": "text", "text": "what is"}, {"type": "image_url", "image_url": {"url": "x"}}]
    request = generate_request([{"role": "user", "content": parts}, {"role": "assistant", "content": "a"}], {})
    first, second = request.chat.messages
    assert (first.content, json.loads(first.more)) == ("", {"content": parts})
    assert (second.content, second.more) == ("a", "")
