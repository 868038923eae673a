"""Classes and objectives from a client's request to the scheduler's core, and what becomes of who comes too late."""

import asyncio
import time
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2

import headway
from headway import AsyncClient
from headway.client import GenerationResult, HeadwayError, OverloadedError
from headway_executor.backend import BackendConfig
from headway_executor.backends.simulated import SimulatedBackend
from headway_proto import generation_pb2 as api
from headway_proto import generation_pb2_grpc as api_grpc
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.core.state.request import Request
from refusals import retry_after_s, status_of
from threaded_headway import RunningHeadway, running

DEMO = Path(headway.__file__).parent / "demo_model"
PROMPT = [5, 6, 7]
# Steps of 2 ms: a request of 200 tokens takes 0.4 s.
CONFIG = BackendConfig(
    model=str(DEMO), block_size=16, num_kv_blocks=200, max_num_seqs=8, options={"step_base_us": "2000"}
)
ONE_AT_A_TIME = SchedulerLimits(max_num_seqs=1, shed_late=True)


async def until_running(engine: RunningHeadway, count: int) -> None:
    deadline = time.monotonic() + 5
    while engine.engine.fleet.cells[0].core is None or engine.engine.fleet.cells[0].core.num_running < count:
        assert time.monotonic() < deadline, "it does not start"
        await asyncio.sleep(0.001)


async def test_who_comes_too_late_is_refused_with_advice_and_others_are_served(tmp_path: Path) -> None:
    with running(tmp_path, DEMO, SimulatedBackend(), CONFIG, ONE_AT_A_TIME) as served:
        async with AsyncClient(served.address) as client:
            await client.wait_ready(20)
            long = asyncio.ensure_future(client.generate(PROMPT, max_tokens=200, ignore_eos=True).result())
            await until_running(served, 1)
            started = time.monotonic()
            patient = [
                asyncio.ensure_future(
                    client.generate(PROMPT, max_tokens=5, ignore_eos=True, ttft_slo_ms=ttft_slo_ms).result()
                )
                for ttft_slo_ms in (0, 60_000)
            ]
            with pytest.raises(OverloadedError) as refused:
                await client.generate(PROMPT, max_tokens=5, ttft_slo_ms=50).result()
            assert time.monotonic() - started >= 0.04
            assert not long.done(), "it is told when it is too late, not when its turn comes"
            results = await asyncio.gather(long, *patient)
        core = served.core_when_quiet()
        assert core.counters.num_finished == 4
        assert core.pool.num_free == core.pool.num_blocks
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused.value.message == "the first token can no longer come within its objective (ttft_slo_ms)"
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s >= 1
    assert [len(result.token_ids) for result in results] == [200, 5, 5]


