"""What surrounds the processes: logs that nobody takes, clocks that jump, and operators who stop them in haste.

Owns: the rows of the table about the host. Must not know: how the product writes logs, tells the time or stops.
"""

import asyncio
import os
import signal
import struct
import time
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chaos.harness import (
    DEMO_MODEL,
    Oracle,
    Stream,
    Traffic,
    assert_equal_to_undisturbed,
    deployed,
    deployment,
    jobs,
    until,
)
from e2e.running_server import Command, command, sockets_in
from headway.client import AsyncClient

SIMULATED = ("--backend", "simulated", "--backend-option", "step_base_us=20000")
SERVED = (*SIMULATED, "--grpc-address", "127.0.0.1:0")
SHIFTED_CLOCK = Path(__file__).with_name("shifted_clock")


# --------------------------------------------------------------------------------------------------------------- logs


async def _served_all_the_same(stderr: int, row, rng) -> None:
    streams = jobs(16, rng)
    async with deployment(executor=SIMULATED) as processes:
        processes.flags["gateway"] += ["--log-level", "debug"]
        async with await processes.serve(stderr=stderr) as client:
            await asyncio.gather(*(stream.follow(client) for stream in streams))
            # The scheduler has something to say of each of these.
            processes.kill("executor")
            processes.start("executor", stderr=stderr)
            again = jobs(16, rng)
            await asyncio.gather(*(stream.follow(client) for stream in again))
            alive = [name for name, process in processes.processes.items() if process.is_running]
        row.note(
            f"{assert_equal_to_undisturbed([*streams, *again], Oracle())} tokens equal; {len(alive)} processes alive"
        )
        assert set(processes.stop().values()) == {0}


@pytest.mark.chaos_full
async def test_a_full_log_disk(row, rng):
    row.about("stderr of every process on a full disk (/dev/full), an executor killed meanwhile", "serving unaffected")
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        await asyncio.wait_for(_served_all_the_same(full, row, rng), 60)
    finally:
        os.close(full)


async def test_a_closed_log_pipe(row, rng):
    row.about("stderr of every process is a pipe that nobody reads any more", "serving unaffected")
    reading, writing = os.pipe()
    os.close(reading)
    try:
        await asyncio.wait_for(_served_all_the_same(writing, row, rng), 60)
    finally:
        os.close(writing)


# -------------------------------------------------------------------------------------------------------------- clock


@pytest.mark.chaos_full
async def test_the_wall_clock_jumps(row, rng, tmp_path):
    row.about("wall clock of every process +1 h, then -1 h, under 16 streams", "no effect")
    offset = tmp_path / "offset"
    offset.write_bytes(struct.pack("<d", 0.0))
    paths = os.pathsep.join([str(SHIFTED_CLOCK), os.environ.get("PYTHONPATH", "")])
    shifted = {"PYTHONPATH": paths, "CHAOS_CLOCK_FILE": str(offset)}
    async with deployed(executor=SIMULATED, extra_environment=shifted) as (processes, client):
        async with Traffic(client, 16, rng) as traffic:
            epoch = (await client.status()).epoch
            worst, jumps = 0.0, (3600.0, 0.0, -3600.0, 0.0)
            for jump_s in jumps:
                offset.write_bytes(struct.pack("<d", jump_s))
                worst = max(worst, await traffic.recovered(time.monotonic()))
                await asyncio.sleep(1)
            epochs = (await client.status()).epoch - epoch
        row.note(traffic.assert_exact(Oracle()))
        row.note(f"{len(jumps)} jumps: next token within {worst * 1e3:.0f} ms, {epochs} new epochs")
        seen = [process.said("wall clock can be shifted") is not None for process in processes.processes.values()]
        assert all(seen), "the shift did not reach every process"
    assert epochs == 0
    assert worst <= 0.5


# --------------------------------------------------------------------------------------------------------------- stop


async def _under_load(address: str, rng, count: int, output=(60, 90)) -> tuple[AsyncClient, list[Stream], list]:
    client = AsyncClient(address)
    await client.wait_ready(30)
    streams = jobs(count, rng, output=output)
    tasks = [asyncio.create_task(stream.follow(client)) for stream in streams]
    await until(lambda: all(stream.times for stream in streams), 20, "tokens")
    return client, streams, tasks


