"""``headway serve --roles prefill,decode`` as real processes: hand-offs change no token, nor do changes of roles."""

import asyncio
import random

import pytest

from e2e.running_server import command, eventually
from headway.client import AsyncClient
from served import figures_at, row_of_free_ports

NUM_TOKENS = 150
PROMPTS = [random.Random(number).choices(range(10, 250), k=20 + 9 * number) for number in range(8)]


class Streams:
    """One stream for each prompt."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.tokens: list[list[int]] = [[] for _ in PROMPTS]

    async def run(self) -> list[list[int]]:
        await asyncio.gather(*map(self._follow, range(len(PROMPTS))))
        return self.tokens

    async def _follow(self, number: int) -> None:
        options = {"seed": number, "temperature": 0.8, "ignore_eos": True}
        async for delta in self._client.generate(PROMPTS[number], max_tokens=NUM_TOKENS, **options):
            assert delta.first_token_index == len(self.tokens[number]), "a token is missing or repeated"
            self.tokens[number] += delta.token_ids


async def roles_of(client: AsyncClient) -> list[str]:
    return [executor.role for executor in (await client.status()).executors]


@pytest.mark.parametrize(
    "ranks",
    [
        (),
        pytest.param(("--tensor-parallel", "2"), marks=pytest.mark.deep, id="tensor"),
        pytest.param(("--pipeline-parallel", "2", "--num-threads", "1"), marks=pytest.mark.deep, id="pipeline"),
    ],
)
async def test_prompts_run_here_and_answers_there_with_the_tokens_of_one_executor(ranks: tuple[str, ...]) -> None:
    """With ranks: each brings its part of a block from the same rank of the other executor."""
    flags = (
        "--executors",
        "2",
        "--roles",
        "prefill,decode",
        "--device",
        "cpu",
        "--grpc-address",
        "127.0.0.1:0",
        *ranks,
    )
    port = row_of_free_ports(4)
    with command("serve", *flags, "--metrics-port", str(port)) as server:
        async with AsyncClient(await asyncio.to_thread(server.wait_for_ready, 240)) as client:
            await eventually(lambda: figures_at(port)["headway_epochs_total"] == 2)
            await client.drain_executor(1)
            expected = await Streams(client).run()
            assert figures_at(port)["headway_exported_blocks_total"] == 0, "one executor did it all"
            await client.undrain_executor(1)

            assert await Streams(client).run() == expected
            figures, second = figures_at(port), figures_at(port + 2)
            assert figures["headway_requests_moved_total"] == len(PROMPTS)
            assert figures["headway_pulled_tokens_total"] >= sum(map(len, PROMPTS))
            assert figures["headway_stale_pulls_total"] == 0
            assert second["headway_executor_pulled_blocks_total"] > 0
            assert (await client.status()).policies.placement == "disaggregated"

            streams = Streams(client)
            running = asyncio.create_task(streams.run())
            await eventually(lambda: min(map(len, streams.tokens)) >= 5)
            for executor, role in ((0, "both"), (1, "prefill"), (0, "decode")):
                await client.set_executor_role(executor, role)
            assert await roles_of(client) == ["decode", "prefill"]
            assert await running == expected
            assert figures_at(port)["headway_requests_moved_total"] > 2 * len(PROMPTS), "they went, and came back"
            assert figures_at(port + 1)["headway_executor_pulled_blocks_total"] > 0
        assert server.stop() == 0
    assert [line for line in server.err if "Traceback" in line] == []
