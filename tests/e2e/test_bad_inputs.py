"""Every kind of bad input to a live server: which status, which words, and a neighbour's stream that does not notice."""

import asyncio
import math
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import grpc
import pytest

import headway
from headway.client import AsyncClient
from headway_executor.backend import BackendConfig
from headway_executor.backends.simulated import SimulatedBackend
from headway_proto import admin_pb2, admin_pb2_grpc
from headway_proto import generation_pb2 as api
from headway_proto import generation_pb2_grpc as api_grpc
from headway_scheduler.core.state.limits import SchedulerLimits
from refusals import retry_after_s
from threaded_headway import RunningHeadway, running

DEMO = Path(headway.__file__).parent / "demo_model"
TEMPLATE = """{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
{{ m.content }}{{ undefined_thing.x if m.role == 'developer' }}{% endfor %}"""
TOKENS = "ops generate,admin opss\nalice generate alices tenant=blue\nwatcher admin watchers\n"
# Steps of 2 ms. A pool that does not hold one whole request is refused when the executor starts.
CONFIG = BackendConfig(
    model=str(DEMO), block_size=16, num_kv_blocks=100, max_num_seqs=8, options={"step_base_us": "2000"}
)
CONTEXT = 1024
MAX_STREAMS = 6
NEIGHBOUR = {"prompt": [3, 4, 5], "seed": 11, "max_tokens": 30, "ignore_eos": True, "temperature": 1.0}

INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
DENIED = grpc.StatusCode.PERMISSION_DENIED


def bearing(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


class Caller:
    """Stubs, and the credentials of somebody who may do everything unless others are given."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.generation = api_grpc.GenerationStub(channel)
        self.admin = admin_pb2_grpc.AdminStub(channel)

    async def generate(self, request: api.GenerateRequest, *, within: float | None = 10, **metadata: object) -> None:
        call = self.generation.Generate(request, timeout=within, metadata=metadata.get("metadata", bearing("opss")))
        async for _ in call:
            pass

    async def status(self, metadata: tuple[tuple[str, str], ...]) -> None:
        await self.admin.GetStatus(admin_pb2.GetStatusRequest(), metadata=metadata)

    async def cancel(self, request_id: str) -> None:
        await self.admin.Cancel(admin_pb2.CancelRequest(request_id=request_id), metadata=bearing("opss"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHeadway]:
    at = tmp_path_factory.mktemp("served")
    shutil.copytree(DEMO, at / "model")
    (at / "model" / "chat_template.jinja").write_text(TEMPLATE)
    (at / "tokens").write_text(TOKENS)
    with running(
        at, at / "model", SimulatedBackend(), CONFIG, SchedulerLimits(max_num_waiting=4),
        auth_token_file=str(at / "tokens"), max_concurrent_streams=MAX_STREAMS, max_message_bytes=4 << 20,
    ) as server:  # fmt: skip
        yield server


@pytest.fixture
async def caller(served: RunningHeadway) -> AsyncIterator[Caller]:
    async with grpc.aio.insecure_channel(served.address) as channel:
        yield Caller(channel)


@pytest.fixture
async def neighbour(served: RunningHeadway) -> AsyncIterator[None]:
    """A stream that runs meanwhile, and must come out as it always does."""
    async with AsyncClient(served.address, token="alices") as client:
        await client.wait_ready(20)
        stream = client.generate(**NEIGHBOUR)
        await anext(stream)
        yield
        result = await stream.result()
        undisturbed = await client.generate(**NEIGHBOUR).result()
        assert result.token_ids == undisturbed.token_ids
        assert len(result.token_ids) == NEIGHBOUR["max_tokens"]
    core = served.core_when_quiet()
    assert core.num_unfinished == 0


def request(**changes: object) -> api.GenerateRequest:
    kinds = {"text", "token_ids", "chat"}
    return api.GenerateRequest(**({} if kinds & changes.keys() else {"text": "x"}) | changes)


def sampled(**changes: object) -> api.GenerateRequest:
    return request(sampling=api.SamplingParams(**changes))


def ids(*values: int) -> api.GenerateRequest:
    return request(token_ids=api.TokenIds(ids=values))


def chat(*messages: tuple[str, str]) -> api.GenerateRequest:
    return request(chat=api.Chat(messages=[api.ChatMessage(role=role, content=text) for role, text in messages]))


def bias(*entries: tuple[int, float]) -> api.GenerateRequest:
    return sampled(logit_bias=[api.LogitBias(token_id=token, bias=value) for token, value in entries])


REQUESTS: dict[str, tuple[api.GenerateRequest, grpc.StatusCode, str]] = {
    "id over 128 bytes": (request(request_id="i" * 129), INVALID, "request_id: 'iii"),
    "id of control characters": (request(request_id="a\x00b"), INVALID, "request_id: 'a\\x00b' contains a control"),
    "tenant over 128 bytes": (request(tenant="t" * 129), INVALID, "tenant: "),
    "unknown model": (request(model="gpt"), grpc.StatusCode.NOT_FOUND, "model: 'gpt' is not served here; served: "),
    "no prompt": (api.GenerateRequest(), INVALID, "prompt: there is none; allowed: one of text, token_ids, chat"),
    "empty text": (request(text=""), INVALID, "text: the prompt is empty; allowed: at least one character"),
    "empty ids": (request(token_ids=api.TokenIds()), INVALID, "token_ids.ids: the prompt is empty"),
    "empty chat": (chat(), INVALID, "chat.messages: the prompt is empty"),
    "negative id": (ids(1, -1), INVALID, "token_ids.ids[1]: -1 is not a token id of this model; allowed: 0 to"),
    "id of the logits' width": (ids(1 << 20), INVALID, "token_ids.ids[0]: 1048576 is not a token id"),
    "largest id": (ids((1 << 31) - 1), INVALID, "2147483647 is not a token id of this model"),
    "prompt over the context": (ids(*[1] * (CONTEXT + 1)), INVALID, f"the prompt has {CONTEXT + 1} tokens; allowed: at"),
    "prompt without room for output": (ids(*[1] * CONTEXT), INVALID, f"has {CONTEXT} tokens; allowed: at most {CONTEXT - 1}"),
    "a million characters": (request(text="x" * 1_000_000), INVALID, "text: "),
    "bad role": (chat(("root", "x")), INVALID, "chat.messages[0].role: 'root' is not a role; allowed: system"),
    "template refusal": (chat(("tool", "x")), INVALID, "chat: the chat template refuses these messages: no tools here"),
    "template error": (chat(("developer", "x")), INVALID, "chat: the chat template refuses these messages: 'undefined_"),
    "priority": (request(priority=9), INVALID, "priority: 9 is not allowed; allowed: 0 to 4"),
    "resume of a wide id": (request(resume=api.Resume(token_ids=[1 << 20])), INVALID, "resume.token_ids: 1048576"),
    "resume of more than n": (
        request(resume=api.Resume(others=[{}, {}]), sampling=api.SamplingParams(n=2)),
        INVALID,
        "resume.others: 2 entries are not allowed; allowed: at most n - 1, 1",
    ),
    "resume with best_of": (
        request(resume=api.Resume(token_ids=[5]), sampling=api.SamplingParams(best_of=2)),
        INVALID,
        "resume.token_ids: 1 tokens are not allowed together with best_of = 2",
    ),
    "resume past the end": (
        request(resume=api.Resume(token_ids=[5] * 4), sampling=api.SamplingParams(max_tokens=3)),
        grpc.StatusCode.OUT_OF_RANGE,
        "resume.token_ids: 4 tokens are held; the output ends after 3",
    ),
    "max_tokens 0": (sampled(max_tokens=0), INVALID, "sampling.max_tokens: 0 is not allowed; allowed: 1 or more"),
    "max_tokens over": (sampled(max_tokens=CONTEXT), INVALID, f"sampling.max_tokens: {CONTEXT} is not allowed; allowed"),
    "max_tokens huge": (sampled(max_tokens=(1 << 31) - 1), INVALID, "sampling.max_tokens: 2147483647 is not allowed"),
    "min over max": (sampled(min_tokens=4, max_tokens=3), INVALID, "sampling.min_tokens: 4 is not allowed; allowed: at"),
    "min large, max unset": (sampled(min_tokens=10**6), INVALID, "sampling.min_tokens: 1000000 is not allowed; allowed"),
    "temperature negative": (sampled(temperature=-1), INVALID, "sampling.temperature: -1.0 is not allowed; allowed: 0"),
    "temperature NaN": (sampled(temperature=math.nan), INVALID, "sampling.temperature: nan is not allowed"),
    "temperature infinite": (sampled(temperature=math.inf), INVALID, "sampling.temperature: inf is not allowed"),
    "top_p 0": (sampled(top_p=0), INVALID, "sampling.top_p: 0.0 is not allowed; allowed: above 0, up to 1"),
    "top_p over 1": (sampled(top_p=1.5), INVALID, "sampling.top_p: 1.5 is not allowed"),
    "top_p NaN": (sampled(top_p=math.nan), INVALID, "sampling.top_p: nan is not allowed"),
    "top_k -2": (sampled(top_k=-2), INVALID, "sampling.top_k: -2 is not allowed; allowed: -1 or 0 (keep all)"),
    "min_p negative": (sampled(min_p=-0.5), INVALID, "sampling.min_p: -0.5 is not allowed; allowed: 0 to 1"),
    "min_p over 1": (sampled(min_p=1.5), INVALID, "sampling.min_p: 1.5"),
    "repetition 0": (sampled(repetition_penalty=0), INVALID, "sampling.repetition_penalty: 0.0 is not allowed; allowed"),
    "repetition NaN": (sampled(repetition_penalty=math.nan), INVALID, "sampling.repetition_penalty: nan"),
    "presence over 2": (sampled(presence_penalty=2.5), INVALID, "sampling.presence_penalty: 2.5 is not allowed"),
    "frequency NaN": (sampled(frequency_penalty=math.nan), INVALID, "sampling.frequency_penalty: nan"),
    "n 0": (sampled(n=0), INVALID, "sampling.n: 0 is not allowed; allowed: 1 to 16"),
    "n over": (sampled(n=17), INVALID, "sampling.n: 17 is not allowed; allowed: 1 to 16"),
    "logprobs over 20": (sampled(logprobs=21), INVALID, "sampling.logprobs: 21 is not allowed; allowed: 0 to 20"),
    "bias of a negative id": (bias((-1, 0)), INVALID, "sampling.logit_bias: -1 is not allowed; allowed: token ids 0 to"),
    "bias beyond the width": (bias((1 << 20, 0)), INVALID, "sampling.logit_bias: 1048576 is not allowed"),
    "bias NaN": (bias((1, math.nan)), INVALID, "sampling.logit_bias: nan is not allowed; allowed: -100 to 100"),
    "301 biases": (bias(*[(1, 0.0)] * 301), INVALID, "sampling.logit_bias: 301 is not allowed; allowed: at most 300"),
    "five stops": (sampled(stop=["a"] * 5), INVALID, "sampling.stop: 5 entries are not allowed; allowed: at most 4"),
    "empty stop": (sampled(stop=[""]), INVALID, "sampling.stop[0]: '' is not allowed; allowed: 1 to 256 bytes"),
    "long stop": (sampled(stop=["s" * 257]), INVALID, "sampling.stop[0]: 'sss"),
    "stop id beyond the width": (sampled(stop_token_ids=[1 << 20]), INVALID, "sampling.stop_token_ids: 1048576 is not"),
    "65 stop ids": (sampled(stop_token_ids=[1] * 65), INVALID, "sampling.stop_token_ids: 65 entries are not allowed"),
}  # fmt: skip


def text(value: str) -> api.Input:
    return api.Input(text=value)


def tokens(*values: int) -> api.Input:
    return api.Input(token_ids=api.TokenIds(ids=values))


def embed(*inputs: api.Input, **changes: object) -> api.EmbedRequest:
    return api.EmbedRequest(inputs=inputs or (text("x"),), **changes)


def score(prompt: api.Input, *continuations: api.Input, **changes: object) -> api.ScoreRequest:
    return api.ScoreRequest(prompt=prompt, continuations=continuations, **changes)


BATCHES: dict[str, tuple[api.EmbedRequest | api.ScoreRequest, grpc.StatusCode, str]] = {
    "id over 128 bytes": (embed(request_id="i" * 129), INVALID, "request_id: 'iii"),
    "tenant of control characters": (embed(tenant="a\n"), INVALID, "tenant: 'a\\n' contains a control"),
    "priority": (embed(priority=9), INVALID, "priority: 9 is not allowed; allowed: 0 to 4"),
    "unknown model": (embed(model="gpt"), grpc.StatusCode.NOT_FOUND, "model: 'gpt' is not served here; served: "),
    "no inputs": (api.EmbedRequest(), INVALID, "inputs: 0 are not allowed; allowed: 1 to 64"),
    "65 inputs": (embed(*[text("x")] * 65), INVALID, "inputs: 65 are not allowed; allowed: 1 to 64"),
    "an input of no kind": (embed(text("x"), api.Input()), INVALID, "inputs[1]: there is none; allowed: one of text"),
    "an empty text": (embed(text("")), INVALID, "inputs[0].text: it is empty; allowed: at least one character"),
    "empty ids": (embed(tokens()), INVALID, "inputs[0].token_ids.ids: it is empty; allowed: at least one token"),
    "a wide id": (embed(text("x"), tokens(1 << 20)), INVALID, "inputs[1].token_ids.ids[0]: 1048576 is not a token id"),
    "a long input": (embed(tokens(*[1] * CONTEXT)), INVALID, f"has {CONTEXT} tokens; allowed: at most {CONTEXT - 1}"),
    "a million characters": (embed(text("x" * 1_000_000)), INVALID, "inputs[0].text: "),
    "pooling": (embed(pooling=4), INVALID, "pooling: 4 is not allowed; allowed: 0 to 3"),
    "dimensions": (embed(dimensions=17), INVALID, "dimensions: 17 is not allowed; allowed: 0 (all) to 16, the model's"),
    "score: id": (score(text("x"), text("y"), request_id="i" * 129), INVALID, "request_id: 'iii"),
    "score: model": (score(text("x"), text("y"), model="a"), grpc.StatusCode.NOT_FOUND, "model: 'a' is not served"),
    "score: no prompt": (api.ScoreRequest(continuations=[text("y")]), INVALID, "prompt: there is none; allowed: one of"),
    "score: no continuations": (score(text("x")), INVALID, "continuations: 0 are not allowed; allowed: 1 to 64"),
    "score: an empty one": (score(text("x"), text("")), INVALID, "continuations[0].text: it is empty; allowed"),
    "score: a wide id": (score(text("x"), tokens(1 << 20)), INVALID, "continuations[0].token_ids.ids[0]: 1048576"),
    "score: too long": (
        score(tokens(*[1] * 600), tokens(*[1] * 600)), INVALID, f"continuations[0]: the prompt has 1200 tokens; allowed: at most {CONTEXT - 1}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
async def test_a_bad_request_with_several_inputs_is_refused(caller: Caller, neighbour: None, name: str) -> None:
    bad, code, words = BATCHES[name]
    call = caller.generation.Embed if isinstance(bad, api.EmbedRequest) else caller.generation.Score
    error = await refusal_of(lambda: call(bad, metadata=bearing("opss")))
    message = error.details()
    assert (error.code(), message) == (code, message)
    assert words in message
    assert len(message) < 400
    assert "x" * 65 not in message


async def test_several_inputs_need_rights_a_free_id_and_time_too(caller: Caller, neighbour: None) -> None:
    error = await refusal_of(lambda: caller.generation.Embed(embed(), metadata=bearing("watchers")))
    assert error.code() is DENIED
    error = await refusal_of(lambda: caller.generation.Embed(embed()))
    assert error.code() is UNAUTHENTICATED
    endless = request(request_id="mine", sampling=api.SamplingParams(ignore_eos=True, max_tokens=200))
    stream = caller.generation.Generate(endless, metadata=bearing("opss"))
    await stream.read()
    error = await refusal_of(lambda: caller.generation.Embed(embed(request_id="mine"), metadata=bearing("opss")))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    stream.cancel()
    error = await refusal_of(lambda: caller.generation.Embed(embed(), metadata=bearing("opss"), timeout=0.0))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def refusal_of(call: Callable[[], object]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call()
    return refused.value


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_bad_request_is_refused_by_field_value_and_range(caller: Caller, neighbour: None, name: str) -> None:
    bad, code, words = REQUESTS[name]
    error = await refusal_of(lambda: caller.generate(bad))
    message = error.details()
    assert (error.code(), message) == (code, message)
    assert words in message
    assert len(message) < 400
    assert "\n" not in message
    assert "x" * 65 not in message


CREDENTIALS = {
    "missing": ((), UNAUTHENTICATED, "missing"),
    "malformed": ((("authorization", "opss"),), UNAUTHENTICATED, "malformed"),
    "wrong": (bearing("guess"), UNAUTHENTICATED, "not valid"),
    "no right to Admin": (bearing("alices"), DENIED, "the role admin"),
}


@pytest.mark.parametrize("name", CREDENTIALS)
async def test_bad_credentials(caller: Caller, neighbour: None, name: str) -> None:
    metadata, code, words = CREDENTIALS[name]
    error = await refusal_of(lambda: caller.status(metadata))
    assert error.code() is code
    assert words in error.details()


async def test_no_right_to_generate(caller: Caller, neighbour: None) -> None:
    error = await refusal_of(lambda: caller.generate(request(), metadata=bearing("watchers")))
    assert error.code() is DENIED


async def test_a_message_over_the_limit(caller: Caller, neighbour: None) -> None:
    error = await refusal_of(lambda: caller.generate(request(text="x" * (5 << 20))))
    assert error.code() is EXHAUSTED


@pytest.mark.parametrize("within", [0.0, 0.05])
async def test_past_the_deadline(caller: Caller, neighbour: None, within: float) -> None:
    endless = request(sampling=api.SamplingParams(ignore_eos=True, max_tokens=CONTEXT - 10))
    started = time.monotonic()
    error = await refusal_of(lambda: caller.generate(endless, within=within))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - started < within + 0.5


async def test_a_live_duplicate(caller: Caller, neighbour: None) -> None:
    endless = request(request_id="mine", sampling=api.SamplingParams(ignore_eos=True, max_tokens=200))
    stream = caller.generation.Generate(endless, metadata=bearing("opss"))
    await stream.read()
    error = await refusal_of(lambda: caller.generate(request(request_id="mine")))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert "'mine' is the id of a live request" in error.details()
    stream.cancel()


async def test_cancelling(caller: Caller, neighbour: None) -> None:
    error = await refusal_of(lambda: caller.cancel("nobody's"))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "is not known" in error.details()
    endless = request(request_id="cancelled", sampling=api.SamplingParams(ignore_eos=True, max_tokens=200))
    stream = caller.generation.Generate(endless, metadata=bearing("opss"))
    await anext(responses := aiter(stream))
    await caller.cancel("cancelled")
    await caller.cancel("cancelled")
    assert [r.finished.reason async for r in responses if r.HasField("finished")] == [api.FINISH_REASON_ABORT]
    for wrong in ("", "x" * 129):
        error = await refusal_of(lambda wrong=wrong: caller.cancel(wrong))
        assert error.code() is INVALID


async def test_too_many_streams(caller: Caller, neighbour: None) -> None:
    endless = request(sampling=api.SamplingParams(ignore_eos=True, max_tokens=250))
    streams = []
    for _ in range(MAX_STREAMS - 1):
        # One after another: five that arrive between two steps are one more than may wait.
        streams.append(caller.generation.Generate(endless, metadata=bearing("opss")))
        await streams[-1].read()
    error = await refusal_of(lambda: caller.generate(request()))
    assert error.code() is EXHAUSTED
    assert f"{MAX_STREAMS} streams are open; allowed: {MAX_STREAMS}" in error.details()
    assert retry_after_s(error) > 0
    for stream in streams:
        stream.cancel()


async def test_what_is_no_message_at_all(served: RunningHeadway, neighbour: None) -> None:
    async with grpc.aio.insecure_channel(served.address) as channel:
        for kind, method in (
            ("unary", "Generation/Tokenize"),
            ("stream", "Generation/Generate"),
            ("unary", "Admin/Cancel"),
        ):
            call = getattr(channel, f"unary_{kind}")(f"/headway.v1.{method}")(b"\xff" * 100, metadata=bearing("opss"))
            error = await refusal_of(lambda call=call: anext(aiter(call)) if hasattr(call, "__aiter__") else call)
            assert (error.code(), error.details()[:29]) == (INVALID, "the request cannot be parsed;")
        unknown = channel.unary_unary("/headway.v1.Generation/Nonesuch")
        assert (await refusal_of(lambda: unknown(b""))).code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_million_characters_delay_nobody(caller: Caller, neighbour: None) -> None:
    bad = asyncio.create_task(refusal_of(lambda: caller.generate(request(text="x" * 3_000_000))))
    worst = 0.0
    while not bad.done():
        started = time.monotonic()
        await caller.status(bearing("opss"))
        worst = max(worst, time.monotonic() - started)
    assert bad.result().code() is INVALID
    assert worst < 0.5


def bounded(tmp_path: Path) -> AbstractContextManager[RunningHeadway]:
    return running(tmp_path, DEMO, SimulatedBackend(), CONFIG, SchedulerLimits(max_num_seqs=1, max_num_waiting=1))


async def test_a_full_queue_and_draining(tmp_path: Path) -> None:
    with bounded(tmp_path) as served:
        async with grpc.aio.insecure_channel(served.address) as channel:
            caller = Caller(channel)
            async with AsyncClient(served.address) as client:
                await client.wait_ready(20)
            endless = request(sampling=api.SamplingParams(ignore_eos=True, max_tokens=400))
            running_one = caller.generation.Generate(endless)
            await running_one.read()
            waiting = caller.generation.Generate(endless)
            waits = asyncio.create_task(waiting.read())
            while served.engine.fleet.cells[0].core.num_waiting < 1:  # noqa: ASYNC110  (another thread's)
                await asyncio.sleep(0.005)
            started = time.monotonic()
            error = await refusal_of(lambda: caller.generate(endless, within=5))
            assert error.code() is EXHAUSTED
            assert time.monotonic() - started < 0.2
            assert retry_after_s(error) > 0
            await caller.admin.Drain(admin_pb2.DrainRequest())
            error = await refusal_of(lambda: caller.generate(request()))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "draining" in error.details()
            for stream in (running_one, waiting):
                stream.cancel()
            waits.cancel()
