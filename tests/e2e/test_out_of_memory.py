"""A device whose memory does not hold a step answers with smaller steps, not with its death."""

import asyncio
from pathlib import Path

import pytest

import headway
from headway.client import AsyncClient
from headway_executor.backend import BackendConfig, StepBatch, StepOutOfMemoryError, StepResult
from headway_executor.backends.simulated import SimulatedBackend
from headway_executor.startup.threaded_backend import ThreadedBackend
from headway_proto.sampling import SamplingParams
from headway_scheduler.core.state.limits import SchedulerLimits
from threaded_headway import running

DEMO_MODEL = Path(headway.__file__).with_name("demo_model")
MOST_TOKENS = 20


class SmallDevice(SimulatedBackend):
    """Runs steps of at most ``MOST_TOKENS`` tokens."""

    num_refused = 0

    def execute(self, batch: StepBatch) -> StepResult:
        num_tokens = int(batch.num_scheduled_tokens.sum())
        if num_tokens > MOST_TOKENS:
            self.num_refused += 1
            raise StepOutOfMemoryError(num_tokens, "the device holds no more")
        return super().execute(batch)


@pytest.mark.parametrize("max_num_batched_tokens", [16, 256])
async def test_every_stream_is_what_it_would_have_been(tmp_path: Path, max_num_batched_tokens: int) -> None:
    limits = SchedulerLimits(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=16)
    config = BackendConfig(model=str(DEMO_MODEL), num_kv_blocks=512, max_num_seqs=16)
    backend = SmallDevice()
    prompts = [list(range(100 + i, 160 + 3 * i)) for i in range(12)]
    with running(tmp_path, DEMO_MODEL, ThreadedBackend(backend), config, limits) as server:
        async with AsyncClient(server.address) as client:
            await client.wait_ready(20)
            streams = [client.generate(prompt, max_tokens=30, temperature=0.0, ignore_eos=True) for prompt in prompts]
            results = await asyncio.gather(*[stream.result() for stream in streams])
        core = server.core_when_quiet()
    assert [list(result.token_ids) for result in results] == [
        list(backend.token_hash.continuation(prompt, 30, SamplingParams(temperature=0.0))) for prompt in prompts
    ]
    assert core.max_num_batched_tokens <= MOST_TOKENS
    assert bool(backend.num_refused) == (max_num_batched_tokens > MOST_TOKENS)
    # Each answer halves what a step may have, so a few suffice.
    assert backend.num_refused <= 8
