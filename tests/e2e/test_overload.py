"""More than may wait: refused at once, with the time to come again, and nobody else the worse for it."""

import asyncio
import time
from pathlib import Path

import pytest

import headway
from headway.client import AsyncClient, OverloadedError
from headway_executor.backend import BackendConfig
from headway_executor.backends.simulated import SimulatedBackend
from headway_executor.startup.threaded_backend import ThreadedBackend
from headway_scheduler.core.state.limits import SchedulerLimits
from threaded_headway import running

DEMO_MODEL = Path(headway.__file__).with_name("demo_model")
CONFIG = BackendConfig(model=str(DEMO_MODEL), num_kv_blocks=512, max_num_seqs=2, options={"step_base_us": "10000"})


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_num_waiting": 3}, "3 requests are waiting; allowed: 3"),
        ({"max_waiting_tokens": 30}, "30 tokens are waiting, and these 10 are too many; allowed: 30"),
        ({"max_tenant_waiting": 3}, "3 requests of tenant 'busy' are waiting; allowed: 3"),
    ],
)
async def test_who_finds_no_room_is_told_at_once_when_to_come_again(
    tmp_path: Path, limits: dict[str, int], message: str
) -> None:
    settings = SchedulerLimits(max_num_batched_tokens=64, max_num_seqs=2, **limits)
    with running(tmp_path, DEMO_MODEL, ThreadedBackend(SimulatedBackend()), CONFIG, settings) as server:
        async with AsyncClient(server.address) as client:
            await client.wait_ready(20)

            async def ask(number: int, max_tokens: int, tenant: str = "busy") -> int:
                prompt = list(range(number, number + 10))
                result = await client.generate(prompt, max_tokens=max_tokens, ignore_eos=True, tenant=tenant).result()
                return len(result.token_ids)

            running_ones = [asyncio.create_task(ask(number, 60)) for number in range(2)]
            await asyncio.sleep(0.2)
            waiting = [asyncio.create_task(ask(number, 5)) for number in range(3)]
            await asyncio.sleep(0.1)
            took = []
            for number in range(5):
                started = time.perf_counter()
                with pytest.raises(OverloadedError) as refusal:
                    await ask(number, 5)
                took.append(time.perf_counter() - started)
                assert message in str(refusal.value)
                assert refusal.value.retry_after_s is not None
                assert 0.1 <= refusal.value.retry_after_s <= 60
            assert min(took) < 0.05
            if "max_tenant_waiting" in limits:
                assert await ask(9, 5, tenant="modest") == 5
            assert await asyncio.gather(*running_ones, *waiting) == [60, 60, 5, 5, 5]
            assert await ask(1, 5) == 5, "there is room again"
