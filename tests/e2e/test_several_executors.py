"""``headway serve --executors 2`` as real processes: one executor is killed under load, and comes back."""

import asyncio
import contextlib
import random

import psutil

from e2e.running_server import Command, command, eventually
from headway.client import AsyncClient
from headway_process.fleet_numbers import EXECUTOR_VARIABLE
from served import figures_at, row_of_free_ports

NUM_STREAMS = 16
NUM_TOKENS = 100
NUM_BEFORE_THE_KILL = 30
SIMULATED = ("--backend", "simulated", "--backend-option", "step_base_us=10000", "--grpc-address", "127.0.0.1:0")
PROMPTS, OTHERS = (
    [random.Random(number).choices(range(1, 1000), k=40) for number in range(first, first + NUM_STREAMS)]
    for first in (0, NUM_STREAMS)
)


def executors_of(server: Command) -> dict[int, psutil.Process]:
    found = {}
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.Error):
            number = child.environ().get(EXECUTOR_VARIABLE)
            if number is not None:
                found[int(number)] = child
    return found


def rows_run_by(port: int) -> float:
    """The rows of all steps of the executor with this metrics port; 0 while it is away."""
    try:
        return figures_at(port).get("headway_executor_step_rows_sum", 0.0)
    except OSError:
        return 0.0


class Streams:
    """As many streams as there are prompts."""

    def __init__(self, client: AsyncClient, prompts: list[list[int]] = PROMPTS) -> None:
        self._client = client
        self._prompts = prompts
        self.tokens: list[list[int]] = [[] for _ in prompts]

    async def run(self) -> list[list[int]]:
        await asyncio.gather(*(self._follow(number) for number in range(len(self._prompts))))
        return self.tokens

    async def _follow(self, number: int) -> None:
        options = {"seed": number, "temperature": 1.0, "ignore_eos": True}
        async for delta in self._client.generate(self._prompts[number], max_tokens=NUM_TOKENS, **options):
            assert delta.first_token_index == len(self.tokens[number]), "a token is missing or repeated"
            self.tokens[number] += delta.token_ids


def num_joined(server: Command) -> int:
    """How often an executor has joined: ready says that the processes live, not that the scheduler has them."""
    return sum("reason='an executor joined'" in line for line in server.err)


async def test_a_killed_executor_loses_nothing_and_works_again_when_it_is_back() -> None:
    port = row_of_free_ports(4)
    with command("serve", "--executors", "2", *SIMULATED, "--metrics-port", str(port)) as server:
        executors = (port + 1, port + 2)
        async with AsyncClient(await asyncio.to_thread(server.wait_for_ready)) as client:
            await eventually(lambda: num_joined(server) == 2)
            undisturbed = await Streams(client).run()
            assert all(map(rows_run_by, executors)), "both executors had work"
            before = executors_of(server)
            assert set(before) == {0, 1}

            streams = Streams(client)
            running = asyncio.create_task(streams.run())
            await eventually(lambda: min(map(len, streams.tokens)) >= NUM_BEFORE_THE_KILL)
            before[1].kill()
            assert await running == undisturbed

            await eventually(lambda: num_joined(server) == 3)
            num_rows = rows_run_by(executors[1])
            assert await Streams(client).run() == undisturbed
            # The other one has those prompts in its cache, so it may be the faster one for all of them.
            await Streams(client, OTHERS).run()
            told = "\n".join(server.err[-20:])
            assert rows_run_by(executors[1]) > num_rows, f"the one that is back took work; the scheduler said {told}"
        after = executors_of(server)
        assert after[0] == before[0], "nobody has touched the other one"
        assert after[1] != before[1]
        (ended,) = (line for line in server.err if "executor-1 ended" in line)
        assert "executor-1 ended (signal 9); starting it again" in ended
        assert server.stop() == 0
    assert [line for line in server.err if "Traceback" in line] == []
