"""Whoever stops without ending: executors and clients that sleep, clients that leave, deadlines that pass.

Owns: the rows of the table about time that is lost. Must not know: how the product notices.
"""

import asyncio
import contextlib
import gc
import signal
import statistics
import time

import grpc
import grpc.aio
import pytest

from chaos.harness import (
    Oracle,
    Traffic,
    assert_equal_to_undisturbed,
    deployed,
    jobs,
    percentile,
    until_quiet,
    until_running,
)
from headway.client import DeadlineError, HeadwayError, StreamCancelledError
from headway_proto import generation_pb2, generation_pb2_grpc

SIMULATED = ("--backend", "simulated", "--backend-option", "step_base_us=20000")
BY_SIZE = [pytest.param("quick", marks=pytest.mark.chaos_quick), pytest.param("full", marks=pytest.mark.chaos_full)]


@pytest.mark.chaos_full
@pytest.mark.parametrize("sleep_s", [1.0, 5.0])
async def test_an_executor_that_sleeps_is_waited_for(sleep_s, row, rng):
    row.about(f"SIGSTOP the executor for {sleep_s:g} s, 16 streams", "waits; streams go on equal")
    async with deployed(executor=SIMULATED) as (processes, client):
        async with Traffic(client, 16, rng) as traffic:
            epoch = (await client.status()).epoch
            processes.signal("executor", signal.SIGSTOP)
            await asyncio.sleep(sleep_s)
            processes.signal("executor", signal.SIGCONT)
            delay_s = await traffic.recovered(time.monotonic())
            epochs = (await client.status()).epoch - epoch
        row.note(traffic.assert_exact(Oracle()))
        row.note(f"next token {delay_s:.2f} s after it woke; {epochs} new epochs")
    assert delay_s <= 2.0


@pytest.mark.chaos_full
@pytest.mark.parametrize("sleep_s", [3.0, 30.0])
async def test_an_executor_that_sleeps_long_is_replaced_and_fenced(sleep_s, row, rng):
    row.about(
        f"SIGSTOP the executor for {sleep_s:g} s while a second one starts, 16 streams",
        "replaced; the revived one is fenced",
    )
    async with deployed(executor=SIMULATED) as (processes, client):
        async with Traffic(client, 16, rng) as traffic:
            processes.signal("executor", signal.SIGSTOP)
            slept_at = time.monotonic()
            processes.start("executor-2")
            ready_at = await processes.ready("executor-2")
            replaced_s = await traffic.recovered(ready_at)
            await asyncio.sleep(max(0.0, slept_at + sleep_s - time.monotonic()))
            epoch = (await client.status()).epoch
            processes.signal("executor", signal.SIGCONT)
            woken_at = time.monotonic()
            await asyncio.sleep(2)
            longest = max(
                (after - before for stream in traffic.live.values()
                 for before, after in zip(stream.times, stream.times[1:], strict=False) if after > woken_at),
                default=0.0,
            )  # fmt: skip
            epochs = (await client.status()).epoch - epoch
        row.note(traffic.assert_exact(Oracle()))
        row.note(f"next token {replaced_s:.2f} s after the second was ready")
        row.note(f"after the first woke: {epochs} new epochs, longest gap {longest * 1e3:.0f} ms")
    assert replaced_s <= 2.0
    assert epochs == 0


# ------------------------------------------------------------------------------------------------------------ clients


async def _heavy_streams(address: str, count: int) -> tuple[grpc.aio.Channel, list]:
    """Streams of many log probabilities, so that the windows of those that nobody reads fill."""
    channel = grpc.aio.insecure_channel(address, options=(("grpc.http2.lookahead_bytes", 1024),))
    stub = generation_pb2_grpc.GenerationStub(channel)
    sampling = {"max_tokens": 900, "ignore_eos": True, "logprobs": 20}
    requests = [generation_pb2.GenerateRequest(text=f"stalled {n}", sampling=sampling) for n in range(count)]
    return channel, [stub.Generate(request) for request in requests]


async def _read(call) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        while await call.read() is not grpc.aio.EOF:
            pass


async def _gaps(client, rng, count: int) -> list[float]:
    streams = jobs(count, rng, prompt=(8, 16), output=(150, 150))
    await asyncio.gather(*(stream.follow(client) for stream in streams))
    assert_equal_to_undisturbed(streams, Oracle())
    # Not the first: it holds the arrival of the others' prompts.
    return [gap for stream in streams for gap in stream.gaps()[10:]]


@pytest.mark.chaos_full
async def test_clients_that_do_not_read(row, rng):
    row.about("half of 32 clients do not read", "the others' p99 gap at most 1.2x")
    async with deployed(executor=SIMULATED) as (processes, client):
        alone, beside = [], []
        for turn in range(6):  # by turns, since the machine changes its speed
            channel, calls = await _heavy_streams(processes.grpc_addresses["gateway"], 16)
            readers = [asyncio.create_task(_read(call)) for call in calls] if turn % 2 else []
            (alone if readers else beside).append(percentile(await _gaps(client, rng, 16), 0.99))
            for call in calls:
                call.cancel()
            await asyncio.gather(*readers)
            await channel.close()
            await until_quiet(client)
        # The quietest turn of each: what else runs on the machine can only add.
        quiet, disturbed = min(alone) * 1e3, min(beside) * 1e3
        row.note(
            f"p99 gap {quiet:.1f} ms with 32 readers, {disturbed:.1f} ms with 16 of them stalled: {disturbed / quiet:.2f}x"
        )
    assert disturbed <= quiet * 1.2 + 1


