"""Executors of several ranks: ranks that come apart, and ranks on several hosts.

Owns: the rows of the table about ranks. Must not know: how they agree. ``tests/e2e/test_ranks.py`` kills them.
"""

import asyncio
import contextlib
import re
import time
from pathlib import Path

import pytest

from chaos.faulty_backends import APART_FILE_VARIABLE
from chaos.harness import (
    Deployment,
    Oracle,
    assert_equal_to_undisturbed,
    deployed,
    deployment,
    jobs,
    until,
    until_quiet,
)
from chaos.namespaces import Hosts, hosts, why_not
from headway.client import AsyncClient
from headway.commands.keys import make_keys
from headway_proto.step import DIGEST_INTERVAL_STEPS

TORCH = ("--backend", "torch", "--num-threads", "1")
SIMULATED = ("--backend", "simulated", "--backend-option", "step_base_us=10000", "--tensor-parallel", "2")
EXIT_RANK_LOST = 4


async def test_a_rank_that_draws_another_token(row, rng, tmp_path):
    row.about("one wrong token on rank 1 of 2", "found with the next digest; all begin again; streams equal")
    file = tmp_path / "apart"
    environment = {APART_FILE_VARIABLE: str(file)}
    async with deployed(executor=SIMULATED, faulty_backend="Apart", extra_environment=environment) as (
        processes,
        client,
    ):
        streams = jobs(16, rng, output=(100, 140))
        following = asyncio.gather(*(stream.follow(client) for stream in streams))
        first = processes.processes["executor"]
        await until(lambda: not first.is_running, 30, "the end of both ranks")
        assert first.wait(1) == EXIT_RANK_LOST
        processes.start("executor", extra_environment=environment)
        await following
        assert_equal_to_undisturbed(streams, Oracle())
        said = "".join(line for _, line in first.lines)
        found = re.search(r"rank 1 has other tokens than rank 0 after step (\d+) of epoch", said)
        assert found is not None, said
        num_steps = int(found[1]) - int(file.read_text())
        row.note(f"found after {num_steps} steps")
        assert 0 <= num_steps <= DIGEST_INTERVAL_STEPS


def start_rank(processes: Deployment, network: Hosts, host: str, rank: int, size: int = 2) -> str:
    """Start a rank by hand on a host."""
    name = f"executor-{rank}" if rank else "executor"
    processes.prefixes["executor"] = network.prefix(host)
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": network.address_of["b"],
        "MASTER_PORT": "29500",
    }
    processes.start(name, extra_environment=variables)
    return name


def join_hosts(processes: Deployment, network: Hosts) -> None:
    """Let the scheduler be on host a, reached with keys."""
    keys = str(processes.directory / "keys")
    make_keys(Path(keys))
    step = f"tcp://{network.address_of['a']}:50052"
    processes.addresses["scheduler"][1] = step
    processes.addresses["executor"] = ["--step-address", step, "--curve-keys", f"{keys}/executor"]
    processes.addresses["scheduler"] += ["--curve-keys", f"{keys}/scheduler"]
    processes.addresses["gateway"] += ["--curve-keys", f"{keys}/gateway"]
    processes.prefixes["scheduler"] = network.prefix("a")


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    """The gateway is asked directly, whatever proxy this machine uses."""
    monkeypatch.setenv("no_grpc_proxy", "10.0.0.0/8,127.0.0.1")


