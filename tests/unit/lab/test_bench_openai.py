"""The bench against OpenAI-compatible servers: what they stream, and every way in which they fail."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from headway_lab.bench.event_stream import EventStreamParser
from headway_lab.bench.openai_target import OpenAITarget
from headway_lab.bench.records import Answer, RequestFailed
from headway_lab.bench.target import TargetError
from headway_lab.bench.words import WORDS, WordSource
from headway_lab.workload.requests import PRIORITIES, PlannedRequest

TOKENS_PER_WORD = 1.25
TEMPLATE_TOKENS = 11


def event(document):
    return f"data: {json.dumps(document)}\n\n".encode()


class Server:
    """A small OpenAI-compatible server. ``misbehave`` is called in the middle of each answer."""

    def __init__(self, *, has_usage=True, tokens_per_chunk=1, misbehave=None, lists_models=True):
        self.bodies = []
        self._has_usage = has_usage
        self._tokens_per_chunk = tokens_per_chunk
        self._lists_models = lists_models
        self.misbehave = misbehave

    async def models(self, request):
        if not self._lists_models:
            return web.Response(status=404)
        return web.json_response({"data": [{"id": "small", "max_model_len": 2048, "object": "model"}]})

    async def answer(self, request):
        body = await request.json()
        self.bodies.append((request.headers.get("Authorization"), body))
        is_calibration = body["max_tokens"] == 1
        if self.misbehave == "429" and not is_calibration:
            return web.Response(status=429, text="slow\ndown")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        is_chat = "messages" in body
        text = body["messages"][0]["content"] if is_chat else body["prompt"]
        if is_chat:
            await response.write(event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
        for number in range(body["max_tokens"]):
            last = number == body["max_tokens"] - 1
            if number == 2 and await self._misbehave(request, response):
                return response
            word = {"delta": {"content": "w"}} if is_chat else {"text": "w"}
            await response.write(event({"choices": [{**word, "finish_reason": "length" if last else None}]}))
        if self._has_usage:
            usage = {
                "prompt_tokens": round(len(text.split()) * TOKENS_PER_WORD) + TEMPLATE_TOKENS,
                "completion_tokens": body["max_tokens"] * self._tokens_per_chunk,
            }
            await response.write(event({"choices": [], "usage": usage}))
        await response.write(b": a comment\n\ndata: [DONE]\n\n")
        return response

    async def _misbehave(self, request, response):
        match self.misbehave:
            case "malformed":
                await response.write(b"data: {not json\n\n")
            case "error":
                await response.write(event({"error": {"message": "out of memory", "code": 500}}))
            case "disconnect":
                request.transport.abort()
            case "cut":
                return True
            case "hang":
                await asyncio.sleep(60)
            case _:
                return False
        return True


@asynccontextmanager
async def serving(server):
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.answer)
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def target_at(url, **changes):
    options = {"is_chat": False, "model": "", "token": "", "tls": None, "fields": {}, "seed": 0, **changes}
    return OpenAITarget(url, **options)


@asynccontextmanager
async def opened(server, **changes):
    async with serving(server) as url:
        target = target_at(url, **changes)
        info = await target.open()
        try:
            yield target, info
        finally:
            await target.close()


def planned(**fields):
    return PlannedRequest(**{"number": 7, "num_prompt_tokens": 100, "num_output_tokens": 6, **fields})


async def answered(target, request):
    answer = Answer(asyncio.get_running_loop().time)
    await target.send(target.prepare(request), answer)
    return answer


@pytest.mark.parametrize("is_chat", [False, True])
async def test_an_answer_is_counted_by_usage_and_prompts_have_the_length_asked_for(is_chat):
    server = Server()
    async with opened(server, is_chat=is_chat, token="secret", fields={"ignore_eos": True, "top_k": 3}) as (
        target,
        info,
    ):
        answer = await answered(target, planned(tenant="t", priority=PRIORITIES["high"]))
    assert (info.model, info.context_length, info.counted_by) == ("small", 2048, "usage")
    assert answer.chunk_tokens == [1] * 6
    assert answer.chunk_times_s == sorted(answer.chunk_times_s)
    assert answer.num_output_tokens == 6
    assert answer.num_prompt_tokens == pytest.approx(100 + TEMPLATE_TOKENS, abs=2)
    authorization, body = server.bodies[-1]
    assert authorization == "Bearer secret"
    assert body["stream_options"] == {"include_usage": True}
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["top_k"]) == ("small", 6, True, 3)
    assert (body["user"], body["priority"]) == ("t", -1)


async def test_a_server_without_usage_is_counted_by_chunks():
    async with opened(Server(has_usage=False)) as (target, info):
        answer = await answered(target, planned())
    assert info.counted_by == "chunks"
    assert answer.num_output_tokens is None
    assert sum(answer.chunk_tokens) == 6


async def test_chunks_of_several_tokens_are_seen_by_usage():
    async with opened(Server(tokens_per_chunk=3)) as (target, _):
        answer = await answered(target, planned())
    assert (sum(answer.chunk_tokens), answer.num_output_tokens) == (6, 18)


@pytest.mark.parametrize(
    ("misbehave", "status", "message"),
    [
        ("429", "HTTP 429", "slow down"),
        ("malformed", "MALFORMED", "{not json"),
        ("error", "STREAM_ERROR", "out of memory"),
        ("disconnect", "DISCONNECTED", ""),
        ("cut", "CUT_SHORT", "ended before"),
    ],
)
async def test_failures_have_a_status(misbehave, status, message):
    server = Server()
    async with opened(server) as (target, _):
        server.misbehave = misbehave
        with pytest.raises(RequestFailed) as failure:
            await answered(target, planned())
    assert failure.value.status == status
    assert message in failure.value.message
    assert "\n" not in failure.value.message


async def test_an_answer_that_hangs_can_be_given_up():
    server = Server()
    async with opened(server) as (target, _):
        server.misbehave = "hang"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await answered(target, planned())


async def test_nobody_there_is_one_line(unused_tcp_port):
    target = target_at(f"http://127.0.0.1:{unused_tcp_port}/v1")
    with pytest.raises(TargetError, match=r"^http://127.0.0.1:\d+/v1: .*Cannot connect") as failure:
        await target.open()
    assert "\n" not in str(failure.value)


async def test_a_server_that_lists_no_models_wants_one_named():
    async with serving(Server(lists_models=False)) as url:
        with pytest.raises(TargetError, match="name one with --model"):
            await target_at(url).open()
        named = target_at(url, model="mine")
        info = await named.open()
        await named.close()
    assert info.model == "mine"


def test_the_words_of_a_prompt_depend_on_the_seed_and_prefixes_are_shared():
    source = WordSource(0, 1.0)
    first, second = (
        source.prompt(planned(number=number, num_prefix_tokens=20, prefix=1, num_prompt_tokens=50)).split()
        for number in (1, 2)
    )
    assert len(first) == len(second) == 50
    assert first[:20] == second[:20]
    assert first[20:] != second[20:]
    assert set(first) <= set(WORDS)
    assert len(WordSource(0, 2.0).prompt(planned()).split()) == 50


EVENTS = st.lists(st.lists(st.binary(max_size=6).filter(lambda data: not set(data) & {10, 13}), min_size=1, max_size=2))


@given(EVENTS, st.sampled_from([b"\n", b"\r\n", b"\r"]), st.data())
def test_events_are_found_however_the_bytes_are_cut(events, line_end, data):
    sent = b"".join(b"".join(b"data: " + line + line_end for line in lines) + line_end for lines in events)
    sent += b"event: end" + line_end
    parser, found, place = EventStreamParser(), [], 0
    while place < len(sent):
        size = data.draw(st.integers(1, len(sent) - place))
        found += parser.feed(sent[place : place + size])
        place += size
    assert found == [b"\n".join(lines) for lines in events]