@pytest.mark.parametrize("size", BY_SIZE)
async def test_open_and_cancel(size, row, rng):
    # What is remembered of ended requests has a bound, which 20,000 reach: then more must not take more.
    count, warm = (500, 300) if size == "quick" else (10_000, 20_000)
    row.about(f"{count} streams opened and cancelled behind {warm} others", "memory +5 MiB at most")
    async with deployed(executor=("--backend", "simulated", "--backend-option", "step_base_us=2000")) as (
        processes,
        client,
    ):
        await _open_and_cancel(client, warm)
        await until_quiet(client)
        before = {name: process.rss_mib() for name, process in processes.processes.items()}
        started = time.monotonic()
        await _open_and_cancel(client, count)
        took = time.monotonic() - started
        await until_quiet(client)
        gc.collect()
        grown = {name: process.rss_mib() - before[name] for name, process in processes.processes.items()}
        row.note(", ".join(f"{name} {mib:+.1f} MiB" for name, mib in grown.items()) + f" ({took:.0f} s)")
    assert max(grown.values()) <= 5


@pytest.mark.chaos_full
async def test_steps_until_a_cancelled_stream_is_gone(row, rng):
    row.about("8 streams cancelled, with steps of 100 ms", "abort within 2 steps")
    steps = await _steps_until_aborted(rng)
    row.note(f"freed {statistics.median(steps):g} steps after cancel() in the median, {max(steps)} at most")
    assert max(steps) <= 2


async def _open_and_cancel(client, count: int, at_once: int = 32) -> None:
    async def one(number: int) -> None:
        for place in range(number, count, at_once):
            stream = client.generate([7 + place % 300] * 20, max_tokens=500, ignore_eos=True)
            if place % 3:
                await anext(stream)
            stream.cancel()
            with contextlib.suppress(StreamCancelledError):
                await stream.result()

    await asyncio.gather(*(one(number) for number in range(at_once)))


async def _steps_until_aborted(rng) -> list[int]:
    """With steps of 100 ms, longer than a question takes: those between a cancel and free blocks."""
    steps = []
    slow = ("--backend", "simulated", "--backend-option", "step_base_us=100000")
    async with (
        deployed(executor=slow) as (_, client),
        client.generate([9] * 20, max_tokens=900, ignore_eos=True) as beside,
    ):
        await anext(beside)
        for _ in range(8):
            stream = client.generate([8] * 20, max_tokens=500, ignore_eos=True)
            await anext(stream)
            await asyncio.sleep(rng.uniform(0, 0.1))
            before = (await client.status()).num_steps
            stream.cancel()
            steps.append(await until_running(client, 1) - before)
    return steps


# ---------------------------------------------------------------------------------------------------------- deadlines

PHASES = {
    "waiting": {"prompt": [5] * 30, "max_tokens": 100},
    "prefill": {"prompt": [6] * 900, "max_tokens": 20},  # 57 chunks of 16 tokens
    "decode": {"prompt": [7] * 4, "max_tokens": 900},
    "no executor": {"prompt": [8] * 4, "max_tokens": 900},
}


@pytest.mark.parametrize(
    "phase", [one if one == "decode" else pytest.param(one, marks=pytest.mark.chaos_full) for one in PHASES]
)
async def test_deadlines(phase, row):
    row.about(f"a deadline of 0.5 s that passes: {phase}", "DEADLINE_EXCEEDED at most 100 ms late, blocks freed")
    scheduler = ["--max-num-batched-tokens", "16", *(["--max-num-seqs", "1"] if phase == "waiting" else [])]
    async with deployed(executor=SIMULATED, scheduler=scheduler) as (processes, client):
        holder = client.generate([3] * 4, max_tokens=900, ignore_eos=True)
        await anext(holder)
        left = 1
        if phase == "no executor":
            processes.kill("executor")
        late, freed = [], []
        for attempt in range(5):
            asked = PHASES[phase]
            started = time.monotonic()
            with pytest.raises(DeadlineError):
                await client.generate(
                    [10 + attempt, *asked["prompt"]], max_tokens=asked["max_tokens"], ignore_eos=True, timeout_s=0.5
                ).result()
            late.append(time.monotonic() - started - 0.5)
            if phase != "no executor":
                await until_running(client, left)
                freed.append(time.monotonic() - started - 0.5)
        holder.cancel()
        with contextlib.suppress(HeadwayError):
            await holder.result()
        if phase == "no executor":
            processes.start("executor")
            await processes.ready("executor")
        row.note(
            f"{max(late) * 1e3:.0f} ms late at most" + (f", freed {max(freed) * 1e3:.0f} ms after it" if freed else "")
        )
    assert max(late) <= 0.1
    assert max(freed, default=0.0) <= 0.2