@pytest.mark.skipif(bool(why_not()), reason=why_not())
async def test_ranks_on_two_hosts_that_are_cut_apart(row, rng):
    row.about(
        "two ranks on two hosts (namespaces), CURVE, started by hand; no packet between them any more",
        "both end with exit code 4; started again, every stream is equal",
    )
    with hosts(*"abc") as network:
        async with deployment(executor=SIMULATED) as processes:
            join_hosts(processes, network)
            names = [start_rank(processes, network, "bc"[rank], rank) for rank in (0, 1)]
            async with await processes.serve(("scheduler", "gateway")) as client:
                streams = jobs(16, rng, output=(150, 200))
                following = asyncio.gather(*(stream.follow(client) for stream in streams))
                await until(lambda: all(stream.times for stream in streams), 20, "tokens")
                network.cut("b", "c")
                cut_at = time.monotonic()
                both = [processes.processes[name] for name in names]
                await until(lambda: not any(process.is_running for process in both), 30, "the end of both ranks")
                row.note(f"both ended after {time.monotonic() - cut_at:.1f} s")
                assert [process.wait(1) for process in both] == [EXIT_RANK_LOST] * 2
                network.heal("b", "c")
                for rank in (1, 0):
                    start_rank(processes, network, "bc"[rank], rank)
                await following
                row.note(f"{assert_equal_to_undisturbed(streams, Oracle())} tokens equal")
                await until_quiet(client)


async def answers(client: AsyncClient, seed: int) -> list[tuple[int, ...]]:
    """Tokens of the demo model, drawn at random."""
    prompts = ("A dictionary is", "To open a file", "def", "A list of numbers. " * 20)
    asked = {"max_tokens": 60, "temperature": 0.8, "ignore_eos": True}
    streams = [client.generate(prompt, seed=seed + place, **asked) for place, prompt in enumerate(prompts)]
    results = await asyncio.gather(*(stream.result() for stream in streams))
    return [tuple(result.completions[0].token_ids) for result in results]


@contextlib.asynccontextmanager
async def model_on_two_hosts(network: Hosts, where: str, *degrees: str):
    """The demo model served by ranks on these hosts; processes, a client, and how to start all ranks."""
    async with deployment(executor=(*TORCH, *degrees)) as processes:
        join_hosts(processes, network)

        def start_all():
            names = [start_rank(processes, network, host, rank, len(where)) for rank, host in enumerate(where)]
            return [processes.processes[name] for name in names]

        ranks = start_all()
        async with await processes.serve(("scheduler", "gateway")) as client:
            yield ranks, client, start_all
            await until_quiet(client)


async def answers_of_one_rank(seed: int) -> list[tuple[int, ...]]:
    """What all others must answer."""
    async with deployed(executor=TORCH) as (_, client):
        return await answers(client, seed)


@pytest.mark.chaos_quick
@pytest.mark.skipif(bool(why_not()), reason=why_not())
async def test_a_model_on_two_hosts(row, rng):
    row.about("the demo model (torch), two ranks on two hosts (namespaces), CURVE", "the tokens of one rank")
    seed = rng.randrange(1 << 30)
    expected = await answers_of_one_rank(seed)
    with hosts(*"abc") as network:
        async with model_on_two_hosts(network, "bc", "--tensor-parallel", "2") as (_, client, _):
            assert await answers(client, seed) == expected
            row.note(f"{sum(map(len, expected))} tokens equal")


@pytest.mark.chaos_full
@pytest.mark.skipif(bool(why_not()), reason=why_not())
async def test_a_model_on_two_hosts_of_which_one_loses_a_rank(row, rng):
    row.about(
        "the demo model (torch), 2 x 2 ranks on two hosts (namespaces), CURVE; kill -9 one in mid-stream",
        "all ranks end with exit code 4; started again, every stream has the tokens of one rank",
    )
    seed = rng.randrange(1 << 30)
    expected = await answers_of_one_rank(seed)
    degrees = ("--tensor-parallel", "2", "--pipeline-parallel", "2")
    with hosts(*"abc") as network:
        async with model_on_two_hosts(network, "bbcc", *degrees) as (ranks, client, start_all):
            assert await answers(client, seed) == expected
            following = asyncio.create_task(answers(client, seed))
            await asyncio.sleep(rng.uniform(0.0, 0.3))
            ranks[-1].kill()
            killed_at = time.monotonic()
            await until(lambda: not any(rank.is_running for rank in ranks), 30, "the end of all ranks")
            row.note(f"all ended {time.monotonic() - killed_at:.1f} s after one was killed")
            assert [rank.wait(1) for rank in ranks[:-1]] == [EXIT_RANK_LOST] * 3
            start_all()
            assert await following == expected
            row.note(f"{sum(map(len, expected))} tokens equal, twice")