async def _health_after_stop(address: str) -> tuple[str, float]:
    """What health says first once it no longer says SERVING, and when."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        async for answer in stub.Watch(health_pb2.HealthCheckRequest(service="headway.v1.Generation")):
            name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
            if name != "SERVING":
                return name, time.monotonic()
    return "nothing", time.monotonic()


def _assert_gone(server: Command, directory: Path) -> None:
    assert sockets_in(directory) == []
    assert [line for line in server.err if "Traceback" in line] == []


@pytest.mark.chaos_full
async def test_sigterm_under_load(row, rng, tmp_path):
    row.about("SIGTERM to headway serve under 16 streams", "NOT_SERVING first; accepted work finishes; exit code 0")
    with command("serve", *SERVED, TMPDIR=str(tmp_path)) as server:
        address = await asyncio.to_thread(server.wait_for_ready)
        client, streams, tasks = await _under_load(address, rng, 16)
        watching = asyncio.create_task(_health_after_stop(address))
        await asyncio.sleep(0.1)
        stopped_at = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        said, said_at = await watching
        await asyncio.gather(*tasks)
        await client.close()
        code = await asyncio.to_thread(server.wait)
        took = time.monotonic() - stopped_at
        _assert_gone(server, tmp_path)
    row.note(
        f"{said} after {(said_at - stopped_at) * 1e3:.0f} ms; {assert_equal_to_undisturbed(streams, Oracle())} tokens equal"
    )
    row.note(f"exit code {code} after {took:.1f} s")
    last_token_at = max(stream.times[-1] for stream in streams)
    assert (said, code) == ("NOT_SERVING", 0)
    assert said_at < last_token_at


async def test_sigterm_twice_under_load(row, rng, tmp_path):
    row.about("SIGTERM twice to headway serve under 16 streams", "ends at once, exit code 143")
    with command("serve", *SERVED, TMPDIR=str(tmp_path)) as server:
        address = await asyncio.to_thread(server.wait_for_ready)
        client, _, tasks = await _under_load(address, rng, 16, output=(900, 900))
        children = server.children()
        server.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        asked_at = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(server.wait)
        took = time.monotonic() - asked_at
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()
        row.note(f"exit code {code} after {took:.2f} s; {sum(c.is_running() for c in children.values())} children left")
        assert not any(child.is_running() for child in children.values())
        _assert_gone(server, tmp_path)
    assert code == 128 + signal.SIGTERM
    assert took < 2


@pytest.mark.chaos_full
async def test_an_executor_killed_while_draining(row, rng, tmp_path):
    row.about(
        "SIGTERM to headway serve under 16 streams, and kill -9 the executor meanwhile",
        "accepted work finishes within grace; exit code right",
    )
    with command("serve", *SERVED, TMPDIR=str(tmp_path)) as server:
        address = await asyncio.to_thread(server.wait_for_ready)
        client, streams, tasks = await _under_load(address, rng, 16)
        executor = server.children()["executor"]
        server.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        executor.kill()
        done, pending = await asyncio.wait(tasks, timeout=10)
        for task in pending:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()
        if pending:
            server.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(server.wait)
        finished = [task for task in done if task.exception() is None]
        row.note(f"{len(finished)} of {len(tasks)} streams finished; exit code {code}")
        assert len(finished) == len(tasks)
        row.note(f"{assert_equal_to_undisturbed(streams, Oracle())} tokens equal")
    assert code == 0


# --------------------------------------------------------------------------------------------------------- real model


@pytest.mark.chaos_full
async def test_the_demo_model_under_kills(row, rng):
    row.about("the demo model (torch), kill -9 executor, then scheduler, 8 streams", "every stream completes equal")
    prompts = [
        "A dictionary is",
        "To open a file",
        "The str.split method",
        "An exception",
        "A list",
        "In Python",
        "The",
        "def",
    ]
    asked = {"max_tokens": 400, "temperature": 0.8, "seed": rng.randrange(1 << 32), "ignore_eos": True}

    async def read(stream, tokens: list[int]) -> None:
        async for delta in stream:
            assert delta.first_token_index == len(tokens)
            tokens += delta.token_ids

    async def all_of_them(client, outputs: list[list[int]]) -> None:
        streams = [client.generate(text, **asked) for text in prompts]
        await asyncio.gather(*(read(stream, tokens) for stream, tokens in zip(streams, outputs, strict=True)))

    async with deployed(executor=("--backend", "torch", "--model", str(DEMO_MODEL))) as (processes, client):
        undisturbed: list[list[int]] = [[] for _ in prompts]
        await all_of_them(client, undisturbed)
        for victim in ("executor", "scheduler"):
            await client.wait_ready(30)
            outputs: list[list[int]] = [[] for _ in prompts]
            disturbed = asyncio.create_task(all_of_them(client, outputs))
            least = rng.randint(1, 100)
            await until(lambda outputs=outputs, least=least: min(map(len, outputs)) >= least, 20, "tokens")
            processes.kill(victim)
            held = sum(map(len, outputs))
            processes.start(victim)
            await disturbed
            assert outputs == undisturbed
            row.note(f"{victim} killed after {held} of {sum(map(len, undisturbed))} tokens: all equal")
            assert held < sum(map(len, undisturbed))
