"""Processes that are killed, one after the other, under load: nobody's stream is lost, and none is repeated.

Owns: the rows of the table that begin with kill -9. Must not know: how the product recovers.
"""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import grpc
import grpc.aio
import pytest

from chaos.faulty_backends import DEADLY_TOKEN, DEATHS_FILE_VARIABLE
from chaos.harness import (
    Oracle,
    Traffic,
    assert_equal_to_undisturbed,
    deployed,
    jobs,
    until,
    until_quiet,
    until_running,
)
from e2e.running_server import free_port
from headway.client import Client, HeadwayError
from headway_proto import generation_pb2, generation_pb2_grpc

SIMULATED = ("--backend", "simulated", "--backend-option", "step_base_us=20000")


@pytest.mark.parametrize(
    ("victim", "kills", "num_streams", "within_s"),
    [
        pytest.param("executor", 2, 16, 2.0, marks=pytest.mark.chaos_quick),
        pytest.param("executor", 50, 64, 2.0, marks=pytest.mark.chaos_full),
        pytest.param("scheduler", 20, 64, 3.0, marks=pytest.mark.chaos_full),
    ],
)
async def test_killed_at_random_moments(victim, kills, num_streams, within_s, row, rng):
    row.about(
        f"kill -9 the {victim}, {kills} random moments, {num_streams} streams",
        f"every stream completes equal; next token within {within_s:g} s of the new one being ready",
    )
    oracle, delays, before_ready = Oracle(), [], 0
    async with deployed(executor=SIMULATED) as (processes, client):
        async with Traffic(client, num_streams, rng) as traffic:
            await asyncio.sleep(0.5)
            survivors = {name: process for name, process in processes.processes.items() if name != victim}
            before = {name: (process.rss_mib(), process.num_files()) for name, process in survivors.items()}
            for _ in range(kills):
                await asyncio.sleep(rng.uniform(0, 0.8))
                processes.kill(victim)
                processes.start(victim)
                if rng.random() < 0.2:  # and again, while it is still starting
                    await asyncio.sleep(rng.uniform(0, 0.6))
                    before_ready += processes.processes[victim].said("ready") is None
                    processes.kill(victim)
                    processes.start(victim)
                ready_at = await processes.ready(victim)
                delays.append(await traffic.recovered(ready_at))
            await asyncio.sleep(0.5)
            grown = {
                name: (process.rss_mib() - before[name][0], process.num_files() - before[name][1])
                for name, process in survivors.items()
            }
        row.note(traffic.assert_exact(oracle))
        row.note(f"next token after at most {max(delays):.2f} s, median {sorted(delays)[len(delays) // 2]:.2f} s")
        row.note(f"{before_ready} killed again before they were ready")
        row.note(f"all blocks free {await until_quiet(client):.2f} s after the last")
        row.note(", ".join(f"{name} {mib:+.0f} MiB, {files:+d} files" for name, (mib, files) in grown.items()))
    assert max(delays) <= within_s
    assert max(mib for mib, _ in grown.values()) <= 32
    assert max(files for _, files in grown.values()) <= 4


@pytest.mark.chaos_quick
async def test_killed_under_streams_over_http(row):
    row.about("kill -9 the executor, then the scheduler, 12 streams over HTTP", "every stream completes equal")
    address, prompts = f"127.0.0.1:{free_port()}", [f"Number {number}" for number in range(12)]
    wanted = {"max_tokens": 120, "temperature": 1.0, "seed": 7, "ignore_eos": True}
    async with deployed(executor=SIMULATED, gateway=("--http-address", address)) as (processes, client):
        results = await asyncio.gather(*(client.generate(prompt, **wanted).result() for prompt in prompts))
        begun: set[str] = set()

        async def follow(session: aiohttp.ClientSession, prompt: str) -> str:
            texts, body = [], {"prompt": prompt, "stream": True, **wanted}
            async with session.post(f"http://{address}/v1/completions", json=body) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        begun.add(prompt)
                        texts += [choice["text"] for choice in json.loads(line[6:])["choices"]]
            return "".join(texts)

        async with aiohttp.ClientSession() as session:
            streams = [asyncio.create_task(follow(session, prompt)) for prompt in prompts]
            await until(lambda: len(begun) == len(prompts), 20, "tokens")
            for victim in ("executor", "scheduler"):
                processes.kill(victim)
                processes.start(victim)
                await processes.ready(victim)
                await asyncio.sleep(0.3)
            assert not all(stream.done() for stream in streams), "nobody was disturbed"
            texts = await asyncio.gather(*streams)
    assert texts == [result.text for result in results]
    row.note(f"{len(texts)} streams equal")


