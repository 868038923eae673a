"""Memory that is not there and numbers that are none: on the executor's device, in a row, in the pool of blocks.

Owns: the rows of the table about what a step or the pool cannot hold. Must not know: how the product makes room.
"""

import asyncio
import time

import grpc.aio
import pytest

from chaos.faulty_backends import MOST_TOKENS_OF_A_STEP
from chaos.harness import Oracle, Stream, assert_equal_to_undisturbed, deployed, jobs, until_quiet
from headway.client import OverloadedError
from headway_proto import admin_pb2, admin_pb2_grpc

STEP = ("--backend-option", "step_base_us=10000")
SIMULATED = ("--backend", "simulated", *STEP)


@pytest.mark.chaos_full
async def test_an_executor_out_of_memory(row, rng):
    row.about(
        f"a device that holds no step of more than {MOST_TOKENS_OF_A_STEP} tokens (StepOutOfMemoryError), 16 streams",
        "shrink and retry",
    )
    async with deployed(executor=SIMULATED, faulty_backend="SmallDevice") as (processes, client):
        streams = jobs(16, rng, prompt=(40, 200), output=(40, 80))
        await asyncio.gather(*(stream.follow(client) for stream in streams))
        budget = (await client.status()).max_num_batched_tokens
        refused = sum(
            "StepOutOfMemoryError" in line for _, line in processes.processes["executor"].lines if "epoch lost" in line
        )
        row.note(f"{assert_equal_to_undisturbed(streams, Oracle())} tokens equal")
        row.note(f"{refused} steps refused; steps of at most {budget} tokens from then on")
    assert budget <= MOST_TOKENS_OF_A_STEP


async def test_nan_in_one_row(row, rng):
    row.about("NaN logits in one row of 17", "that request ERROR, its blocks not cached, neighbours equal")
    poison, oracle = 402, Oracle()
    options = (*SIMULATED, "--backend-option", f"nan_row_token={poison}")
    async with deployed(executor=options) as (_, client):
        # Neighbours that never come across the token themselves.
        neighbours = [
            stream for stream in jobs(24, rng)
            if poison not in [*stream.prompt, *oracle.expected(stream.prompt, stream.max_tokens, stream.seed)]
        ][:16]  # fmt: skip
        following = [asyncio.create_task(stream.follow(client)) for stream in neighbours]
        sick = [*range(10, 73), poison]
        before = await client.status()
        result = await client.generate(sick, max_tokens=50, ignore_eos=True).result()
        again = await client.generate(sick, max_tokens=50, ignore_eos=True).result()
        await asyncio.gather(*following)
        await until_quiet(client)
        cached = (await client.status()).num_prefix_hit_tokens - before.num_prefix_hit_tokens
        completion = result.completions[0]
        row.note(
            f"{completion.finish_reason}: {completion.error}; {again.cached_tokens} of its tokens found cached later"
        )
        row.note(f"{assert_equal_to_undisturbed(neighbours, oracle)} tokens of 16 neighbours equal")
        assert completion.finish_reason == "error"
        assert completion.token_ids == []
        assert again.cached_tokens == 0
        assert again.completions[0].finish_reason == "error"
        assert cached >= 0


@pytest.mark.chaos_full
async def test_a_full_pool(row, rng):
    row.about(
        "4 times the load that the pool of blocks holds, queue of 64",
        "bounded preemption; excess RESOURCE_EXHAUSTED + RetryInfo within 50 ms",
    )
    # 64 blocks of 16 tokens, about 16 requests of 64 tokens.
    pool = (*SIMULATED, "--num-kv-blocks", "64", "--max-model-len", "512")
    async with deployed(executor=pool, scheduler=("--max-num-waiting", "64")) as (processes, client):
        streams = jobs(64, rng, prompt=(16, 32), output=(40, 80))
        following = [asyncio.create_task(stream.follow(client)) for stream in streams]
        await asyncio.sleep(0.3)
        async with grpc.aio.insecure_channel(processes.grpc_addresses["gateway"]) as channel:
            refused_s, advice = await _excess(client, admin_pb2_grpc.AdminStub(channel))
        await asyncio.gather(*following)
        preemptions = [stream.preemptions for stream in streams]
        row.note(f"{assert_equal_to_undisturbed(streams, Oracle())} tokens equal")
        row.note(f"{sum(preemptions)} preemptions of {len(streams)} requests, at most {max(preemptions)} of one")
        row.note(f"{len(refused_s)} refused within {max(refused_s) * 1e3:.0f} ms, told to retry in {min(advice):g} s")
    assert max(preemptions) <= 8
    assert len(refused_s) >= 20
    assert max(refused_s) <= 0.05
    assert min(advice) > 0


async def _excess(client, admin) -> tuple[list[float], list[float]]:
    """Fill the queue, hold it full by a pause, and knock: how long refusals took, and when to come again."""
    await admin.Pause(admin_pb2.PauseRequest())
    fillers = [asyncio.create_task(Stream([5 + n % 300] * 20, 40, n).follow(client)) for n in range(96)]
    await asyncio.sleep(1)
    refused_s, advice = [], []
    for _ in range(30):
        started = time.monotonic()
        with pytest.raises(OverloadedError) as refusal:
            await client.generate([5] * 20, max_tokens=40, timeout_s=5).result()
        refused_s.append(time.monotonic() - started)
        advice.append(refusal.value.retry_after_s or 0.0)
    await admin.Resume(admin_pb2.ResumeRequest())
    for task in fillers:
        task.cancel()
    await asyncio.gather(*fillers, return_exceptions=True)
    return refused_s, advice
