"""Whoever leaves, however: the blocks come back within a step or two, and the neighbours notice nothing."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import headway
from headway.client import AsyncClient, DeadlineError, HeadwayError
from headway_executor.backend import BackendConfig
from headway_executor.backends.simulated import SimulatedBackend
from headway_scheduler.core.state.limits import SchedulerLimits
from threaded_headway import RunningHeadway, running

DEMO_MODEL = Path(headway.__file__).with_name("demo_model")
LIMITS = SchedulerLimits(max_num_batched_tokens=64, max_num_seqs=16)
STEP_US = 4000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningHeadway]:
    config = BackendConfig(
        model=str(DEMO_MODEL),
        num_kv_blocks=128,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        options={"step_base_us": str(STEP_US)},
    )
    with running(tmp_path, DEMO_MODEL, SimulatedBackend(), config, LIMITS) as server:
        yield server


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (what it waits for happens in other threads)
            await asyncio.sleep(0.001)


async def test_cancel_in_prefill_and_in_decode_frees_every_block(server: RunningHeadway) -> None:
    engine = server.engine
    async with AsyncClient(server.address) as client:
        await client.wait_ready(20)
        core = engine.fleet.cells[0].core
        assert core is not None
        neighbour = asyncio.create_task(
            client.generate([7] * 20, max_tokens=200, temperature=0.0, ignore_eos=True).result()
        )
        # 900 tokens are 15 chunks: cancelled while the prompt is under way.
        prefilling = client.generate(list(range(100, 1000)), max_tokens=50, temperature=0.0)
        task = asyncio.create_task(prefilling.result())
        await wait_for(lambda: core.num_running == 2)
        prefilling.cancel()
        await wait_for(lambda: core.num_running == 1)
        with suppress(HeadwayError):
            await task

        decoding = client.generate([9] * 20, max_tokens=900, temperature=0.0, ignore_eos=True)
        received = 0
        async for delta in decoding:
            received += len(delta.token_ids)
            if received >= 5:
                steps = core.counters.num_steps
                decoding.cancel()
                break
        await wait_for(lambda: core.num_running == 1)
        # The way back from client to scheduler takes a few milliseconds; it takes no more than a few steps.
        assert core.counters.num_steps - steps <= 10
        result = await neighbour
        assert len(result.token_ids) == 200
    assert server.core_when_quiet().pool.num_free == 128


async def received_before_the_deadline(client: AsyncClient, timeout_s: float) -> int:
    num_received = 0
    try:
        async for delta in client.generate([9] * 20, max_tokens=900, ignore_eos=True, timeout_s=timeout_s):
            num_received += len(delta.token_ids)
    except DeadlineError:
        return num_received
    raise AssertionError("the request ended before its deadline")


async def test_a_deadline_frees_every_block(server: RunningHeadway) -> None:
    async with AsyncClient(server.address) as client:
        await client.wait_ready(20)
        timeout_s = 0.3
        # On a busy machine a deadline may pass before the request has reached the scheduler, which would show nothing.
        while not await received_before_the_deadline(client, timeout_s):
            timeout_s *= 2
        await wait_for(lambda: server.engine.num_unfinished == 0)
    assert server.core_when_quiet().pool.num_free == 128


async def test_a_client_that_vanishes_frees_every_block(server: RunningHeadway) -> None:
    client = AsyncClient(server.address)
    await client.wait_ready(20)
    tasks = [asyncio.create_task(client.generate([9] * 20, max_tokens=900, ignore_eos=True).result()) for _ in range(8)]
    await wait_for(lambda: server.engine.num_unfinished == 8)
    await client.close()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, BaseException)
    await wait_for(lambda: server.engine.num_unfinished == 0)
    assert server.core_when_quiet().pool.num_free == 128
