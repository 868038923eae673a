"""The gateway with the real scheduler and the simulated executor, each a process: what only the two real ends can show."""

import asyncio
import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import headway
from headway.client import AsyncClient, GenerationResult, InvalidRequestError, StreamCancelledError

DEMO = Path(headway.__file__).parent / "demo_model"
STREAMS = 16
STEP_US = 4000


class Chain:
    """Scheduler, executor and gateway; each can be killed and started again."""

    def __init__(self, directory: str) -> None:
        ingress, step = f"ipc://{directory}/i", f"ipc://{directory}/s"
        self._flags = {
            "scheduler": ["--ingress-address", ingress, "--step-address", step],
            "executor": [
                *("--step-address", step, "--backend", "simulated", "--model", str(DEMO)),
                *("--backend-option", f"step_base_us={STEP_US}"),
            ],
            "gateway": ["--ingress-address", ingress, "--model", str(DEMO)],
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *flags: str) -> None:
        self.processes[name] = subprocess.Popen(
            [sys.executable, "-m", "headway", name, "--log-level", "error", *self._flags[name], *flags]
        )

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


@pytest.fixture
async def chain(unused_tcp_port: int) -> AsyncIterator[tuple[Chain, AsyncClient]]:
    directory = tempfile.mkdtemp(prefix="hw")
    running = Chain(directory)
    address = f"127.0.0.1:{unused_tcp_port}"
    try:
        running.start("gateway", "--grpc-address", address)
        running.start("scheduler")
        running.start("executor")
        async with AsyncClient(address) as client:
            await client.wait_ready(60)
            yield running, client
    finally:
        running.stop()
        shutil.rmtree(directory)


async def generate_all(client: AsyncClient) -> list[GenerationResult]:
    return await asyncio.gather(
        *(
            client.generate(f"prompt {seed}", seed=seed, max_tokens=150, ignore_eos=True).result()
            for seed in range(STREAMS)
        )
    )


async def until_all_blocks_are_free(client: AsyncClient, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        status = await client.status()
        if status.num_total_blocks and status.num_free_blocks == status.num_total_blocks:
            return
        assert time.monotonic() < deadline, f"{status.num_free_blocks} of {status.num_total_blocks} blocks are free"
        await asyncio.sleep(0.01)


async def test_streams_outlive_a_killed_scheduler_and_a_killed_executor(chain):
    running, client = chain
    undisturbed = await generate_all(client)
    for name in ("scheduler", "executor"):
        disturbed = asyncio.create_task(generate_all(client))
        await asyncio.sleep(0.3)
        running.kill(name)
        running.start(name)
        for before, after in zip(undisturbed, await disturbed, strict=True):
            assert after.token_ids == before.token_ids
            assert after.text == before.text
            assert after.completions[0].finish_reason == "length"
        await until_all_blocks_are_free(client, 3.0)


async def test_leaving_frees_blocks_in_prefill_and_in_decode(chain):
    _, client = chain
    await until_all_blocks_are_free(client, 3.0)
    for num_deltas in (0, 1, 5):
        stream = client.generate([5] * 900, max_tokens=100, ignore_eos=True, n=2)
        for _ in range(num_deltas):
            await anext(stream)
        stream.cancel()
        with pytest.raises(StreamCancelledError):
            await stream.result()
        await until_all_blocks_are_free(client, 1.0)


async def test_what_the_scheduler_alone_can_know(chain):
    _, client = chain
    first = await client.generate([7] * 64, max_tokens=2).result()
    again = await client.generate([7] * 64, max_tokens=2).result()
    assert first.cached_tokens == 0
    assert 0 < again.cached_tokens < 64
    assert again.completions[0].usage.cached_tokens == again.cached_tokens
    timings = again.completions[0].timings
    assert 0 <= timings.queue_ms <= timings.ttft_ms
    assert timings.ttft_ms > STEP_US / 2000
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        await client.generate("x", max_tokens=100_000).result()
    stream = client.generate("x", request_id="mine", ignore_eos=True)
    await anext(stream)
    await client.cancel("mine")
    assert (await stream.result()).completions[0].finish_reason == "abort"