async def _read_to_the_end(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def _until_unavailable(call) -> float:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await _read_to_the_end(call)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    return time.monotonic()


@pytest.mark.chaos_full
async def test_killed_gateway(row, rng):
    row.about(
        "kill -9 a gateway, 16 streams and one of 4 continuations on it, and 16 streams on another",
        "client sees UNAVAILABLE within 1 s; its blocks freed within 1 s; resume completes equal",
    )
    oracle = Oracle()
    start = ("scheduler", "executor", "gateway", "gateway-2")
    async with deployed(start=start, executor=SIMULATED) as (processes, client):
        await processes.ready("gateway-2")
        async with processes.client("gateway-2") as other:
            await other.wait_ready(20)
            mine, neighbours, (several,) = (jobs(count, rng, output=(100, 140)) for count in (16, 16, 1))
            asked = {"max_tokens": several.max_tokens, "seed": several.seed, "n": 4, "ignore_eos": True}
            continued = asyncio.create_task(client.generate(several.prompt, **asked).result())
            resumed = [asyncio.create_task(stream.follow(client)) for stream in mine]
            beside = [asyncio.create_task(stream.follow(other)) for stream in neighbours]
            async with grpc.aio.insecure_channel(processes.grpc_addresses["gateway"]) as channel:
                stub = generation_pb2_grpc.GenerationStub(channel)
                request = generation_pb2.GenerateRequest(
                    text="watch me", sampling={"max_tokens": 400, "ignore_eos": True}
                )
                call = stub.Generate(request)
                watched = asyncio.create_task(_until_unavailable(call))
                await until(lambda: all(stream.times for stream in [*mine, *neighbours]), 20, "tokens")
                killed_at = time.monotonic()
                processes.kill("gateway")
                seen_s = await watched - killed_at
            await until_running(other, len(neighbours))
            freed_s = time.monotonic() - killed_at
            processes.start("gateway")
            ready_at = await processes.ready("gateway")
            assert not continued.done()
            await asyncio.gather(*resumed, *beside)
            assert [one.token_ids for one in (await continued).completions] == [
                oracle.expected(several.prompt, several.max_tokens, several.seed + index) for index in range(4)
            ]
            row.note(f"UNAVAILABLE after {seen_s * 1e3:.0f} ms; blocks freed after {freed_s * 1e3:.0f} ms")
            row.note(
                f"{assert_equal_to_undisturbed([*mine, *neighbours], oracle)} tokens equal, 16 streams and 4 continuations resumed"
            )
            worst = max((stream.first_after(ready_at) or ready_at) - ready_at for stream in mine)
            row.note(f"next token {worst:.2f} s after the new gateway was ready")
            await until_quiet(other)
    assert seen_s <= 1.0
    assert freed_s <= 1.0


@pytest.mark.chaos_full
async def test_a_group_of_workers_that_is_away(row, rng):
    away_s = 12.0
    row.about(
        f"kill -9 a gateway of 2 workers, and start it again after {away_s:g} s",
        "16 streams complete equal, and so do 8 requests made meanwhile; half by the sync client, half by the async one",
    )
    async with deployed(executor=SIMULATED, gateway=("--workers", "2")) as (processes, client):
        running, meanwhile = jobs(16, rng, output=(200, 240)), jobs(8, rng)
        with Client(processes.grpc_addresses["gateway"]) as threaded, ThreadPoolExecutor(12) as threads:
            threaded.wait_ready(20)
            loop = asyncio.get_running_loop()

            def follow(streams) -> list[asyncio.Future]:
                by_thread = [loop.run_in_executor(threads, _follow, stream, threaded) for stream in streams[::2]]
                return [*by_thread, *(asyncio.ensure_future(stream.follow(client)) for stream in streams[1::2])]

            following = follow(running)
            await until(lambda: all(stream.times for stream in running), 20, "tokens")
            processes.kill("gateway")
            await asyncio.sleep(1.0)
            following += follow(meanwhile)
            await asyncio.sleep(away_s - 1.0)
            processes.start("gateway")
            ready_at = await processes.ready("gateway")
            await asyncio.gather(*following)
        worst = max((stream.first_after(ready_at) or ready_at) - ready_at for stream in [*running, *meanwhile])
        row.note(f"{assert_equal_to_undisturbed([*running, *meanwhile], Oracle())} tokens equal")
        row.note(f"next token at most {worst:.2f} s after the gateway was there again")


def _follow(stream, client: Client) -> None:
    generation = client.generate(
        stream.prompt, max_tokens=stream.max_tokens, seed=stream.seed, temperature=1.0, ignore_eos=True
    )
    for delta in generation:
        assert delta.first_token_index == len(stream.tokens), "a gap or a repetition"
        stream.tokens += delta.token_ids
        stream.times.append(time.monotonic())
    stream.finish_reason = generation.result().completions[0].finish_reason


@pytest.mark.chaos_full
async def test_a_request_that_kills_executors(row, rng, tmp_path):
    row.about("a request that kills every executor that it reaches", "only it fails, at most 4 restarts")
    oracle, deaths = Oracle(), tmp_path / "deaths"
    deaths.touch()
    extra_environment = {DEATHS_FILE_VARIABLE: str(deaths)}
    async with deployed(executor=SIMULATED, faulty_backend="Mortal", extra_environment=extra_environment) as (
        processes,
        client,
    ):
        supervisor = asyncio.create_task(keep_alive(processes, extra_environment))
        neighbours = jobs(16, rng, output=(100, 140))
        following = [asyncio.create_task(stream.follow(client)) for stream in neighbours]
        await until(lambda: all(stream.times for stream in neighbours), 20, "tokens")
        offender = client.generate([*range(5, 40), DEADLY_TOKEN], max_tokens=50, ignore_eos=True, request_id="offender")
        ended = asyncio.create_task(_outcome(offender))
        try:
            await until(lambda: ended.done() or deaths.stat().st_size > 4, 60, "the brake")
        finally:
            if not ended.done():
                await client.cancel("offender")
            outcome = await ended
            await asyncio.gather(*following)
            supervisor.cancel()
        row.note(f"{deaths.stat().st_size} executors died; the offender ended with {outcome}")
        row.note(f"{assert_equal_to_undisturbed(neighbours, oracle)} tokens of 16 neighbours equal")
        assert deaths.stat().st_size <= 4
        assert "abort" not in outcome


async def _outcome(stream) -> str:
    try:
        completion = (await stream.result()).completions[0]
    except HeadwayError as error:
        return error.code.name
    return f"{completion.finish_reason} ({completion.error})"


async def keep_alive(processes, extra_environment: dict[str, str]) -> None:
    """What a supervisor does: start an executor again that died."""
    while True:
        await until(lambda: not processes.processes["executor"].is_running, 600, "the executor's end")
        processes.start("executor", extra_environment=extra_environment)