async def test_the_refusal_is_status_details_that_machines_read(tmp_path: Path) -> None:
    with running(tmp_path, DEMO, SimulatedBackend(), CONFIG, ONE_AT_A_TIME) as served:
        async with AsyncClient(served.address) as client, grpc.aio.insecure_channel(served.address) as channel:
            await client.wait_ready(20)
            long = client.generate(PROMPT, max_tokens=200, ignore_eos=True)
            long_result = asyncio.ensure_future(long.result())
            await until_running(served, 1)
            request = api.GenerateRequest(
                token_ids=api.TokenIds(ids=PROMPT), sampling=api.SamplingParams(max_tokens=5), ttft_slo_ms=20
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await anext(aiter(api_grpc.GenerationStub(channel).Generate(request)))
            assert len((await long_result).token_ids) == 200
    error = refused.value
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    _, reason = status_of(error).details
    info = error_details_pb2.ErrorInfo()
    assert (retry_after_s(error) or 0) >= 1
    assert reason.Unpack(info)
    assert info.domain == "headway"
    assert info.reason


async def test_of_two_continuations_the_one_that_has_begun_goes_on(tmp_path: Path) -> None:
    with running(tmp_path, DEMO, SimulatedBackend(), CONFIG, ONE_AT_A_TIME) as served:
        async with AsyncClient(served.address) as client:
            await client.wait_ready(20)
            result = await client.generate(PROMPT, max_tokens=100, ignore_eos=True, ttft_slo_ms=50, n=2).result()
    first, second = result.completions
    assert (len(first.token_ids), first.finish_reason) == (100, "length")
    assert (len(second.token_ids), second.finish_reason) == (0, "error")
    assert "ttft_slo_ms" in second.error


async def test_without_shedding_the_late_are_served_last(tmp_path: Path) -> None:
    limits = SchedulerLimits(max_num_seqs=1)
    with running(tmp_path, DEMO, SimulatedBackend(), CONFIG, limits) as served:
        async with AsyncClient(served.address) as client:
            await client.wait_ready(20)
            ends: list[str] = []

            async def generate(name: str, max_tokens: int, ttft_slo_ms: int = 0) -> None:
                result = await client.generate(
                    PROMPT, max_tokens=max_tokens, ignore_eos=True, ttft_slo_ms=ttft_slo_ms
                ).result()
                assert len(result.token_ids) == max_tokens
                ends.append(name)

            calls = [asyncio.ensure_future(generate("long", 150))]
            await until_running(served, 1)
            calls.append(asyncio.ensure_future(generate("late", 5, ttft_slo_ms=20)))
            await asyncio.sleep(0.1)
            calls.append(asyncio.ensure_future(generate("patient", 5)))
            await asyncio.gather(*calls)
    assert ends == ["long", "patient", "late"]


@pytest.mark.parametrize(("word", "priority"), [("realtime", 1), ("high", 2), ("normal", 3), ("low", 4), (None, 3)])
async def test_class_tenant_and_objectives_reach_the_core(tmp_path: Path, word: str | None, priority: int) -> None:
    limits = SchedulerLimits(default_itl_slo_ms=77, order="priority")
    with running(tmp_path, DEMO, SimulatedBackend(), CONFIG, limits) as served:
        async with AsyncClient(served.address) as client:
            await client.wait_ready(20)
            options = {} if word is None else {"priority": word, "itl_slo_ms": 33, "ttft_slo_ms": 4444, "tenant": "t"}
            stream = client.generate(PROMPT, max_tokens=400, ignore_eos=True, **options)  # type: ignore[arg-type]
            result = asyncio.ensure_future(stream.result())
            await until_running(served, 1)
            assert served.engine.fleet.cells[0].core is not None
            (request,) = served.engine.fleet.cells[0].core.requests()
            assert isinstance(request, Request)
            stream.cancel()
            await asyncio.wait([result])
            assert isinstance(result.exception(), HeadwayError)
    new = request.new
    assert new.priority == priority
    if word is None:
        assert (new.ttft_slo_ms, new.itl_slo_ms, new.tenant, request.itl_slo_ms) == (0, 0, "", 77)
    else:
        assert (new.ttft_slo_ms, new.itl_slo_ms, new.tenant, request.itl_slo_ms) == (4444, 33, "t", 33)


async def test_a_realtime_request_overtakes_and_takes_the_row_of_a_low_one(tmp_path: Path) -> None:
    limits = SchedulerLimits(max_num_seqs=1, order="priority")
    with running(tmp_path, DEMO, SimulatedBackend(), CONFIG, limits) as served:
        async with AsyncClient(served.address) as client:
            await client.wait_ready(20)
            low = asyncio.ensure_future(
                client.generate(PROMPT, max_tokens=200, ignore_eos=True, priority="low").result()
            )
            await until_running(served, 1)
            normal = asyncio.ensure_future(client.generate(PROMPT, max_tokens=50, ignore_eos=True).result())
            realtime = await client.generate(PROMPT, max_tokens=5, ignore_eos=True, priority="realtime").result()
            assert not low.done()
            results = [realtime, *await asyncio.gather(normal, low)]
    assert [len(result.token_ids) for result in results] == [5, 50, 200]
    assert [num_preemptions(result) > 0 for result in (results[0], results[2])] == [False, True]


def num_preemptions(result: GenerationResult) -> int:
    timings = result.completions[0].timings
    assert timings is not None
    return timings.preemptions
