"""The VllmEngine service of a gateway in this process, between a fake scheduler and the service's own stubs."""

import asyncio
import contextlib
import hashlib
import io
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

pytest.importorskip("smg_grpc_proto", reason="needs the stubs of VllmEngine: the extra smg")

from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from e2e.test_gateway_serving import DEMO, TEXT_MODEL, Stage, eventually, expected_tokens, served, spelling
from headway.client import AsyncClient
from headway_executor.backend import BackendConfig
from headway_executor.backends.simulated import SimulatedBackend
from headway_gateway.server import VLLM_ENGINE_SERVICE
from headway_proto import generation_pb2 as api
from headway_proto.ingress import FINISH_ERROR, PRIORITY_HIGH, REJECT_INVALID, REJECT_OVERLOADED, Rejected
from headway_scheduler.core.state.limits import SchedulerLimits
from threaded_headway import running

SLOW = 0.01


def stub(on: Stage) -> vllm_engine_pb2_grpc.VllmEngineStub:
    return vllm_engine_pb2_grpc.VllmEngineStub(on.channel)


def request(request_id: str = "", *, stream: bool = True, **sampling) -> vllm.GenerateRequest:
    return vllm.GenerateRequest(
        request_id=request_id,
        tokenized=vllm.TokenizedInput(input_ids=[3, 4, 5]),
        sampling_params=vllm.SamplingParams(**{"max_tokens": 4, "ignore_eos": True} | sampling),
        stream=stream,
    )


async def answers(on: Stage, sent: vllm.GenerateRequest, **call) -> list[vllm.GenerateResponse]:
    return [answer async for answer in stub(on).Generate(sent, **call)]


@contextlib.contextmanager
def refused(code: grpc.StatusCode, message: str):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    assert caught.value.code() is code
    assert re.search(message, caught.value.details())


async def test_a_stream_and_a_whole_answer_have_the_same_tokens() -> None:
    async with served() as (on, _):
        streamed = await answers(on, request(seed=7, n=2))
        whole = await answers(on, request(seed=7, n=2, logprobs=2, stream=False))
    by_index: dict[int, list[int]] = {0: [], 1: []}
    for answer in streamed:
        by_index[answer.chunk.index] += answer.chunk.token_ids
    assert by_index == {0: expected_tokens(7, 4), 1: expected_tokens(8, 4)}
    ends = [answer.complete for answer in streamed if answer.HasField("complete")]
    assert [(end.finish_reason, end.prompt_tokens, end.completion_tokens) for end in ends] == [("length", 3, 4)] * 2
    completes = sorted((answer.complete for answer in whole), key=lambda complete: complete.index)
    assert [list(complete.output_ids) for complete in completes] == [by_index[0], by_index[1]]
    assert [list(complete.output_logprobs.token_ids) for complete in completes] == [by_index[0], by_index[1]]
    assert all(len(complete.output_logprobs.top_logprobs) == 4 for complete in completes)


async def test_text_and_metadata_reach_the_scheduler() -> None:
    async with served() as (on, scheduler):
        sent = vllm.GenerateRequest(text="A dictionary", sampling_params=vllm.SamplingParams(max_tokens=1))
        metadata = (("headway-priority", "high"), ("headway-tenant", "acme"), ("headway-ttft-slo-ms", "250"))
        (answer,) = await answers(on, sent, metadata=metadata)
        (submit,) = scheduler.submits
    assert answer.complete.prompt_tokens == len(TEXT_MODEL.encode("A dictionary")) == submit.num_prompt_tokens
    assert (submit.priority, submit.tenant, submit.ttft_slo_ms) == (PRIORITY_HIGH, "acme", 250)


@pytest.mark.parametrize(("keeps", "reason"), [(False, "length"), (True, "stop")])
async def test_stop_strings_are_looked_for_in_text_with_or_without_special_tokens(keeps: bool, reason: str) -> None:
    spelled = [*TEXT_MODEL.encode("yes"), *TEXT_MODEL.encode("<|im_end|>"), *TEXT_MODEL.encode("no")]
    async with served(next_token=lambda submit, index: spelled[index]) as (on, _):
        sampling = {"stop": ["<|im_end|>"], "max_tokens": len(spelled), "skip_special_tokens": not keeps}
        (answer,) = await answers(on, request(stream=False, **sampling))
    assert answer.complete.finish_reason == reason
    assert answer.complete.matched_stop_str == ("<|im_end|>" if keeps else "")


async def test_the_tokens_of_a_stop_string_are_told_and_none_behind_them() -> None:
    next_token, _ = spelling("one two three four")
    async with served(next_token=next_token) as (on, _):
        (answer,) = await answers(on, request(stream=False, stop=[" three"], max_tokens=20, ignore_eos=False))
    assert answer.complete.matched_stop_str == " three"
    assert TEXT_MODEL.decode(answer.complete.output_ids) == "one two three"


async def test_refusals_have_a_status_and_name_the_callers_fields() -> None:
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    async with served() as (on, scheduler):
        with refused(grpc.StatusCode.UNIMPLEMENTED, "backend 'fake' cannot constrain outputs; allowed: unset$"):
            await answers(on, request(regex="a+", ignore_eos=False))
        with refused(invalid, "^sampling_params.ignore_eos: True is not allowed together with regex"):
            await answers(on, request(regex="a+", ignore_eos=True))
        with refused(invalid, "^sampling_params.structural_tag: Object missing required field `structures`; allowed: "):
            await answers(on, request(structural_tag="{}"))
        with refused(invalid, "^sampling_params.top_p: 1.5 is not allowed; allowed: above 0, up to 1$"):
            await answers(on, request(top_p=1.5))
        with refused(invalid, r"^tokenized.input_ids\[0\]: 4096 is not a token id of this model"):
            await answers(on, vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[4096])))
        with refused(invalid, r"^sampling_params.max_tokens: 1022 is not allowed; allowed: at most 1021"):
            await answers(on, request(max_tokens=1022))
        with refused(invalid, "^input: there is none; allowed: one of text, token_ids, chat$"):
            await answers(on, vllm.GenerateRequest())
        scheduler.reject = lambda _: Rejected(handle=0, reason=REJECT_INVALID, field="sampling.seed", message="no")
        with refused(invalid, "^sampling_params.seed: no$"):
            await answers(on, request())
        scheduler.reject = lambda _: Rejected(handle=0, reason=REJECT_OVERLOADED, message="full")
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "^full$"):
            await answers(on, request())


async def test_a_caller_that_leaves_and_one_whose_deadline_passes_free_their_sequences() -> None:
    async with served(step_interval_s=SLOW) as (on, scheduler):
        call = stub(on).Generate(request(max_tokens=1000))
        await call.read()
        call.cancel()
        await eventually(lambda: not scheduler.running)
        with refused(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline|Deadline"):
            await answers(on, request(max_tokens=1000), timeout=0.3)
        await eventually(lambda: not scheduler.running)
        assert len(scheduler.aborts) == 2


async def test_abort_ends_a_request_of_this_service_and_no_other() -> None:
    async with served(step_interval_s=SLOW) as (on, scheduler):
        others = asyncio.create_task(on.client.generate([1, 2], request_id="native", max_tokens=40).result())
        streaming = asyncio.create_task(answers(on, request("mine", max_tokens=1000)))
        await eventually(lambda: len(scheduler.running) == 2)
        await stub(on).Abort(vllm.AbortRequest(request_ids=["native", "nobody", "mine"]))
        last = (await streaming)[-1].complete
        assert last.finish_reason == "abort"
        assert len((await others).token_ids) == 40
    assert [call.request_id for call in scheduler.admin_calls if call.method == "cancel"] == ["mine"]


async def test_an_output_that_cannot_be_run_ends_the_call() -> None:
    async with served(step_interval_s=SLOW) as (on, scheduler):
        streaming = asyncio.create_task(answers(on, request("bad", max_tokens=1000)))
        await eventually(lambda: scheduler.running)
        await scheduler.end("bad", FINISH_ERROR, "NaN logits")
        with refused(grpc.StatusCode.INTERNAL, "output 0 could not be run: NaN logits"):
            await streaming


async def test_facts_about_model_server_and_load() -> None:
    async with served(step_interval_s=SLOW) as (on, scheduler):
        model = await stub(on).GetModelInfo(vllm.GetModelInfoRequest())
        assert (model.served_model_name, model.is_generation, model.supports_vision) == ("fake", True, False)
        assert (model.max_context_length, model.max_req_input_len, model.vocab_size) == (1024, 1023, 4096)
        assert (model.model_type, list(model.architectures)) == ("llama", ["LlamaForCausalLM"])
        streaming = asyncio.create_task(answers(on, request("r", max_tokens=1000)))
        await eventually(lambda: scheduler.running)
        server = await stub(on).GetServerInfo(vllm.GetServerInfoRequest())
        assert (server.server_type, server.active_requests, server.data_parallel_size) == ("headway", 1, 1)
        assert server.last_receive_timestamp > 1e9 > server.uptime_seconds > 0
        loads = await stub(on).GetLoads(vllm.GetLoadsRequest())
        assert [load.num_running_reqs for load in loads.loads] == [1]
        await stub(on).Abort(vllm.AbortRequest(request_ids=["r"]))
        await streaming


async def test_health_is_told_through_both_services() -> None:
    async with served(config={"silence_timeout_s": 0.5}) as (on, scheduler):
        assert await on.health(VLLM_ENGINE_SERVICE) == health_pb2.HealthCheckResponse.SERVING
        assert (await stub(on).HealthCheck(vllm.HealthCheckRequest())).healthy
        await scheduler.stop()
        scheduler._tasks = []
        await eventually(lambda: on.server.client.model is None)
        await asyncio.sleep(0)
        with refused(grpc.StatusCode.UNAVAILABLE, "no scheduler with a model"):
            await stub(on).HealthCheck(vllm.HealthCheckRequest())
        scheduler._tasks = []
        await scheduler.start()
        await on.client.wait_ready(3)
        await on.server.drain(0.1)
        told = await stub(on).HealthCheck(vllm.HealthCheckRequest())
        assert (told.healthy, told.message) == (False, "shutting down")


async def test_the_tokenizer_comes_in_pieces_with_a_digest() -> None:
    async with served() as (on, _):
        chunks = [chunk async for chunk in stub(on).GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as files:
        assert files.read("tokenizer.json") == (DEMO / "tokenizer.json").read_bytes()


async def test_the_prefix_cache_is_flushed_but_for_what_is_in_use(tmp_path: Path) -> None:
    backend = BackendConfig(model=str(DEMO), block_size=4, num_kv_blocks=256, options={"step_base_us": "2000"})
    with running(tmp_path, DEMO, SimulatedBackend(), backend, SchedulerLimits()) as headway_server:
        async with (
            AsyncClient(headway_server.address) as client,
            grpc.aio.insecure_channel(headway_server.address) as channel,
        ):
            await client.wait_ready(20)
            engine = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            await client.generate([9] * 40, max_tokens=2).result()
            sent = request("r", max_tokens=900)
            sent.tokenized.input_ids.extend([7] * 20)
            using = engine.Generate(sent)
            await using.read()
            told = await engine.FlushCache(common_pb2.FlushCacheRequest())
            assert not told.success
            assert re.fullmatch(r"\d+ blocks are in use and stay cached; all others were dropped", told.message)
            again = await client.generate([9] * 40, max_tokens=2).result()
            assert again.cached_tokens == 0
            await engine.Abort(vllm.AbortRequest(request_ids=["r"]))
            assert (await engine.FlushCache(common_pb2.FlushCacheRequest(timeout_s=10))).success
            core = headway_server.core_when_quiet()
            assert (core.cache.num_cached, core.pool.num_free) == (0, 256)
            with refused(grpc.StatusCode.INVALID_ARGUMENT, "^timeout_s: -1 is not allowed"):
                await engine.FlushCache(common_pb2.FlushCacheRequest(timeout_s=-1))


async def test_a_subscriber_hears_of_every_block_that_is_stored_and_removed(tmp_path: Path) -> None:
    backend = BackendConfig(model=str(DEMO), block_size=4, num_kv_blocks=256, options={"real_time": "false"})
    limits = SchedulerLimits(prefix_cache_scope="tenant")
    with running(tmp_path, DEMO, SimulatedBackend(), backend, limits, kv_events=True) as headway_server:
        async with (
            AsyncClient(headway_server.address) as client,
            grpc.aio.insecure_channel(headway_server.address) as channel,
            asyncio.timeout(30),
        ):
            await client.wait_ready(20)
            engine = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            await client.generate(list(range(20, 29)), max_tokens=1, tenant="t").result()
            stream = engine.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=7))
            first = await stream.read()
            assert first.sequence_number == 8
            cleared, stored = first.events
            assert cleared.HasField("cleared")
            blocks = stored.stored.blocks
            assert [list(block.token_ids) for block in blocks] == [[20, 21, 22, 23], [24, 25, 26, 27]]
            assert {block.block_size for block in blocks} == {4}
            assert not stored.stored.HasField("parent_block_hash")
            assert stored.stored.cache_salt == "t"
            await client.generate([*range(20, 28), *range(40, 45)], max_tokens=1, tenant="t").result()
            (behind,) = (await stream.read()).events
            assert behind.stored.parent_block_hash == blocks[1].block_hash
            assert [list(block.token_ids) for block in behind.stored.blocks] == [[40, 41, 42, 43]]
            assert (await engine.FlushCache(common_pb2.FlushCacheRequest(timeout_s=5))).success
            removed: set[int] = set()
            while len(removed) < 3:
                for event in (await stream.read()).events:
                    removed |= set(event.removed.block_hashes)
            assert removed == {block.block_hash for block in (*blocks, *behind.stored.blocks)}
            stream.cancel()


async def test_what_is_not_served_says_so() -> None:
    async with served() as (on, _):
        for call in (
            stub(on).StartProfile(common_pb2.StartProfileRequest()),
            stub(on).StopProfile(common_pb2.StopProfileRequest()),
            stub(on).SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()).read(),
        ):
            with refused(grpc.StatusCode.UNIMPLEMENTED, r"\w+ \w+"):
                await call


async def test_embed_is_the_native_call_with_the_checkpoints_pooling(tmp_path: Path) -> None:
    config = BackendConfig(model=str(DEMO), block_size=16, num_kv_blocks=100, max_num_seqs=8)
    with running(tmp_path, DEMO, SimulatedBackend(), config, SchedulerLimits()) as server:
        async with AsyncClient(server.address) as client, grpc.aio.insecure_channel(server.address) as channel:
            await client.wait_ready(20)
            (native,) = (await client.embed([[3, 4, 5]])).embeddings
            calls = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            wanted = vllm.EmbedRequest(request_id="a", tokenized=vllm.TokenizedInput(input_ids=[3, 4, 5]))
            answer = await calls.Embed(wanted)
            for input_ids, words in (
                ([], "tokenized.input_ids: it is empty"),
                ([1 << 31], "2147483648 is not a token"),
            ):
                with refused(grpc.StatusCode.INVALID_ARGUMENT, words):
                    await calls.Embed(vllm.EmbedRequest(tokenized=vllm.TokenizedInput(input_ids=input_ids)))
    assert list(answer.embedding) == list(native.values)
    assert (answer.prompt_tokens, answer.embedding_dim) == (3, len(native.values))


async def test_tokens_roles_and_tenants_apply(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alice generate alices tenant=blue\nbob generate bobs\nops admin opss\n")
    config = {"auth_token_file": str(tokens), "open_health": True}

    def bearing(token: str, *more: tuple[str, str]) -> dict[str, object]:
        return {"metadata": (("authorization", f"Bearer {token}"), *more)}

    async with served(config=config, step_interval_s=SLOW) as (on, scheduler):
        await eventually(lambda: on.server.client.serving)
        health = await stub(on).HealthCheck(vllm.HealthCheckRequest())
        assert health.message in {"serving", "no scheduler with a model"}
        with refused(grpc.StatusCode.UNAUTHENTICATED, "authorization is missing"):
            await answers(on, request())
        with refused(grpc.StatusCode.PERMISSION_DENIED, "the role generate"):
            await answers(on, request(), **bearing("opss"))
        with refused(grpc.StatusCode.PERMISSION_DENIED, "the role admin"):
            await stub(on).SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), **bearing("bobs")).read()
        with refused(grpc.StatusCode.PERMISSION_DENIED, "the role admin"):
            await stub(on).FlushCache(common_pb2.FlushCacheRequest(), **bearing("bobs"))
        assert (await stub(on).FlushCache(common_pb2.FlushCacheRequest(), **bearing("opss"))).success
        spoofing = bearing("alices", ("headway-tenant", "red"))
        await answers(on, request(), **spoofing)
        assert [submit.tenant for submit in scheduler.submits] == ["blue"]
        bobs = asyncio.create_task(answers(on, request("bobs", max_tokens=40), **bearing("bobs")))
        await eventually(lambda: scheduler.running)
        await stub(on).Abort(vllm.AbortRequest(request_ids=["bobs"]), **spoofing)
        assert (await bobs)[-1].complete.finish_reason == "length"
        chunks = [chunk async for chunk in stub(on).GetTokenizer(common_pb2.GetTokenizerRequest(), **spoofing)]
        assert chunks[-1].sha256


async def test_the_service_can_be_left_out() -> None:
    async with served(config={"vllm_engine": "off"}) as (on, _):
        with refused(grpc.StatusCode.UNIMPLEMENTED, "Method not found"):
            await stub(on).HealthCheck(vllm.HealthCheckRequest())
        listed = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = [
            one
            async for one in reflection_pb2_grpc.ServerReflectionStub(on.channel).ServerReflectionInfo(iter([listed]))
        ]
        names = {service.name for service in answer.list_services_response.service}
        assert VLLM_ENGINE_SERVICE not in names
        assert api.DESCRIPTOR.services_by_name["Generation"].full_name in names


def test_a_gateway_without_the_service_imports_none_of_its_stubs() -> None:
    check = "import sys, headway_gateway.process; sys.exit(any(name.startswith('smg') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
