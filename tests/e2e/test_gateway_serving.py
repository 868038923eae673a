"""A gateway in this process, between a fake scheduler and gRPC clients: everything a caller can see or do."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import msgspec
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tokenizers.decoders import Strip

import headway
from e2e.running_server import eventually
from fake_scheduler import MODEL, FakeScheduler, hash_token
from headway.client import (
    AlreadyExistsError,
    AsyncClient,
    AuthenticationError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    ServerError,
    StreamCancelledError,
    UnavailableError,
)
from headway.client.calls import Call
from headway_gateway.config import GatewayConfig
from headway_gateway.server import ADMIN_SERVICE, GENERATION_SERVICE, GatewayServer
from headway_gateway.text.tokenization import TextModel, load_text_model
from headway_proto import generation_pb2 as api
from headway_proto import generation_pb2_grpc as api_grpc
from headway_proto.columns import decode_column
from headway_proto.ingress import (
    FINISH_ERROR,
    REJECT_ALREADY_EXISTS,
    REJECT_INVALID,
    REJECT_OUT_OF_RANGE,
    REJECT_OVERLOADED,
    REJECT_UNAVAILABLE,
    STATE_DRAINING,
    STATE_SERVING,
    STATE_WAITING_FOR_EXECUTOR,
    Rejected,
    Submit,
)
from headway_proto.operations import ExecutorState, ExecutorStatus
from headway_proto.sampling import SamplingParams
from plain_h2 import PlainH2, framed
from refusals import status_of

DEMO = Path(headway.__file__).parent / "demo_model"
TEXT_MODEL = load_text_model(DEMO)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
WINDOW = 65_535
"""The bytes that a client of HTTP/2 is sent before it has asked for more."""


class Stage:
    """A gateway and its client; the scheduler may come and go."""

    def __init__(
        self, server: GatewayServer, address: str, client: AsyncClient, channel: grpc.aio.Channel, ingress: str
    ) -> None:
        self.server = server
        self.address = address
        self.client = client
        self.channel = channel
        self.ingress = ingress
        self.stub = api_grpc.GenerationStub(channel)

    async def health(self, service: str = "") -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        return (await health_pb2_grpc.HealthStub(self.channel).Check(request)).status


@asynccontextmanager
async def stage(text_model: TextModel = TEXT_MODEL, **config: object) -> AsyncIterator[Stage]:
    directory = tempfile.mkdtemp(prefix="hw")
    ingress = f"ipc://{directory}/i"
    # The fake scheduler shares this process with its callers: what holds them up is no silence of a scheduler.
    settings = {"unavailable_grace_s": 0.3, "silence_timeout_s": 10.0} | config
    server = GatewayServer(
        GatewayConfig(model=str(DEMO), ingress_address=ingress, grpc_address="127.0.0.1:0", **settings), text_model
    )
    address = f"127.0.0.1:{await server.start()}"
    try:
        async with AsyncClient(address) as client, grpc.aio.insecure_channel(address) as channel:
            yield Stage(server, address, client, channel, ingress)
    finally:
        await server.close()
        shutil.rmtree(directory)


@asynccontextmanager
async def served(
    *, config: dict[str, object] | None = None, **fake: object
) -> AsyncIterator[tuple[Stage, FakeScheduler]]:
    async with stage(**(config or {})) as on, FakeScheduler(on.ingress, **fake) as scheduler:
        await on.client.wait_ready(5)
        yield on, scheduler


def expected_tokens(seed: int, count: int) -> list[int]:
    submit = Submit(
        handle=1,
        request_id="",
        index=0,
        token_ids=b"",
        num_prompt_tokens=0,
        max_tokens=count,
        sampling=SamplingParams(seed=seed),
    )
    return [hash_token(submit, index) for index in range(count)]


def spelling(text: str):
    """Token choice that spells ``text`` and then the end-of-sequence id, whatever the prompt."""
    ids = [*TEXT_MODEL.encode(text), 0]

    def next_token(submit: Submit, index: int) -> int:
        return ids[index]

    return next_token, len(ids)


@pytest.mark.parametrize(
    ("keeps", "text", "stop"), [(False, "Yes.", ""), (True, "Yes.<|endoftext|>", ""), (True, "Yes.", "<|end")]
)
async def test_special_tokens_are_part_of_the_text_if_that_is_asked_for(keeps: bool, text: str, stop: str):
    async with served() as (on, scheduler):
        scheduler.next_token, num_tokens = spelling("Yes.")
        sampling = api.SamplingParams(max_tokens=num_tokens, stop=[stop] if stop else [])
        call = on.stub.Generate(api.GenerateRequest(text="x", sampling=sampling, keep_special_tokens=keeps))
        assert "".join([event.delta.text async for event in call]) == text


async def test_a_stream_from_accepted_to_finished():
    async with served() as (on, scheduler):
        call = on.stub.Generate(
            api.GenerateRequest(request_id="mine", text="Hello", sampling=api.SamplingParams(max_tokens=50, seed=4))
        )
        events = [event async for event in call]
        assert events[0].accepted == api.Accepted(
            request_id="mine", prompt_tokens=len(TEXT_MODEL.encode("Hello")), seeds=[4]
        )
        deltas = [event.delta for event in events[1:-1]]
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert tokens == expected_tokens(4, 50)
        places = [delta.first_token_index for delta in deltas]
        assert places == [sum(len(delta.token_ids) for delta in deltas[:place]) for place in range(len(deltas))]
        assert "".join(delta.text for delta in deltas) == TEXT_MODEL.decode(tokens)
        finished = events[-1].finished
        assert finished.reason == api.FINISH_REASON_LENGTH
        assert finished.usage == api.Usage(prompt_tokens=len(TEXT_MODEL.encode("Hello")), output_tokens=50)
        assert (finished.timings.queue_ms, finished.timings.ttft_ms) == (1.0, 2.0)
        assert ("headway-request-id", "mine") in tuple(await call.initial_metadata())
        assert decode_column(scheduler.submits[0].token_ids).tolist() == TEXT_MODEL.encode("Hello")


@pytest.mark.parametrize("text", ["naïve 🙂 e\u0301 你好 👨‍👩‍👧‍👦", "\u0000\u0001", "plain", " lead and trail \n\n"])
async def test_text_comes_out_intact_and_never_in_half_characters(text):
    next_token, count = spelling(text)
    async with served(next_token=next_token, step_interval_s=0.002) as (on, _):
        deltas = [delta async for delta in on.client.generate("x", max_tokens=500)]
        assert "".join(delta.text for delta in deltas) == text
        assert all("\ufffd" not in delta.text for delta in deltas)
        assert sum(len(delta.token_ids) for delta in deltas) == count


async def test_an_output_cut_inside_a_character_ends_in_a_replacement():
    next_token, _ = spelling("🙂")
    async with served(next_token=next_token) as (on, _):
        result = await on.client.generate("x", max_tokens=1).result()
        assert result.text == TEXT_MODEL.decode(result.token_ids)


async def test_a_stop_string_over_token_borders_ends_output_and_generation():
    text = "one two three STOP HERE four"
    ids = TEXT_MODEL.encode(text)
    next_token, _ = spelling(text + " five" * 20)
    async with served(next_token=next_token, step_interval_s=0.002) as (on, scheduler):
        stream = on.client.generate("x", max_tokens=300, stop=["OP HE", "never"])
        deltas = [delta async for delta in stream]
        completion = (await stream.result()).completions[0]
        assert "".join(delta.text for delta in deltas) == "one two three ST"
        assert (completion.finish_reason, completion.stop) == ("stop", "OP HE")
        through_stop = next(n for n in range(len(ids)) if "OP HE" in TEXT_MODEL.decode(ids[:n]))
        assert completion.token_ids == ids[:through_stop]
        assert completion.usage.output_tokens == through_stop
        await eventually(lambda: not scheduler.running)
        assert scheduler.aborts == [scheduler.submits[0].handle]


async def test_a_stop_token_ends_the_output_and_belongs_to_it():
    target = expected_tokens(1, 6)[5]
    async with served() as (on, _):
        completion = (await on.client.generate("x", seed=1, stop_token_ids=[target]).result()).completions[0]
        assert completion.token_ids == expected_tokens(1, 6)
        assert (completion.finish_reason, completion.stop_token_id) == ("stop", target)


async def test_n_continuations_have_seeds_that_count_up():
    async with served() as (on, scheduler):
        result = await on.client.generate("x", n=3, seed=10, max_tokens=20, logprobs=2).result()
        assert result.seeds == (10, 11, 12)
        assert [one.token_ids for one in result.completions] == [expected_tokens(seed, 20) for seed in (10, 11, 12)]
        assert all(one.text == TEXT_MODEL.decode(one.token_ids) for one in result.completions)
        assert [submit.index for submit in scheduler.submits] == [0, 1, 2]
        assert [entry.token_id for entry in result.completions[1].logprobs] == expected_tokens(11, 20)
        assert result.completions[1].logprobs[3].top == ((0, -1.0), (1, -1.0))


async def test_without_a_seed_one_is_drawn_and_told():
    async with served() as (on, _):
        result = await on.client.generate("x", max_tokens=5).result()
        again = await on.client.generate("x", max_tokens=5, seed=result.seeds[0]).result()
        assert again.token_ids == result.token_ids


async def test_chat_and_token_prompts():
    async with served() as (on, scheduler):
        chat = [{"role": "user", "content": "What is a list?"}]
        await on.client.generate(chat, max_tokens=1).result()
        await on.client.generate([5, 6, 7], max_tokens=1).result()
        assert decode_column(scheduler.submits[0].token_ids).tolist() == await on.client.tokenize(chat)
        assert decode_column(scheduler.submits[1].token_ids).tolist() == [5, 6, 7]


@pytest.mark.parametrize("held", [0, 1, 7, 19])
async def test_resume_goes_on_behind_what_is_held_text_included(held):
    async with served(step_interval_s=0.002) as (on, scheduler):
        whole = await on.client.generate("x", seed=3, max_tokens=20).result()
        detokenizer = TEXT_MODEL.new_detokenizer()
        told = detokenizer.push(whole.token_ids[:held])
        request = api.GenerateRequest(
            text="x",
            sampling=api.SamplingParams(max_tokens=20),
            resume=api.Resume(token_ids=whole.token_ids[:held], seed=3),
        )
        events = [event async for event in on.stub.Generate(request)]
        deltas = [event.delta for event in events if event.HasField("delta")]
        assert deltas[0].first_token_index == held
        assert whole.token_ids[:held] + [t for delta in deltas for t in delta.token_ids] == whole.token_ids
        assert told + "".join(delta.text for delta in deltas) == whole.text
        assert events[-1].finished.usage.output_tokens == 20
        submit = scheduler.submits[-1]
        assert submit.num_prompt_tokens == len(TEXT_MODEL.encode("x"))
        assert decode_column(submit.token_ids).tolist()[submit.num_prompt_tokens :] == whole.token_ids[:held]


async def test_each_continuation_goes_on_behind_what_is_held_of_it():
    async with served(step_interval_s=0.002) as (on, scheduler):
        whole = (await on.client.generate("x", seed=3, n=4, max_tokens=20).result()).completions
        held = [completion.token_ids[:count] for completion, count in zip(whole, (7, 0, 20, 0), strict=True)]
        others = [api.TokenIds(ids=held[1]), api.TokenIds(ids=held[2])]
        request = api.GenerateRequest(
            text="x",
            sampling=api.SamplingParams(max_tokens=20, n=4),
            resume=api.Resume(token_ids=held[0], seed=3, others=others),
        )
        submitted_before = len(scheduler.submits)
        events = [event async for event in on.stub.Generate(request)]
        for event in events:
            if event.HasField("delta"):
                assert event.delta.first_token_index == len(held[event.delta.index])
                held[event.delta.index] += event.delta.token_ids
        assert held == [completion.token_ids for completion in whole]
        assert sorted(event.finished.index for event in events if event.HasField("finished")) == [0, 1, 2, 3]
        assert [submit.index for submit in scheduler.submits[submitted_before:]] == [0, 1, 3]


async def test_a_refusal_of_what_has_not_ended_refuses_the_resumed_stream():
    async with served() as (on, scheduler):
        whole = (await on.client.generate("x", seed=3, n=2, max_tokens=5).result()).completions
        scheduler.reject = lambda submit: Rejected(
            handle=submit.handle, reason=REJECT_OVERLOADED, field="", message="the queue is full"
        )
        request = api.GenerateRequest(
            text="x",
            sampling=api.SamplingParams(max_tokens=5, n=2),
            resume=api.Resume(token_ids=whole[0].token_ids, seed=3, others=[{"ids": whole[1].token_ids[:2]}]),
        )
        with pytest.raises(grpc.aio.AioRpcError, match="the queue is full") as refusal:
            await on.stub.Generate(request).read()
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_resume_at_the_very_end_only_tells_the_end():
    next_token, count = spelling("the end. STOP")
    async with served(next_token=next_token) as (on, scheduler):
        whole = await on.client.generate("x").result()
        assert len(whole.token_ids) == count
        before = len(scheduler.submits)
        for sampling, held, reason in (
            ({}, whole.token_ids, "finished by its end of sequence"),
            ({"max_tokens": 3}, whole.token_ids[:3], "finished by its length"),
            ({"stop": ["STOP"]}, whole.token_ids[:-1], "finished by its stop string"),
            (
                {"stop": ["STOPS"], "max_tokens": count - 1},
                whole.token_ids[:-1],
                "the text held back came with its end",
            ),
        ):
            request = api.GenerateRequest(
                text="x", sampling=api.SamplingParams(**sampling), resume=api.Resume(token_ids=held, seed=3)
            )
            events = [event async for event in on.stub.Generate(request)]
            assert [event.WhichOneof("event") for event in events] == ["accepted", "finished"], reason
            assert events[1].finished.usage.output_tokens == len(held)
        assert len(scheduler.submits) == before


async def test_resume_past_the_end_is_out_of_range():
    async with served() as (on, _):
        for sampling, held in (({"max_tokens": 3}, [5, 6, 7, 8]), ({}, [5, 0, 6]), ({"stop": ["a"]}, None)):
            tokens = TEXT_MODEL.encode("an apple a day") if held is None else held
            request = api.GenerateRequest(
                text="x", sampling=api.SamplingParams(**sampling), resume=api.Resume(token_ids=tokens, seed=3)
            )
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await on.stub.Generate(request).read()
            assert refusal.value.code() is grpc.StatusCode.OUT_OF_RANGE
            assert "tokens are held" in refusal.value.details()


@pytest.mark.parametrize("how", ["cancel", "disconnect", "task", "deadline"])
async def test_a_client_that_leaves_frees_its_sequences(how):
    async with served(step_interval_s=0.005) as (on, scheduler):
        if how == "deadline":
            with pytest.raises(DeadlineError):
                await on.client.generate("x", n=2, timeout_s=0.2).result()
        elif how == "disconnect":
            channel = grpc.aio.insecure_channel(on.address)
            call = api_grpc.GenerationStub(channel).Generate(
                api.GenerateRequest(text="x", sampling=api.SamplingParams(n=2))
            )
            await call.read()
            await channel.close()
        elif how == "task":
            task = asyncio.create_task(on.client.generate("x", n=2).result())
            await eventually(lambda: scheduler.running)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            stream = on.client.generate("x", n=2)
            await anext(stream)
            stream.cancel()
            with pytest.raises(StreamCancelledError):
                await stream.result()
        await eventually(lambda: not scheduler.running)
        assert sorted(scheduler.aborts) == sorted(submit.handle for submit in scheduler.submits)
        await on.server.drain(1.0)


async def test_a_client_that_leaves_before_admission_frees_its_place():
    async with served() as (on, scheduler):
        scheduler.admit = False
        stream = on.client.generate("x")
        await eventually(lambda: scheduler.running)
        stream.cancel()
        await eventually(lambda: not scheduler.running)


async def test_a_deadline_passes_while_no_scheduler_is_there():
    async with stage(unavailable_grace_s=30.0) as on:
        started = time.monotonic()
        with pytest.raises(DeadlineError):
            await on.client.generate("x", timeout_s=0.3).result()
        assert time.monotonic() - started < 0.6


async def test_a_live_request_id_is_taken_once_and_free_again_afterwards():
    async with served(step_interval_s=0.005) as (on, _):
        first = on.client.generate("x", request_id="same", max_tokens=20)
        await anext(first)
        with pytest.raises(AlreadyExistsError, match="request_id: 'same' is the id of a live request"):
            await on.client.generate("x", request_id="same").result()
        await first.result()
        await on.client.generate("x", request_id="same", max_tokens=1).result()


async def test_request_ids_beyond_ascii_travel_in_metadata():
    async with served() as (on, _):
        call = on.stub.Generate(
            api.GenerateRequest(request_id="é 1", text="x", sampling=api.SamplingParams(max_tokens=1))
        )
        assert (await call.read()).accepted.request_id == "é 1"
        assert ("headway-request-id", "%C3%A9 1") in tuple(await call.initial_metadata())


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (REJECT_INVALID, InvalidRequestError),
        (REJECT_OUT_OF_RANGE, InvalidRequestError),
        (REJECT_ALREADY_EXISTS, AlreadyExistsError),
        (REJECT_OVERLOADED, OverloadedError),
        (REJECT_UNAVAILABLE, UnavailableError),
    ],
)
async def test_the_schedulers_refusals_become_statuses(reason, error):
    async with served() as (on, scheduler):
        retry_after_ms = 250 if reason == REJECT_OVERLOADED else 0
        scheduler.reject = lambda submit: Rejected(
            handle=0, reason=reason, field="token_ids", message="not this one", retry_after_ms=retry_after_ms
        )
        with pytest.raises(error, match="token_ids: not this one") as refusal:
            await on.client.generate("x").result()
        assert refusal.value.retry_after_s == (0.25 if retry_after_ms else None)
        if reason == REJECT_INVALID:
            assert refusal.value.violations == (("token_ids", "not this one"),)


async def test_one_refused_continuation_takes_the_others_back():
    async with served() as (on, scheduler):
        scheduler.reject = lambda submit: Rejected(handle=0, reason=REJECT_OVERLOADED) if submit.index else None
        scheduler.admit = False
        with pytest.raises(OverloadedError) as refusal:
            await on.client.generate("x", n=2).result()
        assert refusal.value.retry_after_s == 1.0
        await eventually(lambda: not scheduler.running)


async def test_an_error_after_acceptance_is_told_by_finished():
    async with served(step_interval_s=0.005) as (on, scheduler):
        stream = on.client.generate("x", request_id="r")
        await anext(stream)
        await scheduler.end("r", FINISH_ERROR, "the logits were not finite")
        completion = (await stream.result()).completions[0]
        assert (completion.finish_reason, completion.error) == ("error", "the logits were not finite")


async def test_admin_calls():
    async with served(step_interval_s=0.005) as (on, scheduler):
        stream = on.client.generate("x", request_id="r")
        await anext(stream)
        assert (await on.client.status()).executor_state == "ready"
        await on.client.cancel("r")
        assert (await stream.result()).completions[0].finish_reason == "abort"
        await on.client.cancel("r")
        with pytest.raises(NotFoundError, match="request_id: 'ghost' is not known"):
            await on.client.cancel("ghost")
        with pytest.raises(InvalidRequestError, match="request_id: '' is not allowed"):
            await on.client.cancel("")
        assert [call.method for call in scheduler.admin_calls] == ["status", "cancel", "cancel", "cancel"]


async def test_executors_are_seen_and_drained_one_by_one():
    executor = ExecutorStatus(
        number=1,
        state="ready",
        epoch=7,
        is_draining=True,
        details=ExecutorState(
            backend="torch",
            model_name="m",
            device="cpu",
            dtype="float32",
            age_s=1.5,
            last_step_us=9,
            last_step_age_s=-1.0,
        ),
        num_running=2,
        num_waiting=3,
        num_total_blocks=64,
        num_free_blocks=16,
        num_cached_blocks=4,
        kv_usage=0.75,
        num_steps=5,
        role="prefill",
    )
    gone = msgspec.structs.replace(executor, number=2, state="absent", details=None)
    async with served(step_interval_s=0.005) as (on, scheduler):
        scheduler.executors = executor, gone
        first, second = (await on.client.status()).executors
        for name in executor.__struct_fields__:
            if name != "details":
                assert getattr(first, name) == getattr(executor, name)
        assert (first.details.backend, first.details.age_s, first.details.last_step_age_s) == ("torch", 1.5, -1.0)
        assert (second.number, second.state, second.HasField("details")) == (2, "absent", False)

        await anext(on.client.generate("x", request_id="r", n=2))
        await eventually(lambda: len(scheduler.running) == 2)
        waiting, placed = sorted(await on.client.requests(), key=lambda state: state.HasField("executor"))
        assert (waiting.HasField("executor"), placed.HasField("executor"), placed.executor) == (False, True, 0)

        scheduler.admin_calls.clear()
        await on.client.drain_executor(1)
        await on.client.undrain_executor(1)
        await on.client.pinned_prefixes(executor=1)
        await on.client.set_executor_role(1, "decode")
        with pytest.raises(
            InvalidRequestError, match="role: 'cook' is not allowed; allowed: prefill, decode, both"
        ) as refusal:
            await on.client.set_executor_role(1, "cook")
        assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT
        for call in (
            on.client.drain_executor(7),
            on.client.undrain_executor(7),
            on.client.pinned_prefixes(executor=7),
            on.client.set_executor_role(7, "both"),
        ):
            with pytest.raises(InvalidRequestError, match="executor: 7 is not known; allowed: 0, 1"):
                await call
        called = [(call.method, call.executor) for call in scheduler.admin_calls]
        methods = ("drain_executor", "undrain_executor", "pins", "set_executor_role")
        assert called == [(method, executor) for executor in (1, 7) for method in methods]
        assert [call.role for call in scheduler.admin_calls if call.role] == ["decode", "both"]


async def test_tokenize_detokenize_and_model():
    async with served() as (on, _):
        ids = await on.client.tokenize("a 🙂 b")
        assert ids == TEXT_MODEL.encode("a 🙂 b")
        assert await on.client.detokenize(ids) == "a 🙂 b"
        assert await on.client.detokenize([]) == ""
        model = await on.client.model()
        assert (model.name, model.vocab_size, model.has_chat_template) == ("fake", 4096, True)
        with pytest.raises(InvalidRequestError, match=r"token_ids\[1\]: 4096 is not a token id"):
            await on.client.detokenize([1, 4096])
        with pytest.raises(InvalidRequestError, match="input: there is none"):
            await on.client._call(Call("generation", "Tokenize", api.TokenizeRequest(), lambda answer: answer))
        with pytest.raises(InvalidRequestError, match=r"chat.messages\[0\].role: 'robot'"):
            await on.client.tokenize([{"role": "robot", "content": "x"}])


async def test_a_refusal_carries_details_that_machines_read():
    async with served() as (on, scheduler):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await on.stub.Generate(api.GenerateRequest(text="x", sampling=api.SamplingParams(top_p=3.0))).read()
        status = status_of(refusal.value)
        assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        bad_request = error_details_pb2.BadRequest()
        assert status.details[0].Unpack(bad_request)
        assert [violation.field for violation in bad_request.field_violations] == ["sampling.top_p"]
        assert not scheduler.submits


async def test_prompts_that_cannot_fit():
    async with served() as (on, scheduler):
        with pytest.raises(InvalidRequestError, match=r"text: the prompt has \d+ tokens; allowed: at most 1023"):
            await on.client.generate("word " * 2000).result()
        started = time.monotonic()
        with pytest.raises(InvalidRequestError, match="text: 10000000 characters cannot fit"):
            await on.client.generate("a" * 10_000_000).result()
        assert time.monotonic() - started < 2.0
        assert not scheduler.submits


async def test_a_message_over_the_limit_is_refused():
    async with served(config={"max_message_bytes": 100_000}) as (on, _):
        with pytest.raises(OverloadedError):
            await on.client.generate("a" * 200_000).result()


async def test_a_long_prompt_blocks_nobody():
    async with served(
        step_interval_s=0.001, model=msgspec.structs.replace(MODEL, max_model_len=1 << 22, max_request_tokens=1 << 22)
    ) as (on, _):
        long = asyncio.create_task(on.client.tokenize("a" * 3_000_000))
        await asyncio.sleep(0.05)
        started = time.monotonic()
        await on.client.generate("hello", max_tokens=5).result()
        elapsed = time.monotonic() - started
        assert not long.done(), "the long prompt is meant to take longer than this test's short one"
        assert elapsed < 1.0
        await long


async def test_too_many_streams():
    async with served(config={"max_concurrent_streams": 1}, step_interval_s=0.005) as (on, _):
        stream = on.client.generate("x")
        await anext(stream)
        with pytest.raises(OverloadedError, match="1 streams are open; allowed: 1") as refusal:
            await on.client.generate("x").result()
        assert refusal.value.retry_after_s == 1.0
        stream.cancel()


async def test_an_unexpected_error_never_shows_its_text():
    async with served() as (on, _):
        on.server._generation._lanes.close()
        with pytest.raises(ServerError) as refusal:
            await on.client.tokenize("x " * 200)
        assert refusal.value.code is grpc.StatusCode.INTERNAL
        assert "executor" not in refusal.value.message
        assert refusal.value.message.startswith("internal error; see ")


async def test_a_panic_of_a_library_ends_its_call(monkeypatch):
    def panic(*_, **__):
        Strip(" ", 1, 1).decode([" "])

    async with served() as (on, _):
        with monkeypatch.context() as broken:
            broken.setattr(TextModel, "new_detokenizer", panic)
            with pytest.raises(ServerError, match="internal error; see "):
                await asyncio.wait_for(on.client.generate("x", max_tokens=2).result(), 5)
        assert (await on.client.generate("x", max_tokens=2).result()).token_ids


async def test_health_follows_scheduler_model_state_and_progress():
    async with stage(stall_s=0.4) as on:
        assert [await on.health(), await on.health(GENERATION_SERVICE)] == [NOT_SERVING, NOT_SERVING]
        assert await on.health("liveness") == SERVING
        async with FakeScheduler(on.ingress, model=None, step_interval_s=None) as scheduler:
            await eventually(lambda: scheduler.hellos)
            await asyncio.sleep(0.15)
            assert await on.health() == NOT_SERVING
            scheduler.model = MODEL
            await on.client.wait_ready(2)
            assert await on.health() == SERVING
            for state in (STATE_WAITING_FOR_EXECUTOR, STATE_DRAINING):
                scheduler.state = state
                await scheduler.tell_status()
                await asyncio.sleep(0.15)
                assert await on.health() == NOT_SERVING
            scheduler.state = STATE_SERVING
            await scheduler.tell_status()
            await on.client.wait_ready(2)
            stream = on.client.generate("x")
            await eventually(lambda: scheduler.running)
            await asyncio.sleep(0.8)
            assert await on.health() == NOT_SERVING, "work is pending, but no step runs"
            await scheduler.step()
            await on.client.wait_ready(2)
            stream.cancel()
        await asyncio.sleep(0.8)
        assert await on.health() == NOT_SERVING


async def test_a_model_narrower_than_the_tokenizer_is_not_served():
    async with stage() as on, FakeScheduler(on.ingress, model=msgspec.structs.replace(MODEL, vocab_size=100)):
        await asyncio.sleep(0.3)
        assert await on.health() == NOT_SERVING
        with pytest.raises(UnavailableError, match="tokenizer does not belong"):
            await on.client.generate("x").result()


@pytest.mark.parametrize(
    ("model", "state", "words"),
    [
        (None, STATE_SERVING, "the model is still loading"),
        (MODEL, STATE_WAITING_FOR_EXECUTOR, "the scheduler is waiting for its executor"),
        (MODEL, STATE_DRAINING, "the scheduler is draining"),
    ],
)
async def test_who_cannot_serve_is_unavailable(model, state, words):
    async with stage() as on, FakeScheduler(on.ingress, model=model) as scheduler:
        scheduler.state = state
        with pytest.raises(UnavailableError, match=words):
            await on.client.generate("x").result()


async def test_without_a_scheduler_new_requests_are_unavailable_after_a_short_grace():
    async with stage() as on:
        started = time.monotonic()
        with pytest.raises(UnavailableError, match="no scheduler is connected"):
            await on.client.generate("x").result()
        assert 0.25 < time.monotonic() - started < 1.0
        with pytest.raises(UnavailableError):
            await on.client.model()


async def test_streams_outlive_their_scheduler():
    async with stage(silence_timeout_s=0.5) as on:
        async with FakeScheduler(on.ingress, step_interval_s=0.005):
            await on.client.wait_ready(5)
            streams = [on.client.generate("x", seed=seed, max_tokens=60) for seed in range(8)]
            for stream in streams:
                await anext(stream)
        async with FakeScheduler(on.ingress, step_interval_s=0.005) as successor:
            results = await asyncio.gather(*(stream.result() for stream in streams))
            assert [result.token_ids for result in results] == [expected_tokens(seed, 60) for seed in range(8)]
            assert all(result.text == TEXT_MODEL.decode(result.token_ids) for result in results)
            assert all(len(submit.token_ids) > 4 * submit.num_prompt_tokens for submit in successor.submits)


async def test_streams_are_exact_over_a_wire_that_loses_and_repeats():
    async with served(step_interval_s=0.002) as (on, scheduler):
        count = 0

        def lossy(frame: bytes) -> list[bytes]:
            nonlocal count
            count += 1
            if count % 97 == 0:
                return []
            if count % 89 == 0:
                return [frame[:-1] + bytes([frame[-1] ^ 1])]
            return [frame, frame] if count % 13 == 0 else [frame]

        scheduler.filter_frame = lossy
        results = await asyncio.gather(
            *(on.client.generate("x", seed=seed, max_tokens=200).result() for seed in range(4))
        )
        assert [result.token_ids for result in results] == [expected_tokens(seed, 200) for seed in range(4)]
        counters = on.server.client.link.counters
        assert counters.sequence_gaps
        assert counters.damaged_frames
        assert counters.duplicate_frames
        assert counters.links_opened > 2


async def test_a_reader_that_pauses_gets_the_rest_at_once():
    async with served(step_interval_s=0.001) as (on, scheduler):
        stream = on.client.generate("x", max_tokens=400, seed=1)
        await anext(stream)
        await eventually(lambda: scheduler.num_steps > 500)
        assert (await stream.result()).token_ids == expected_tokens(1, 400)


async def test_draining_says_not_serving_first_lets_streams_finish_and_refuses_new_ones():
    async with served(step_interval_s=0.005) as (on, _):
        stream = on.client.generate("x", max_tokens=60)
        await anext(stream)
        draining = asyncio.create_task(on.server.drain(5.0))
        await asyncio.sleep(0.05)
        assert await on.health() == NOT_SERVING
        assert await on.health("liveness") == SERVING
        with pytest.raises(UnavailableError, match="draining"):
            await on.client.generate("x").result()
        assert len((await stream.result()).token_ids) == 60
        assert await draining


async def test_draining_waits_until_what_is_answered_is_read():
    async with served(step_interval_s=0.0) as (on, _), PlainH2(on.address, reads=False) as client:
        stream = client.open("/headway.v1.Generation/Generate")
        sampling = api.SamplingParams(max_tokens=450, logprobs=20, ignore_eos=True)
        client.send(stream, framed(api.GenerateRequest(text="x", sampling=sampling).SerializeToString()))
        await eventually(lambda: len(client.answers[stream].data) == WINDOW)
        await eventually(lambda: on.server._generation.streams.num_open == 0)
        draining = asyncio.create_task(on.server.drain(60))
        await asyncio.sleep(0.1)
        assert not draining.done()
        client.h2.increment_flow_control_window(1 << 20)
        client.h2.increment_flow_control_window(1 << 20, stream)
        client.flush()
        events = [api.GenerateResponse.FromString(message) for message in (await client.answer(stream)).messages]
        assert sum(len(event.delta.token_ids) for event in events) == 450
        assert client.answers[stream].status["grpc-status"] == "0"
        assert await draining


async def test_what_does_not_finish_within_grace_is_aborted():
    async with served(step_interval_s=0.02) as (on, scheduler):
        stream = on.client.generate("x", n=2)
        await anext(stream)
        assert not await on.server.drain(0.1)
        await on.server.close()
        await eventually(lambda: not scheduler.running)
        with pytest.raises((UnavailableError, StreamCancelledError)):
            await stream.result()


async def test_reflection_speaks_both_versions():
    async with served() as (on, _):
        for version in ("v1", "v1alpha"):
            method = on.channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            symbols = ("headway.v1.Generation", "headway.v1.Admin", "grpc.reflection.v1.ServerReflection")
            requests = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                *(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol) for symbol in symbols),
            ]
            responses = [response async for response in method(iter(requests))]
            names = {service.name for service in responses[0].list_services_response.service}
            assert names >= {
                GENERATION_SERVICE,
                ADMIN_SERVICE,
                "grpc.health.v1.Health",
                "grpc.reflection.v1.ServerReflection",
                "grpc.reflection.v1alpha.ServerReflection",
            }
            for response in responses[1:]:
                assert response.file_descriptor_response.file_descriptor_proto


async def test_the_bearer_token_guards_everything_but_open_health(tmp_path):
    (tmp_path / "token").write_text("s3cret\n")
    async with stage(auth_token_file=str(tmp_path / "token"), open_health=True) as on, FakeScheduler(on.ingress):
        await on.client.wait_ready(5)
        address = on.address
        for token, words in ((None, "missing"), ("wrong", "not valid")):
            async with AsyncClient(address, token=token) as client:
                for call in (client.model(), client.status(), client.generate("x").result()):
                    with pytest.raises(AuthenticationError, match=words):
                        await call
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await on.stub.GetModel(api.GetModelRequest(), metadata=(("authorization", "Basic s3cret"),))
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "malformed" in refusal.value.details()
        reflect = reflection_pb2_grpc.ServerReflectionStub(on.channel)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            async for _ in reflect.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest()])):
                pass
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
        async with AsyncClient(address, token="s3cret") as client:
            assert (await client.generate("x", max_tokens=2).result()).completions[0].finish_reason == "length"


async def test_the_client_resumes_when_its_gateway_is_replaced():
    async with stage() as on, FakeScheduler(on.ingress, step_interval_s=0.005):
        await on.client.wait_ready(5)
        address = on.address
        stream = on.client.generate("x", seed=5, max_tokens=150)
        first = [await anext(stream) for _ in range(3)]
        await on.server.close()
        successor = GatewayServer(
            GatewayConfig(model=str(DEMO), ingress_address=on.ingress, grpc_address=address), TEXT_MODEL
        )
        await successor.start()
        try:
            rest = [delta async for delta in stream]
        finally:
            await successor.close()
        deltas = first + rest
        result = await stream.result()
        assert [token for delta in deltas for token in delta.token_ids] == expected_tokens(5, 150)
        assert "".join(delta.text for delta in deltas) == TEXT_MODEL.decode(expected_tokens(5, 150)) == result.text
        assert result.completions[0].finish_reason == "length"


@pytest.mark.parametrize("best_of", [None, 5])
async def test_the_client_resumes_every_continuation(best_of: int | None):
    options = {"seed": 5, "n": 3, "max_tokens": 120, "best_of": best_of, "logprobs": 0}
    async with stage() as on, FakeScheduler(on.ingress, step_interval_s=0.005) as scheduler:
        await on.client.wait_ready(5)
        address = on.address
        whole = await on.client.generate("x", **options).result()
        stream = on.client.generate("x", **options)
        outputs: list[list[int]] = [[], [], []]

        async def read() -> None:
            async for delta in stream:
                assert delta.first_token_index == len(outputs[delta.index])
                outputs[delta.index] += delta.token_ids

        reading = asyncio.create_task(read())
        await eventually(lambda: len(scheduler.running) == (best_of or 3))
        await eventually(lambda: best_of is not None or all(outputs))
        await on.server.close()
        assert not reading.done()
        successor = GatewayServer(
            GatewayConfig(model=str(DEMO), ingress_address=on.ingress, grpc_address=address), TEXT_MODEL
        )
        await successor.start()
        try:
            await reading
        finally:
            await successor.close()
        result = await stream.result()
    assert outputs == [completion.token_ids for completion in whole.completions]
    assert [one.text for one in result.completions] == [one.text for one in whole.completions]
    assert [one.finish_reason for one in result.completions] == ["length"] * 3


async def test_a_client_that_does_not_read_is_let_go_and_the_others_go_on():
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65535)]
    model = msgspec.structs.replace(MODEL, max_model_len=200_000, max_request_tokens=200_000)
    request = api.GenerateRequest(request_id="deaf", token_ids=api.TokenIds(ids=[1, 2]))
    request.sampling.max_tokens = 100_000
    request.sampling.ignore_eos = True
    async with (
        served(config={"slow_client_s": 0.5}, model=model) as (on, scheduler),
        grpc.aio.insecure_channel(on.address, options=narrow) as channel,
    ):
        call = api_grpc.GenerationStub(channel).Generate(request)
        await call.read()
        await eventually(lambda: not scheduler.running, timeout_s=60)
        assert len((await on.client.generate([1, 2], max_tokens=5, ignore_eos=True).result()).token_ids) == 5
        with pytest.raises(grpc.aio.AioRpcError, match=r"has read nothing for 0\.5 s") as refusal:
            await call_to_its_end(call)
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def call_to_its_end(call: grpc.aio.UnaryStreamCall) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass
